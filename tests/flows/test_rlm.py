"""The rlm flow."""

import itertools
import math
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

from rlm_batch import (
    CodeError,
    DeadlineExceeded,
    ExecutionsFailed,
    LocalSandbox,
    batch,
    load_report,
    rlm,
)
from rlm_batch.sandbox.outcomes.outcome_json import get_status

from ..infra.programs import run_program
from ..infra.scripted_turns import MARK, format_turn, make_hanging_script, make_script
from ..infra.waiting import HANG_SECONDS, wait_until
from ..standins.openai_chat import Reply
from .conftest import read_ledger

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai")]

NAME = "openai/gpt-4o-mini"


async def test_a_question_about_a_text_returns_answer_trajectory_and_query_tree(chat):
    chat.rule("Which number", "forty-two")
    chat.script = make_script(
        ("Turns left: 19.", "SUBMIT(answer=llm_query('Which number? ' + line))"),
        ("", "line = [l for l in context.splitlines() if 'magic' in l][0]\nprint(line)"),
    )
    text = "\n".join(f"line {i}" for i in range(2000)) + "\nthe magic number is 42\n"
    answer = await rlm("What is the magic number?", NAME, text)
    assert (answer.answer, str(answer)) == ("forty-two", "forty-two")
    assert [turn["output"] for turn in answer.trajectory] == [
        "the magic number is 42",
        "FINAL: 'forty-two'",
    ]
    assert answer.queries.calls == 3 == chat.stats.requests
    *turns, line = read_ledger(answer.results_path)
    assert [(turn["status"], turn["number"]) for turn in turns] == [("turn", 1), ("turn", 2)]
    (root,) = line["meta"]["queries"]["tree"]
    assert line["outputs"] == {"answer": "forty-two"}
    assert (root["kind"], root["depth"], root["calls"], len(root["trajectory"])) == ("rlm_query", 1, 2, 2)
    assert root["prompt"] == "What is the magic number?"
    (flat,) = root["queries"]
    assert (flat["kind"], flat["depth"], flat["calls"]) == ("llm_query", 2, 1)
    assert "magic number is 42" in flat["prompt"]
    summed = line["meta"]["queries"]
    assert (summed["prompt_tokens"], summed["completion_tokens"]) == (
        chat.stats.prompt_tokens, chat.stats.completion_tokens
    )  # fmt: skip
    assert summed["cost"] == pytest.approx(chat.stats.prompt_tokens * 1.5e-7 + chat.stats.completion_tokens * 6e-7)
    async with get_client() as client:
        flow_run = ArtifactFilterFlowRunId(any_=[uuid.UUID(Path(answer.results_path).name)])
        report = ArtifactFilter(flow_run_id=flow_run, key=ArtifactFilterKey(any_=["rlm-query-report"]))
        (artifact,) = await client.read_artifacts(artifact_filter=report)
    said = str(artifact.data).replace("\\", "")
    assert "```text\nforty-two\n```" in said
    assert f"{chat.stats.prompt_tokens:,} + {chat.stats.completion_tokens:,} tokens" in said


@pytest.mark.full
async def test_a_context_on_the_volume_is_read_from_there(chat, tmp_path, monkeypatch):
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path))
    await LocalSandbox(volume_name="texts").save("with-texts", overwrite=True)  # type: ignore[misc]
    provider = "rlm-local-sandbox/with-texts"
    await batch(["save_to_volume('deep/long.txt', 'é' * 50_000)"], provider=provider)
    chat.script = make_script(("", "SUBMIT(answer=str(len(context)))"))
    answer = await rlm("how long", NAME, context_volume_path="deep/long.txt", provider=provider)
    assert answer.answer == "50000"
    with pytest.raises(ExecutionsFailed, match=r"no 'nosuch.txt' on the volume"):
        await rlm("how long", NAME, context_volume_path="nosuch.txt", provider=provider)


async def test_a_repeated_question_is_answered_from_the_ledger(chat, tmp_path):
    chat.script = make_script(("", "SUBMIT(answer=context)"))
    path = tmp_path / "text.txt"
    for text, requests in (("one", 1), ("one", 1), ("two", 2)):
        path.write_text(text)
        answer = await rlm("what?", NAME, context_file=str(path), cache_results=True)
        assert answer.answer == text
        assert len(answer.trajectory) == 1
        assert chat.stats.requests == requests


async def test_the_partial_answer_is_kept_when_the_budget_is_used_up(chat):
    """The result has the model's last printed output, its turns and its cost."""
    turns = itertools.count(1)
    chat.script = lambda _: format_turn("print('found', 1)" if next(turns) == 1 else "print('lost')\n1 / 0")
    answer = await rlm("how many?", NAME, on_failure="return", max_llm_calls=2)
    assert not answer.answered
    assert isinstance(answer.error, CodeError)
    assert answer.error.type == "BudgetExceeded"
    assert "raise `max_llm_calls`" in str(answer.error)
    # The answer is the output, and not the text of the error.
    assert answer.answer == str(answer) == answer.trajectory[0]["output"] == "found 1"
    assert "ZeroDivisionError" in answer.trajectory[1]["output"]
    assert answer.queries.calls == len(answer.trajectory) == 2
    assert (answer.queries.cost or 0) > 0
    with pytest.raises(ExecutionsFailed, match="raise `max_llm_calls`"):
        await rlm("how many?", NAME, max_llm_calls=2)


async def test_turns_calls_and_cost_are_kept_when_the_deadline_ends_the_run(chat):
    chat.script = make_hanging_script("print('partial')", turns=2)
    answer = await rlm("how many?", NAME, on_failure="return", deadline=8)
    assert isinstance(answer.error, DeadlineExceeded)
    assert answer.answer == "partial"
    assert len(answer.trajectory) == answer.queries.calls == 2
    (*lines, last) = read_ledger(answer.results_path)
    assert [(line["status"], line["number"]) for line in lines] == [("turn", 1), ("turn", 2)]
    assert lines[0]["turn"]["output"] == "partial"
    assert last["meta"]["queries"]["calls"] == 2


CANCELLED = """
import asyncio, sys
from rlm_batch import rlm
asyncio.run(rlm("how many?", "openai/gpt-4o-mini", results_path=sys.argv[1]))
"""


def test_turns_calls_and_cost_are_kept_when_the_run_is_interrupted(chat, server, tmp_path):
    chat.script = make_hanging_script("print('partial')", turns=2)
    with subprocess.Popen([sys.executable, "-c", CANCELLED, str(tmp_path / "results")], env=os.environ) as process:
        wait_until(lambda: chat.stats.requests == 3)
        process.send_signal(signal.SIGINT)
        process.wait(HANG_SECONDS)
    *turns, last = read_ledger(tmp_path / "results")
    assert [line["number"] for line in turns] == [1, 2]
    assert last["error"]["error"] == "NotRun"
    assert last["meta"]["queries"]["calls"] == 2
    assert len(last["meta"]["queries"]["tree"][0]["trajectory"]) == 2


@pytest.mark.parametrize(
    ("submitted", "value", "text"),
    [
        ("42", 42, "42"),
        ("['a', None]", ["a", None], '["a", null]'),
        ("{1: True}", {"1": True}, '{"1": true}'),
        ("''", "", ""),
        ("None", None, None),
        ("0", 0, "0"),
        ("[None, -1e999]", [None, -math.inf], None),
    ],
)
async def test_an_answer_of_any_type_has_a_text_and_a_value_also_from_the_ledger(chat, submitted, value, text):
    chat.script = make_script(("", f"SUBMIT({submitted})"))
    for _ in range(2):
        answer = await rlm("q", NAME, cache_results=True)
        assert (answer.value, type(answer.value)) == (value, type(value))
        assert text is None or answer.answer == text
    assert chat.stats.requests == 1


async def test_the_prompt_has_the_context_the_instructions_and_the_limits(chat):
    chat.script = make_script(("", "SUBMIT(answer='x')"))
    await rlm("q", NAME, "word " * 1_000_000, instructions="Answer in one word.", max_turns=2)
    prompt = chat.requests[-1].text
    assert "You have 2 turns" in prompt
    assert "Answer in one word." in prompt
    assert "`context` is a str of 5,000,000 characters. It begins:\nword word" in prompt
    assert "It has no network." in prompt
    chat.script = lambda _: format_turn("SUBMIT('x')")
    await rlm("q", NAME, system_prompt="You are a pirate.", instructions="Be brief.")
    assert "You are a pirate." in chat.requests[-1].messages[0]
    assert "Be brief." in chat.requests[-1].messages[0]
    assert MARK not in chat.requests[-1].text


MEMORY = """
import asyncio, sys
from rlm_batch import rlm

def measure_peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) // 1024

async def main():
    await rlm("warm", "openai/gpt-4o-mini", "a short text")
    for context in ({"context_file": sys.argv[1]}, {"context": "x" * 10_000_000}):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # The peak begins anew.
        before = measure_peak()
        found = await rlm("how long", "openai/gpt-4o-mini", **context)
        print(found.answer, measure_peak() - before)
asyncio.run(main())
"""


@pytest.mark.full
def test_a_context_of_ten_million_characters_uses_bounded_memory(chat, server, tmp_path):
    chat.script = make_script(("", "SUBMIT(answer=str(len(context)))"))
    path = tmp_path / "long.txt"
    path.write_text("x" * 10_000_000)
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = run_program(command, env=os.environ)
    assert done.returncode == 0, done.stderr
    *_, length, grown, other_length, other_grown = done.stdout.split()
    assert length == other_length == "10000000"
    assert max(int(grown), int(other_grown)) <= 50, f"{grown} and {other_grown} MiB"
    assert chat.stats.longest_prompt < 20_000


@pytest.mark.full
def test_the_example_finds_its_needle_with_the_fake_model(server, tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples" / "needle.py"
    command = [sys.executable, str(example), "--stand-in"]
    done = run_program(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Answer: 271828\n")
    assert "2 calls" in done.stdout


async def test_a_question_without_an_answer_after_its_turns_has_failed_and_is_no_lost_one(chat):
    chat.script = lambda request: "I cannot." if "no turns left" in request.text else format_turn("print(7)")
    found = await rlm("q", NAME, max_turns=2, on_failure="return")
    assert (found.answered, get_status(found.result), found.queries.unsolved) == (False, "failed", 1)
    assert get_status(load_report(found.results_path)[0]) == "failed"


async def test_each_turn_is_in_the_ledger_with_its_usage_even_without_a_text(chat):
    replies = iter([Reply("a b c", no_text=True), format_turn("print(7)"), "SUBMIT('seven')"])
    chat.script = lambda _: next(replies)
    found = await rlm("q", NAME, max_turns=2)
    assert found.answer == "seven"
    *turns, _ = read_ledger(found.results_path)
    assert [line["number"] for line in turns] == [1, 2, 3]
    assert [line["turn"] for line in turns] == found.trajectory
    assert sum(turn["usage"]["calls"] for turn in found.trajectory) == found.queries.calls == 3
    used = sum(turn["usage"]["completion_tokens"] for turn in found.trajectory)
    assert used == chat.stats.completion_tokens
