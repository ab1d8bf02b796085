"""Conversations with a recursive language model that continue in another process."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import (
    BudgetExceeded,
    ConfigurationError,
    PrepareError,
    QueryError,
    SessionAnswer,
    load_report,
    open_rlm,
)
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.sandbox.queries.budget import Usage
from rlm_batch.tasks.ledger.ledger import Ledger

from ..infra.scripted_turns import MARK, format_turn
from ..infra.waiting import wait_until
from ..standins.openai_chat import ChatServer, Reply, Request

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai", "no_process_left")]

NAME = "openai/gpt-4o-mini"
PROGRAM = """
import asyncio, sys
from rlm_batch import open_rlm


async def main():
    async with open_rlm("openai/gpt-4o-mini", "local:none", context="a b c", results_path=sys.argv[1]) as session:
        print(await session.ask("how many?"))
        await session.ask("which is the best?")


asyncio.run(main())
"""


def get_messages(chat: ChatServer) -> list[dict[str, Any]]:
    """Return the messages of the last request after the instructions."""
    return chat.requests[-1].body["messages"][1:]


async def test_another_session_continues_with_the_messages_the_answers_and_the_summary(
    chat: ChatServer, tmp_path: Path
) -> None:
    replies = iter(
        [
            format_turn("secret = 41\nprint('word ' * 900)"),
            "Summary: secret is 41.",
            format_turn("SUBMIT([secret, float('inf')])"),
            format_turn("1 / 0"),
            "nothing to run",
            format_turn("SUBMIT([len(history), 'secret' in globals()])"),
        ]
    )
    chat.script = lambda _: next(replies)
    settings: dict[str, Any] = {"results_path": tmp_path / "talk", "compact_tokens": 1000, "max_errors": 1}
    async with open_rlm(NAME, "local:none", context=[1, 2], **settings) as session:
        first = await session.ask("find the secret")
        with pytest.raises(QueryError, match="max_errors"):
            await session.ask("fail")
        before, (failed,) = get_messages(chat), session.answers[1:]
        usage = session.queries
    async with open_rlm(NAME, "local:none", context=[1, 2], **settings) as session:
        assert session.answers[0] == first
        assert (first.value, first.text) == ([41, float("inf")], "[41, Infinity]")
        assert (session.answers[1].text, str(session.answers[1].error)) == (failed.text, str(failed.error))
        assert session.queries == usage
        with pytest.raises(QueryError, match="max_errors"):
            await session.ask("how long is the history?")
        after = get_messages(chat)
        assert after[: len(before)] == before
        assert after[0]["content"].startswith("find the secret")
        assert after[1]["content"] == "Summary: secret is 41."
        assert "its names are gone" in after[-1]["content"]
        assert "`context` is a list of 2 items" in after[-1]["content"]
    async with open_rlm(NAME, "local:none", **settings, max_total_llm_calls=5) as session:
        with pytest.raises(BudgetExceeded, match="raise `max_total_llm_calls`"):
            await session.ask("and now?")
    async with open_rlm(NAME, "local:none", **settings) as session:
        assert len(session.answers) == 4
        assert (await session.ask("how long is the history?")).value == [3, False]


async def test_a_full_disk_and_a_failed_start_lose_no_message_and_leave_the_conversation_free(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages that could not be written are written with the next one."""
    chat.script = lambda _: format_turn("SUBMIT(7)")
    talk = tmp_path / "talk"
    with pytest.raises(PrepareError):
        await open_rlm(NAME, "local:none", results_path=talk, prepare="1 / 0").start()

    def fail(ledger: Ledger, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with open_rlm(NAME, "local:none", results_path=talk) as session:
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "write_line", fail)
            with pytest.raises(OSError, match="No space left"):
                await session.ask("first?")
        await session.ask("second?")
        before = get_messages(chat)
    (part,) = talk.glob("part-*.jsonl")
    with part.open("ab") as file:
        file.write(b'{"version":1,"key":"open_rlm 1","at":')  # a kill has torn the last line
    async with open_rlm(NAME, "local:none", results_path=talk) as session:
        assert [answer.value for answer in session.answers] == [7]
        await session.ask("third?")
        after = get_messages(chat)
    assert after[: len(before)] == before
    assert [message["role"] for message in after] == ["user", "assistant", "user"]
    assert "first?" in after[0]["content"]


async def test_a_ledger_without_an_outcome_keeps_the_others_and_one_without_a_message_is_refused(
    chat: ChatServer, tmp_path: Path
) -> None:
    numbers = iter("1234")
    chat.script = lambda _: format_turn(f"SUBMIT({next(numbers)})")
    talk = tmp_path / "talk"
    async with open_rlm(NAME, "local:none", results_path=talk) as session:
        for question in ("first?", "second?", "third?"):
            await session.ask(question)
    (part,) = talk.glob("part-*.jsonl")
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(line for line in lines if '"status":"succeeded"' not in line or "first?" not in line))
    async with open_rlm(NAME, "local:none", results_path=talk) as session:
        await session.ask("fourth?")
    assert [outcome["answer"] for outcome in load_report(str(talk)).results] == ["2", "3", "4"]
    part.write_text("".join(line for line in lines if '"number":2' not in line))
    with pytest.raises(ConfigurationError, match="a conversation without some of its lines"):
        await open_rlm(NAME, "local:none", results_path=talk).start()
    part.write_text("".join(line for line in lines if '"status":"state"' not in line))
    with pytest.raises(ConfigurationError, match="has the results of a run"):
        await open_rlm(NAME, "local:none", results_path=talk).start()


async def test_cached_queries_are_not_paid_for_again_in_another_process(chat: ChatServer, tmp_path: Path) -> None:
    chat.script = lambda request: format_turn("SUBMIT(llm_query('flat'))") if MARK in request.text else "yes"
    for question in ("first?", "second?"):
        async with open_rlm(NAME, "local:none", results_path=tmp_path / "talk", cache_queries=True) as session:
            await session.ask(question)
    assert [answer.queries.cached for answer in session.answers] == [0, 1]
    assert chat.stats.answered == 3


def ask_second(request: Request) -> Reply | str:
    """Answer the questions of PROGRAM. The second turn of its second question hangs in its second sub-query."""
    text = request.text
    if MARK not in text:
        return "a is better" if "a or b" in text else Reply("never sent", delay=1000)
    if "which is the best?" not in text:
        return format_turn("words = context.split()\nSUBMIT(len(words))")
    if "['a', 'b', 'c']" not in text:
        return format_turn("print(words)")
    if "its names are gone" not in text:
        return format_turn("print([llm_query(f'which is better, {pair}') for pair in ('a or b', 'a or c')])")
    return format_turn("SUBMIT(llm_query('which is better, a or b'))")


def count_total(talk: Path) -> Usage:
    """Return the usage of all attempts that the report of the conversation counts."""
    usage = open_run_ledger(str(talk)).summarize().total_usage
    assert usage is not None
    return usage


async def ask_again(talk: Path) -> SessionAnswer:
    """Continue the conversation of PROGRAM."""
    async with open_rlm(NAME, "local:none", context="a b c", results_path=talk) as session:
        assert [answer.value for answer in session.answers] == [3]
        return await session.ask("which is the best?")


def test_after_a_kill_in_a_turn_the_conversation_has_the_turns_before_it(
    chat: ChatServer, tmp_path: Path, own_temporary_folder: dict[str, str]
) -> None:
    """No reply and no sub-query is paid for again, and the report counts what the server counted."""
    chat.script, talk = ask_second, tmp_path / "talk"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(talk)], env=own_temporary_folder) as process:
        wait_until(lambda: chat.stats.requests == 5 and chat.stats.answered == 4)
        wait_until(lambda: count_total(talk).calls == 4)
        with pytest.raises(ConfigurationError, match=f"another process has the conversation in {talk}"):
            asyncio.run(ask_again(talk))
        process.kill()
    answer = asyncio.run(ask_again(talk))
    assert (answer.value, answer.queries.calls, answer.queries.cached) == ("a is better", 1, 1)
    roles_and_texts = [(message["role"], message["content"]) for message in get_messages(chat)]
    assert [role for role, _ in roles_and_texts] == ["user", "assistant"] * 3 + ["user"]
    assert "print(words)" in roles_and_texts[3][1]
    assert roles_and_texts[4][1].startswith("['a', 'b', 'c']")
    assert roles_and_texts[-1][1].startswith("Your work on this question was stopped before you had an answer.")
    report = load_report(str(talk))
    assert [outcome["answer"] for outcome in report.results] == ["3", "a is better"]
    assert report.results[1].meta.provider == "local"
    record = open_run_ledger(str(talk)).records[-1]
    assert (record.total, record.succeeded, record.failed) == (2, 2, 0)
    total = count_total(talk)
    assert (total.calls, total.prompt_tokens) == (chat.stats.answered, chat.stats.prompt_tokens)
