"""Spans of flow runs in a process that has an OpenTelemetry SDK."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from rlm_batch import ExecutionsFailed, batch, rlm
from rlm_batch.deployments.deploy import deploy
from rlm_batch.tasks import tracing

from ...infra.consent import move_home
from ...infra.listening import run_with_listener
from ...infra.scripted_turns import make_script
from ...infra.workers import Worker, wait_until_online
from ...standins.openai_chat import ChatServer, Reply
from ..conftest import OutputListener

pytestmark = [pytest.mark.anyio, pytest.mark.full]

NAME = "openai/gpt-4o-mini"
CODE = """
if x == 2:
    raise ValueError("a secret of the code's")
SUBMIT(answers=llm_query_batched([f"a secret question {x}", "another"]))
"""


class Exported:
    """The spans that this process has exported: the project's and Prefect's."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    @property
    def spans(self) -> Sequence[Any]:
        return self.exporter.get_finished_spans()

    def find(self, name: str, **attributes: Any) -> list[Any]:
        """Return the project's spans by name and attributes. Underscores replace the dots of attribute names."""
        found = [span for span in self.spans if read_scope(span) == "rlm_batch" and span.name == name]
        for key, value in attributes.items():
            found = [span for span in found if span.attributes.get(key.replace("_", ".", 1)) == value]
        return found


def read_id(span: Any) -> int:
    return span.context.span_id


def read_parent(span: Any) -> int | None:
    return None if span.parent is None else span.parent.span_id


def read_scope(span: Any) -> str:
    return span.instrumentation_scope.name


@pytest.fixture
def exported(chat: ChatServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    """Install an SDK until the test ends, as `trace.set_tracer_provider` does."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)
    exported, provider = Exported(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported.exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "TRACER", trace.get_tracer("rlm_batch"))
    yield exported
    provider.shutdown()


async def test_a_batchs_trace_has_executions_and_queries_with_their_cost(chat, exported):
    with pytest.raises(ExecutionsFailed):
        await batch(CODE, inputs=[{"x": x} for x in range(4)], language_model=NAME, max_workers=2, reuse_sandboxes=True)
    (run,) = exported.find("invoke_workflow rlm-batch")
    assert (run.status.is_ok, run.status.description) == (False, None)
    assert run.attributes["error.type"] == "ExecutionsFailed"
    assert run.attributes["gen_ai.workflow.name"] == "rlm-batch"
    assert (run.attributes["rlm_batch.executions"], run.attributes["rlm_batch.executions.failed"]) == (4, 1)
    executions = exported.find("execute_tool python")
    # Parents, from the inside out: the task run's span, the project's span of the flow run, and Prefect's span.
    by_id: dict[int | None, Any] = {read_id(span): span for span in exported.spans}
    task_runs = [by_id[read_parent(span)] for span in executions]
    assert [(read_scope(span), read_parent(span)) for span in task_runs] == [("prefect", read_id(run))] * 4
    flow_run = by_id[read_parent(run)]
    assert (read_scope(flow_run), read_parent(flow_run)) == ("prefect", None)
    assert {span.context.trace_id for span in exported.spans} == {run.context.trace_id}
    by_index = {span.attributes["rlm_batch.execution.index"]: span for span in executions}
    assert sorted(by_index) == [0, 1, 2, 3]
    assert [by_index[index].status.is_ok for index in range(4)] == [True, True, False, True]
    assert by_index[2].attributes["error.type"] == "CodeError"
    assert all(span.attributes["rlm_batch.sandbox.id"] for span in executions)
    chats = exported.find("chat gpt-4o-mini")
    # Each execution with queries has two chat spans, also in reused sandboxes.
    assert Counter(map(read_parent, chats)) == {read_id(by_index[index]): 2 for index in (0, 1, 3)}
    assert {span.kind for span in chats} == {SpanKind.CLIENT}
    assert {span.attributes["gen_ai.provider.name"] for span in chats} == {"openai"}
    assert {span.attributes["gen_ai.operation.name"] for span in chats} == {"chat"}
    assert {span.attributes["gen_ai.response.finish_reasons"] for span in chats} == {("stop",)}
    tokens = sum(span.attributes["gen_ai.usage.input_tokens"] for span in chats)
    assert tokens == chat.stats.prompt_tokens == run.attributes["rlm_batch.usage.input_tokens"]
    cost = sum(span.attributes["gen_ai.usage.cost"] for span in chats)
    assert cost == pytest.approx(run.attributes["rlm_batch.usage.cost"])
    assert cost > 0
    # The spans contain neither prompts nor error messages.
    assert not any("secret" in span.to_json() for span in exported.spans if read_scope(span) == "rlm_batch")

    chat.rule("half", Reply("an answer", finish_reason="length"))
    exported.exporter.clear()
    await batch(["llm_query_batched(['half a pair'], on_error='return')"], language_model=NAME)
    (asked,) = exported.find("chat gpt-4o-mini")
    assert asked.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert asked.attributes["error.type"] == "EmptyAnswerError"


async def test_a_recursive_query_is_an_agent_span_with_its_calls(chat, exported):
    chat.rule("flat", "forty-two")
    chat.script = make_script(
        ("Turns left: 19.", "SUBMIT(answer=rlm_query('the deeper one'))"),
        ("the deeper one", "SUBMIT(answer=llm_query('flat'))"),
        ("", "print(len('first'))"),
    )
    answer = await rlm("What is it?", NAME)
    assert answer.answer == "forty-two"
    (execution,) = exported.find("execute_tool python")
    outer, inner = sorted(exported.find("invoke_agent rlm"), key=lambda span: span.attributes["rlm_batch.query.depth"])
    # The span of each recursive query is below the span of the query's task run.
    parents: dict[int | None, int | None] = {read_id(span): read_parent(span) for span in exported.spans}
    assert (parents[read_parent(outer)], parents[read_parent(inner)]) == (read_id(execution), read_id(outer))
    chats = exported.find("chat gpt-4o-mini")
    assert Counter(map(read_parent, chats)) == {read_id(outer): 2, read_id(inner): 2}
    tokens = [span.attributes["gen_ai.usage.input_tokens"] for span in chats if read_parent(span) == read_id(outer)]
    assert outer.attributes["gen_ai.usage.input_tokens"] == sum(tokens)
    # The ledger has the same tokens for each turn.
    usages = [turn["usage"] for turn in answer.trajectory]
    assert [usage["calls"] for usage in usages] == [1, 1]
    assert sum(usage["prompt_tokens"] for usage in usages) == outer.attributes["gen_ai.usage.input_tokens"]
    (below,) = answer.queries.tree[0]["queries"]
    assert below["turn"] == 2


async def test_spans_of_cancelled_executions_end_with_an_error(exported):
    code, output = "import time; print('started', flush=True); time.sleep(1000)", OutputListener()
    run = asyncio.create_task(run_with_listener(batch, output, [code] * 2, max_workers=2))
    await output.wait_for(2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    ended = exported.find("execute_tool python", error_type="CancelledError")
    assert len(ended) == 2
    assert not any(span.status.is_ok for span in [*ended, *exported.find("invoke_workflow rlm-batch")])


async def test_shard_runs_are_in_the_trace_of_their_job(exported, server, tmp_path, monkeypatch):
    await deploy()
    file = tmp_path / "spans"
    environment = move_home(tmp_path / "user", allowed_paths=[str(tmp_path)]) | {"SPANS": str(file)}
    program = Path(environment["PYTHONPATH"], "sitecustomize.py")
    program.write_text(program.read_text() + SET_UP)
    with Worker(tmp_path / "machine", server, "worker-of-traces", limit=2, environment=environment) as worker:
        await wait_until_online(worker.name)
        results = await batch(
            "SUBMIT(x=x)", inputs=[{"x": x} for x in range(4)], shards=2, results_path=str(tmp_path / "shared")
        )
    assert [result.x for result in results] == [0, 1, 2, 3]
    (run,) = exported.find("invoke_workflow rlm-batch")
    # The server's schedule may have run `reap` on this worker too, in another trace.
    trace_id, run_id = f"0x{run.context.trace_id:032x}", f"0x{read_id(run):016x}"
    lines = map(json.loads, file.read_text().splitlines())
    spans = [span for span in lines if span["context"]["trace_id"] == trace_id]
    parents = {span["context"]["span_id"]: span["parent_id"] for span in spans}
    shards = [span for span in spans if span["name"] == "invoke_workflow rlm-shard"]
    # The span of each shard is below Prefect's span of the shard's flow run.
    assert [parents[shard["parent_id"]] for shard in shards] == [run_id] * 2
    assert sum(span["name"] == "execute_tool python" for span in spans) == 4
    assert {span["parent_id"] for span in spans} - parents.keys() == {run_id}


SET_UP = """
import os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

if "SPANS" in os.environ:
    file = open(os.environ["SPANS"], "a")
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + chr(10))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
"""
BATCH = "import rlm_batch\nprint(rlm_batch.batch.sync(['SUBMIT(x=1)'])[0].x)\n"


def read_lineage(spans: list[dict[str, Any]]) -> list[str]:
    """Return the names of the only execution's span and of its ancestors."""
    by_id: dict[str | None, dict[str, Any]] = {span["context"]["span_id"]: span for span in spans}
    (span,) = [span for span in spans if span["name"] == "execute_tool python"]
    lineage = [span["name"]]
    while span := by_id.get(span["parent_id"], {}):
        lineage.append(span["name"])
    return lineage


def test_a_program_with_its_own_opentelemetry_setup_gets_spans(server: str, tmp_path: Path) -> None:
    for is_on, levels in (("true", 4), ("false", 2)):
        file = tmp_path / is_on
        environment = os.environ | {"SPANS": str(file), "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": is_on}
        done = subprocess.run(
            [sys.executable, "-c", "import rlm_batch.flows.batch\n" + SET_UP + BATCH],
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.stdout == "1\n", done.stderr
        lineage = read_lineage([json.loads(line) for line in file.read_text().splitlines()])
        own = [name for name in lineage if name in {"execute_tool python", "invoke_workflow rlm-batch"}]
        assert (len(lineage), own) == (levels, ["execute_tool python", "invoke_workflow rlm-batch"])


def test_tracing_without_a_configured_sdk_imports_no_sdk() -> None:
    code = (
        "import sys, rlm_batch.flows.batch\n"
        "from rlm_batch.tasks.tracing import trace_flow_run\n"
        "with trace_flow_run():\n    pass\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=110)
    assert (done.stdout, done.stderr) == ("[]\n", "")
