"""Resuming of recursive queries: an interrupted question continues with the answers that were paid for."""

import itertools
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError, load_report, open_rlm, rlm
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.report import build_summary_rows
from rlm_batch.sandbox.queries.budget import Usage

from ..infra.programs import run_program
from ..infra.scripted_turns import MARK, format_turn
from ..infra.waiting import HANG_SECONDS, wait_until
from ..standins.openai_chat import ChatServer, Reply, Request

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai")]

NAME = "openai/gpt-4o-mini"
QUESTIONS = 20


PROGRAM = """
import asyncio, sys
from rlm_batch import rlm
answers = rlm.sync(
    queries=[f"question {n}" for n in range(int(sys.argv[2]))], language_model="openai/gpt-4o-mini",
    context="text " * 50, results_path=sys.argv[1], max_workers=20, max_cost=1.0,
    cache_queries=sys.argv[3] == "cache",
)
print(answers.queries.calls, answers.queries.cached, *(answer.answer for answer in answers))
"""


class Rollouts:
    """A script of rollouts: two turns with two flat queries each, and then the answer.

    Until `is_released`, the server does not answer request number `held` and later ones.
    """

    def __init__(self, held: int) -> None:
        self._numbers = itertools.count(1)
        self._held = held
        self.is_holding = threading.Event()
        self.is_released = False

    def __call__(self, request: Request) -> Reply | str:
        number = next(self._numbers)
        if number >= self._held and not self.is_released:
            self.is_holding.set()
            return Reply("never sent", delay=1000)
        if MARK not in request.text:
            return f"answer {number}"
        turn = request.text.count("Turns left")
        return format_turn(f"print(llm_query_batched(['{turn} a', '{turn} b']))" if turn < 2 else "SUBMIT('done')")


def count_answered(chat: ChatServer) -> tuple[int, int, int]:
    """Return the calls that the server has answered, and their tokens."""
    return chat.stats.answered, chat.stats.prompt_tokens, chat.stats.completion_tokens


def count_recorded(results: Path) -> tuple[int, int, int]:
    """Return the calls and tokens in a ledger."""
    usage = (open_run_ledger(str(results)).summarize().total_usage if results.is_dir() else None) or Usage()
    return usage.calls, usage.prompt_tokens, usage.completion_tokens


@pytest.mark.full
@pytest.mark.parametrize("cache", ["cache", ""])
def test_after_a_kill_nothing_that_was_paid_for_is_asked_again(chat, server, tmp_path, own_temporary_folder, cache):
    """The sums of the ledger are those of the server, before and after: seven calls for each of 20 rollouts."""
    script = chat.script = Rollouts(held=40 if cache else 70)
    results = tmp_path / "results"
    command = [sys.executable, "-c", PROGRAM, str(results), str(QUESTIONS), cache]
    with subprocess.Popen(command, env=own_temporary_folder, stdout=subprocess.DEVNULL) as process:
        assert script.is_holding.wait(HANG_SECONDS)
        # An answer that is on its way when a process is killed is paid for, and nobody can know it.
        wait_until(lambda: count_recorded(results) == count_answered(chat))
        process.kill()
    paid = chat.stats.answered
    script.is_released = True
    done = run_program(command, env=own_temporary_folder)
    assert done.returncode == 0, done.stderr
    calls, cached, *answers = done.stdout.split()
    print(f"{paid} calls paid before the kill, {chat.stats.answered} in all; resumed: {calls} calls, {cached} kept")
    assert answers == ["done"] * QUESTIONS
    assert count_recorded(results) == count_answered(chat)
    outcomes = load_report(results).results
    assert sum(outcome.meta.queries.calls for outcome in outcomes) == int(calls)
    # Every question that was asked is in the sums once: three turns for each rollout, and the flat queries.
    distinct = 3 * QUESTIONS + 4
    assert chat.stats.answered == (distinct if cache else 7 * QUESTIONS)


async def test_a_question_continues_after_a_limit_was_raised(chat, tmp_path):
    """The two flat queries with the same text keep their two answers."""
    chat.script = Rollouts(held=1000)
    question = partial(rlm, "q", NAME, results_path=tmp_path / "results", on_failure="return")
    first = await question(max_llm_calls=4)
    assert not first.answered
    assert chat.stats.requests == first.queries.calls == 4
    second = await question(max_llm_calls=50)
    assert second.answer == "done"
    assert chat.stats.requests == 8  # Only the reply to "one more reply" is of no use.
    assert (second.queries.calls, second.queries.cached) == (4, 3)
    assert second.trajectory[0]["output"] == first.trajectory[0]["output"]
    assert count_recorded(tmp_path / "results") == count_answered(chat)


async def test_the_report_counts_calls_of_attempts_that_were_run_again(chat, tmp_path):
    answers = iter(["1 / 0", "SUBMIT('better')"])
    chat.script = lambda _: format_turn(next(answers))
    for answer in (None, "better"):  # A question whose model failed starts afresh.
        found = await rlm("q", NAME, results_path=tmp_path / "results", on_failure="return", max_errors=1)
        assert (found.answered, found.value) == (answer is not None, answer)
    reader = open_run_ledger(str(tmp_path / "results"))
    rows = dict(row for row in build_summary_rows(reader.summarize(), reader.records))
    assert "the model was called 1 times" in rows["Queries"]
    assert "the model was called 2 times" in rows["Queries in all"]


async def test_another_limit_of_turns_keeps_the_earlier_results(chat: ChatServer, tmp_path: Path) -> None:
    chat.script = lambda _: format_turn("SUBMIT(5)")
    for turn_timeout in (60, 30, None):
        answer = await rlm(
            "q?", NAME, max_turns=3, turn_timeout=turn_timeout, results_path=tmp_path, provider="local:none"
        )
        assert answer.value == 5
    assert chat.stats.requests == 1


async def test_a_conversation_refuses_the_results_of_a_run(chat, tmp_path):
    chat.script = lambda _: format_turn("SUBMIT(1)")
    await rlm("q", NAME, results_path=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="has the results of a run, or a conversation"):
        async with open_rlm(NAME, results_path=tmp_path / "run"):
            pass
