"""What a tracing backend gets of flow runs, where its endpoint is set."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlm_batch import ExecutionsFailed, batch, rlm
from rlm_batch.deployments.deploy import deploy
from rlm_batch.tasks.tracing import span_sender
from rlm_batch.tasks.tracing.span_sender import SEND_SECONDS

from ...infra.scripted_turns import make_script
from ...infra.workers import Worker, wait_until_online
from ...standins.otlp import SpanReceiver
from ..conftest import OutputListener

pytestmark = [pytest.mark.anyio, pytest.mark.full]

NAME = "openai/gpt-4o-mini"
CODE = """
if x == 2:
    raise ValueError("a secret of the code's")
SUBMIT(answers=llm_query_batched([f"a secret question {x}", "another"]))
"""


@pytest.fixture
def receiver(chat, monkeypatch) -> Iterator[SpanReceiver]:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)
    monkeypatch.setattr(span_sender, "SEND_SECONDS", 90.0)
    with SpanReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


async def test_a_batch_is_a_trace_of_its_executions_and_their_queries_with_tokens_and_cost(
    chat, receiver, monkeypatch, caplog
):
    with pytest.raises(ExecutionsFailed):
        await batch(CODE, inputs=[{"x": x} for x in range(4)], language_model=NAME, max_workers=2, reuse_sandboxes=True)
    (run,) = receiver.find("invoke_workflow batch")
    assert (run.parent, run.service, run.is_error, run.attributes["error.type"]) == (
        "", "rlm-batch", True, "ExecutionsFailed"
    )  # fmt: skip
    assert run.attributes["gen_ai.workflow.name"] == "batch"
    assert (run.attributes["rlm_batch.executions"], run.attributes["rlm_batch.executions.failed"]) == (4, 1)
    assert {span.trace for span in receiver.spans} == {run.trace}
    executions = receiver.find("execute_tool python")
    assert [span.parent for span in executions] == [run.id] * 4
    by_index = {span.attributes["rlm_batch.execution.index"]: span for span in executions}
    assert sorted(by_index) == [0, 1, 2, 3]
    assert [by_index[index].is_error for index in range(4)] == [False, False, True, False]
    assert by_index[2].attributes["error.type"] == "CodeError"
    chats = receiver.find("chat gpt-4o-mini", gen_ai_provider_name="openai", gen_ai_operation_name="chat")
    # Two below each execution, in sandboxes that served one before.
    assert sorted(span.parent for span in chats) == sorted([by_index[index].id for index in (0, 1, 3)] * 2)
    assert all(span.is_client for span in chats)
    tokens = sum(span.attributes["gen_ai.usage.input_tokens"] for span in chats)
    assert tokens == chat.stats.prompt_tokens == run.attributes["rlm_batch.usage.input_tokens"]
    cost = sum(span.attributes["gen_ai.usage.cost"] for span in chats)
    assert cost == pytest.approx(run.attributes["rlm_batch.usage.cost"])
    assert cost > 0
    assert "secret" not in repr(receiver.spans)  # neither prompts nor what errors say
    assert "span" not in caplog.text

    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")
    chat.rule("half", "an answer")
    receiver.spans.clear()
    await batch(["llm_query('half a pair')"], language_model=NAME)
    (asked,) = receiver.find("chat gpt-4o-mini")
    assert asked.service == "mine"
    (message,) = json.loads(asked.attributes["gen_ai.input.messages"])
    assert message == {"role": "user", "parts": [{"type": "text", "content": "half a pair"}]}
    (message,) = json.loads(asked.attributes["gen_ai.output.messages"])
    assert message == {
        "role": "assistant", "parts": [{"type": "text", "content": "an answer"}], "finish_reason": "stop"
    }  # fmt: skip


async def test_a_recursive_query_is_an_agent_with_the_calls_of_its_turns_and_of_its_code_below_it(chat, receiver):
    chat.rule("flat", "forty-two")
    chat.script = make_script(
        ("[[ ## iteration ## ]]\n2/20", "SUBMIT(answer=rlm_query('the deeper one'))"),
        ("the deeper one", "SUBMIT(answer=llm_query('flat'))"),
        ("", "print(len('first'))"),
    )
    answer = await rlm("What is it?", NAME)
    assert answer.answer == "forty-two"
    (execution,) = receiver.find("execute_tool python")
    outer, inner = sorted(receiver.find("invoke_agent rlm"), key=lambda span: span.attributes["rlm_batch.query.depth"])
    assert (outer.parent, inner.parent) == (execution.id, outer.id)
    chats = receiver.find("chat gpt-4o-mini")
    assert sorted(span.parent for span in chats) == sorted([outer.id, outer.id, inner.id, inner.id])
    of_turns = [span for span in chats if span.parent == outer.id]
    assert outer.attributes["gen_ai.usage.input_tokens"] == sum(
        span.attributes["gen_ai.usage.input_tokens"] for span in of_turns
    )
    # The same stands in the ledger, turn by turn.
    usages = [turn["usage"] for turn in answer.trajectory]
    assert [usage["calls"] for usage in usages] == [1, 1]
    assert sum(usage["prompt_tokens"] for usage in usages) == outer.attributes["gen_ai.usage.input_tokens"]
    (below,) = answer.queries.tree[0]["queries"]
    assert below["turn"] == 2


async def test_executions_that_are_cancelled_have_ended_with_an_error_when_the_run_is_over(receiver):
    code, output = "import time; print('started', flush=True); time.sleep(1000)", OutputListener()
    run = asyncio.create_task(batch.with_listener(output)([code] * 2, max_workers=2))
    await output.wait_for(2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    ended = receiver.find("execute_tool python", error_type="CancelledError")
    assert len(ended) == 2
    assert all(span.is_error for span in [*ended, *receiver.find("invoke_workflow batch")])


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("refuses", "within 2 s"),
        ("hangs", "within 2 s"),
        ("fails", "it answered 500"),
        ("is no URL", "could not be sent"),
        ("is half a URL", "no spans are sent: ValueError"),
        ("speaks gRPC", "none are sent"),
    ],
)
async def test_an_endpoint_that_takes_no_spans_costs_a_run_a_line_and_two_seconds(
    receiver, closed_address, trouble, reason, monkeypatch, caplog, capfd
):
    if reason == "within 2 s":
        monkeypatch.setattr(span_sender, "SEND_SECONDS", SEND_SECONDS)
    receiver.hangs, receiver.status = trouble == "hangs", 500 if trouble == "fails" else 200
    if trouble == "refuses":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:a-secret@{closed_address}/?key=a-secret")
    if trouble == "is no URL":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nonsense")
    if trouble == "is half a URL":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1")
    if trouble == "speaks gRPC":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    (result,) = await batch(["SUBMIT(x=1)"])
    assert result.x == 1
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert reason in lines[0]
    assert "secret" not in caplog.text
    assert "opentelemetry" not in capfd.readouterr().err.lower()


def test_without_an_endpoint_nothing_of_the_sdk_is_imported():
    code = (
        "import asyncio, sys, rlm_batch, rlm_batch.flows.batch\n"
        "from rlm_batch.tasks.tracing.run_trace import open_run_trace, find_run_tracer\n"
        "async def main():\n    async with open_run_trace(print):\n        assert find_run_tracer() is None\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=110)
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_the_runs_of_shards_are_in_the_trace_of_their_job(receiver, server, tmp_path):
    await deploy()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "RLM_BATCH_ALLOWED_PATHS": str(tmp_path),
    }
    port = int(receiver.url.rpartition(":")[2])
    machine = tmp_path / "machine"
    with Worker(machine, server, "worker-of-traces", limit=2, ports=[port], environment=environment) as worker:
        await wait_until_online(worker.name)
        results = await batch(
            "SUBMIT(x=x)", inputs=[{"x": x} for x in range(4)], shards=2, results_path=str(tmp_path / "shared")
        )
    assert [result.x for result in results] == [0, 1, 2, 3]
    (run,) = receiver.find("invoke_workflow batch")
    shards = receiver.find("invoke_workflow shard")
    assert [shard.parent for shard in shards] == [run.id] * 2
    executions = receiver.find("execute_tool python")
    assert sorted(span.parent for span in executions) == sorted([shard.id for shard in shards] * 2)
    # The server's schedule may have run `reap` on this worker too, in a trace of its own.
    assert {span.trace for span in [*shards, *executions]} == {run.trace}
