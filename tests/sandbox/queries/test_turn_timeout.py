"""The time limit of a recursive model's turn, in local sandboxes."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlm_batch import ConfigurationError, DeadlineExceeded, open_rlm, rlm

from ...infra.scripted_turns import format_turn
from ...standins.openai_chat import ChatServer, Reply

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai", "no_process_left")]

NAME = "openai/gpt-4o-mini"
ENDLESS = "found = 7\nwhile True:\n    pass"


def write_turns(chat: ChatServer, *replies: str) -> None:
    left = iter(replies)
    chat.script = lambda request: next(left) if "You answer a question" in request.text else None


async def test_a_turn_that_takes_too_long_is_interrupted_and_its_names_stay(chat: ChatServer) -> None:
    write_turns(chat, format_turn(ENDLESS), format_turn("SUBMIT(found + len(context))"))
    async with open_rlm(NAME, "local:none", context="abc", turn_timeout=1) as session:
        answer = await session.ask("q?")
    assert answer.value == 10
    told = answer.trajectory[0]["output"]
    assert told.startswith("the code was interrupted (line 2) after 1 s, the most for a turn") or "(line 3)" in told
    assert told.endswith("The names that your code defined before are kept.")
    assert told in chat.requests[1].text
    assert "may run for 1 s" in chat.requests[0].text


async def test_the_clock_stands_while_the_code_waits_for_the_host(chat: ChatServer) -> None:
    """The tool waits for a person, and the query for a slow server."""
    chat.rule("slow", Reply("late", delay=2.5))
    code = "print(ask_person('ok?'), llm_query('slow'))"
    write_turns(chat, format_turn(code), format_turn("SUBMIT(1)"))

    async def ask_person(question: str) -> str:
        await asyncio.sleep(2.5)
        return f"yes, {question}"

    async with open_rlm(NAME, "local:none", tools={"ask_person": ask_person}, turn_timeout=2) as session:
        answer = await session.ask("q?")
    assert answer.trajectory[0]["output"] == "yes, ok? late"
    assert answer.value == 1


async def test_all_blocks_of_a_reply_share_the_limit(chat: ChatServer) -> None:
    blocks = [f"import time\ntime.sleep(2)\nprint('block {number}')" for number in (1, 2)]
    write_turns(chat, "\n".join(map(format_turn, blocks)), format_turn("SUBMIT(1)"))
    async with open_rlm(NAME, "local:none", turn_timeout=3) as session:
        answer = await session.ask("q?")
    told = answer.trajectory[0]["output"]
    assert told.startswith("block 1\nthe code was interrupted (line 2) after 3 s")
    assert "block 2" not in told


async def test_code_that_ignores_the_interrupt_is_killed_and_the_model_learns_it(chat: ChatServer) -> None:
    stubborn = "import signal\nx = 1\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"
    write_turns(chat, format_turn(stubborn), format_turn("SUBMIT(['x' in globals(), context])"))
    async with open_rlm(NAME, "local:none", context="abc", turn_timeout=1) as session:
        answer = await session.ask("q?")
    assert answer.value == [False, "abc"]
    assert "after 1 s, the most for a turn" in answer.trajectory[0]["output"]
    assert "so its names are gone" in answer.trajectory[0]["output"]
    assert "are kept" not in answer.trajectory[0]["output"]


async def test_without_a_limit_of_turns_only_the_whole_limit_holds(chat: ChatServer) -> None:
    write_turns(chat, format_turn(ENDLESS))
    async with open_rlm(NAME, "local:none", turn_timeout=None, timeout=3) as session:
        started_at = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await session.ask("q?")
        assert time.monotonic() - started_at >= 2.5
    assert "may run for" not in chat.requests[0].text


@pytest.mark.parametrize("wrong", [0, -1, "soon"])
async def test_a_wrong_limit_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="turn_timeout"):
        open_rlm(NAME, turn_timeout=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="turn_timeout"):
        await rlm("q?", NAME, turn_timeout=wrong)  # type: ignore[arg-type]
