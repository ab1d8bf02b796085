"""Conversations with a recursive language model, in local sandboxes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import (
    BudgetExceeded,
    ConfigurationError,
    DaytonaCredentials,
    DaytonaSandbox,
    DeadlineExceeded,
    LocalSandbox,
    QueryError,
    SandboxLost,
    open_rlm,
)

from ..infra.scripted_turns import FAILING_CHILD, format_turn, make_script
from ..infra.waiting import wait_until_async
from ..standins.openai_chat import ChatServer, Reply

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai", "no_process_left")]

NAME = "openai/gpt-4o-mini"


def take(*replies: Reply | str) -> Any:
    """Return a script that sends these replies one after the other."""
    left = iter(replies)
    return lambda _request: next(left)


def get_question(chat: ChatServer, number: int = -1) -> list[str]:
    """Return the texts of a request without the instructions."""
    return chat.requests[number].messages[1:]


async def test_names_and_messages_persist_from_question_to_question(chat: ChatServer) -> None:
    chat.rule("How many", "three")
    chat.script = make_script(
        ("and doubled?", "SUBMIT(2 * count)"),
        ("Turns left: 19", "SUBMIT(count)"),
        ("", "count = len(context.split())\nprint(llm_query('How many words?'))"),
    )
    async with open_rlm(NAME, "local:none", context="a b c", sub_model="openai/gpt-4o") as session:
        first = await session.ask("how many words?")
        second = await session.ask("and doubled?")
    assert (first.value, first.text, str(second), second.value) == (3, "3", "6", 6)
    assert [turn["output"] for turn in first.trajectory] == ["three", "FINAL: 3"]
    assert (first.queries.calls, second.queries.calls) == (3, 1)
    assert [query["kind"] for query in first.queries.tree] == ["rlm_query"]
    assert [request.model for request in chat.requests] == ["gpt-4o-mini", "gpt-4o", "gpt-4o-mini", "gpt-4o-mini"]
    assert session.answers == [first, second]
    total = session.queries
    assert (total.calls, total.asked, total.prompt_tokens) == (4, 3, chat.stats.prompt_tokens)
    assert total.cost == pytest.approx((first.queries.cost or 0) + (second.queries.cost or 0))
    roles = [message["role"] for message in chat.requests[-1].body["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    # The model sees what it submitted. It knows the context from the first question.
    assert get_question(chat)[-1] == "FINAL: 3\n\nand doubled?"


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("context = context.split()[:2]", "context"),
        ("llm_query = rlm_query = list_volume = find = 5", "list_volume, llm_query, rlm_query, find"),
        ("def SUBMIT(x): print(x)", "SUBMIT"),
        ("del context\n1 / 0", "context"),
        ("report = 7", ""),
    ],
)
async def test_names_that_code_changed_are_put_back_and_the_model_learns_it(
    chat: ChatServer, code: str, changed: str
) -> None:
    check = "SUBMIT([context, find('x'), callable(llm_query), callable(rlm_query), callable(list_volume)])"
    chat.script = take(format_turn(code), format_turn(check), format_turn(check))
    async with open_rlm(NAME, "local:none", context="eins zwei drei vie", tools={"find": str.upper}) as session:
        value = (await session.ask("which?")).value
        assert value[:4] == ["eins zwei drei vie", "X", True, True]
        assert (await session.ask("again?")).value == value
    told = session.answers[0].trajectory[0]["output"]
    assert (f"(Your code changed {changed}: later code finds" in told) == bool(changed)
    assert "- `context`: a str of 18 characters." in chat.requests[-1].messages[0]


async def test_the_context_can_be_new_for_each_question(chat: ChatServer, tmp_path: Path) -> None:
    chat.script = lambda _: format_turn("SUBMIT([type(context).__name__, len(context), str(context)[:20]])")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 20_000, newline="")
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    async with open_rlm(NAME, "local:none", context={"k": [1, 2]}) as session:
        assert (await session.ask("first?")).value == ["dict", 1, "{'k': [1, 2]}"]
        assert "`context` is a dict of 1 keys: 'k'" in get_question(chat)[-1]
        assert (await session.ask("same?")).value == ["dict", 1, "{'k': [1, 2]}"]
        assert "`context` is" not in get_question(chat)[-1]
        assert (await session.ask("text?", context="é")).value == ["str", 1, "é"]
        assert (await session.ask("a file?", context=paths[0])).value == ["str", 100_000, "a.txta.txta.txta.txt"]
        assert "`context` is a str of 100,000 characters. It begins:\na.txt" in get_question(chat)[-1]
        assert (await session.ask("files?", context=paths)).value[:2] == ["dict", 2]
        assert "together they have 200,000 characters" in get_question(chat)[-1]
        named = {"first": paths[0], "second": "x"}
        assert (await session.ask("named?", context=named)).value == ["dict", 2, "{'first': 'a.txta.tx"]
        for wrong, message in (
            (tmp_path / "gone.txt", r"gone\.txt cannot be read: No such file"),
            ({"a": open}, "context"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                await session.ask("gone?", context=wrong)
        assert (await session.ask("the earlier one?")).value == ["dict", 2, "{'first': 'a.txta.tx"]
    with pytest.raises(ConfigurationError, match="shut down"):
        await session.ask("q")


async def test_each_question_finds_a_context_whose_items_code_changed_as_it_was(chat: ChatServer) -> None:
    chat.script = take(format_turn("context.pop()\nSUBMIT(context)"), format_turn("SUBMIT(context)"))
    async with open_rlm(NAME, "local:none", context=["a", "b"]) as session:
        assert [(await session.ask("which?")).value for _ in range(2)] == [["a"], ["a", "b"]]


async def test_a_context_comes_from_the_volume(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path))
    text = tmp_path / "texts" / "deep" / "long.txt"
    text.parent.mkdir(parents=True)
    text.write_text("é" * 50_000)
    chat.script = lambda _: format_turn("SUBMIT(len(context))")
    provider = LocalSandbox(isolation="none", volume_name="texts")
    async with open_rlm(NAME, provider, context_volume_path="deep/long.txt") as session:
        assert (await session.ask("how long?")).value == 50_000
    assert "`context` is a str of 50,000 characters. It begins:\né" in get_question(chat)[-1]


async def test_a_long_conversation_is_summarized_and_its_history_stays_in_the_code(chat: ChatServer) -> None:
    """The summary is asked when the prompt has too many tokens, and its usage counts."""
    chat.script = take(
        format_turn("secret = 41\nprint('word ' * 900)"),
        "Summary: secret is set.",
        format_turn("print(secret + 1, len(history), [m['role'] for m in history], 'word word' in str(history))"),
        format_turn("SUBMIT(secret)"),
        format_turn("SUBMIT(len(history))"),
    )
    async with open_rlm(NAME, "local:none", compact_tokens=1000) as session:
        answer = await session.ask("find the secret")
        later = await session.ask("how long is the history?")
    requests = [request.messages for request in chat.requests]
    assert len(requests) == 5
    assert "summarize it" in requests[1][-1]
    assert requests[2][1:3] == ["find the secret", "Summary: secret is set."]
    assert "word word" not in "".join(requests[2])
    assert "- `history`:" in requests[0][0]
    assert answer.trajectory[1]["output"] == "42 3 ['user', 'assistant', 'user'] True"
    assert answer.trajectory[1]["summary"] == "Summary: secret is set."
    assert answer.trajectory[1]["usage"]["calls"] == 2
    assert answer.queries.calls == 4
    assert later.value == 3


async def test_the_history_survives_the_end_of_the_process(chat: ChatServer) -> None:
    chat.script = take(
        format_turn("print('word ' * 2000)"),
        "a summary",
        format_turn("import os\nos._exit(3)"),
        format_turn("SUBMIT([len(history), context])"),
    )
    async with open_rlm(NAME, "local:none", context="kept", compact_tokens=1000) as session:
        assert (await session.ask("?")).value == [3, "kept"]


async def test_a_summary_that_was_cut_replaces_no_messages(chat: ChatServer) -> None:
    summary = Reply("Half a", finish_reason="length")
    chat.script = take(format_turn("print('word ' * 900)"), summary, format_turn("SUBMIT(1)"))
    async with open_rlm(NAME, "local:none", compact_tokens=1000) as session:
        answer = await session.ask("which?")
    assert (answer.value, answer.queries.calls) == (1, 3)
    assert "summary" not in answer.trajectory[1]
    assert "word word" in chat.requests[-1].text


async def test_an_answer_of_another_type_costs_a_turn_and_the_model_learns_why(chat: ChatServer) -> None:
    chat.script = take(format_turn("x = 1\nSUBMIT('many')"), format_turn("SUBMIT([x])"))
    async with open_rlm(NAME, "local:none", output_type=list[int], max_errors=2) as session:
        answer = await session.ask("which?")
    assert answer.value == [1]
    assert [turn.get("failed", False) for turn in answer.trajectory] == [True, False]
    refusal = get_question(chat)[-1]
    assert refusal.startswith(
        "SUBMIT did not take this answer: Input should be a valid list. The answer has to be JSON"
    )
    assert 'matches this schema: {"items": {"type": "integer"}, "type": "array"}.' in chat.requests[0].messages[0]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("SUBMIT('seven')", "seven"),
        ("The answer isn't long: `SUBMIT(answer=\"it's (7\")`. That is all.", "it's (7"),
        (format_turn("# SUBMIT(6)\nSUBMIT({1: (found, None, -1.5)})"), {"1": [7, None, -1.5]}),
        ("I think:\nSUBMIT(\n    ['a',\n  found]\n)\nDone.", ["a", 7]),
        ("You asked for SUBMIT(answer). The answer is 42. SUBMIT(42) (I am sure.)", 42),
        ("SUBMIT (true)", True),
        ("```python\nSUBMIT({'found': false})\n```", {"found": False}),
        ("```python\nprint(lost)\nSUBMIT('as I know it')\n```", "as I know it"),
        ("```python\nprint(found)\n```\nSUBMIT(8)", 8),
    ],
)
async def test_a_submission_after_the_last_turn_is_the_answer(chat: ChatServer, reply: str, value: Any) -> None:
    chat.script = take(format_turn("found = 7\nprint(1)"), reply, format_turn("SUBMIT(5)"))
    async with open_rlm(NAME, "local:none", max_turns=1) as session:
        answer = await session.ask("which?")
        assert (answer.value, answer.answered) == (value, True)
        assert answer.trajectory[-1]["output"] == f"FINAL: {value!r}"
        assert (await session.ask("again?")).value == 5
    roles = [message["role"] for message in chat.requests[1].body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]  # Some models refuse two messages of a role in a row.


@pytest.mark.parametrize(
    "reply",
    [
        "seven",
        Reply(no_text=True, refusal="I will not."),
        Reply("SUBMIT('sev')", finish_reason="length"),
        format_turn("# SUBMIT('seven')\nprint(x)"),
        "SUBMIT(" * 100_000,
        "SUBMIT({1, 2})",
    ],
    ids=lambda reply: str(reply)[:60],
)
async def test_without_a_submission_there_is_no_answer(chat: ChatServer, reply: Reply | str) -> None:
    chat.script = take(format_turn("x = 1\nprint('on')"), reply)
    async with open_rlm(NAME, "local:none", max_turns=1) as session:
        with pytest.raises(QueryError, match=r"submitted no answer in 1 turns \(`max_turns`\): "):
            await session.ask("which?")
        (answer,) = session.answers
    assert (answer.answered, answer.value, answer.queries.calls) == (False, None, 2)


@pytest.mark.parametrize(
    ("reason", "problem"), [("length", "raise max_tokens"), ("content_filter", "ask in another way")]
)
async def test_a_reply_that_is_not_whole_is_not_run_and_the_model_learns_why(
    chat: ChatServer, reason: str, problem: str
) -> None:
    part, silence = Reply(format_turn("SUBMIT('part')"), finish_reason=reason), Reply("", finish_reason=reason)
    chat.script = take(part, silence, format_turn("SUBMIT('whole')"))
    async with open_rlm(NAME, "local:none") as session:
        answer = await session.ask("which?")
    assert answer.value == "whole"
    assert [turn.get("failed", False) for turn in answer.trajectory] == [True, True, False]
    assert (answer.trajectory[0]["reasoning"], answer.trajectory[0]["code"]) == (part.text, "")
    assert answer.queries.calls == sum(turn["usage"]["calls"] for turn in answer.trajectory) == 3
    messages = [(message["role"], message["content"]) for message in chat.requests[-1].body["messages"][1:]]
    assert [role for role, _ in messages] == ["user", "assistant", "user"]
    assert messages[1][1] == part.text
    told = messages[2][1]
    assert told.index(problem) < told.index("Turns left: 19.") < told.index("without a text") < told.index("left: 18.")


async def test_a_last_reply_of_another_type_is_an_error_with_its_turns(chat: ChatServer) -> None:
    chat.script = take(format_turn("print(1)"), format_turn("SUBMIT('two')"), format_turn("SUBMIT(5)"))
    async with open_rlm(NAME, "local:none", output_type=int, max_turns=1) as session:
        with pytest.raises(QueryError, match="SUBMIT did not take this answer: Input should be a valid integer"):
            await session.ask("which?")
        (failed,) = session.answers
        assert (failed.answered, failed.text, len(failed.trajectory)) == (False, "1", 2)
        assert failed.queries.calls == 2
        assert isinstance(failed.error, QueryError)
        assert (await session.ask("again?")).value == 5


async def test_the_error_output_of_a_failed_turn_reaches_the_model(chat: ChatServer) -> None:
    printed = "ValueError: of the child\nthe code raised CalledProcessError"
    chat.script = take(format_turn(f"print('on')\n{FAILING_CHILD}"), format_turn("SUBMIT(1)"))
    async with open_rlm(NAME, "local:none") as session:
        answer = await session.ask("which?")
    for text in (get_question(chat)[-1], answer.trajectory[0]["output"]):
        assert text.startswith("on\n")
        assert printed in text


async def test_a_lost_sandbox_is_an_error_and_the_next_question_has_a_new_one(chat: ChatServer) -> None:
    """The model keeps its messages and its context, and learns that the names are gone."""
    chat.script = take(
        format_turn("import os\nname = 'kept'\nSUBMIT(os.getppid())"),
        format_turn("import time\nstart()\ntime.sleep(1000)"),
        format_turn("SUBMIT([context[:3], 'name' in globals()])"),
    )
    started = threading.Event()
    tools = {"start": started.set}
    async with open_rlm(NAME, "local:none", context="abc" * 20_000, tools=tools) as session:
        driver = (await session.ask("first?")).value
        asked = asyncio.create_task(session.ask("second?"))
        await wait_until_async(started.is_set)
        os.kill(driver, signal.SIGKILL)
        with pytest.raises(SandboxLost, match=r"The names of the model's code are lost\. Ask again"):
            await asked
        assert (await session.ask("third?")).value == ["abc", False]
    last = get_question(chat)[-1]
    assert "Your work on this question was stopped" in last
    assert "its names are gone" in last
    assert "third?" in last


async def test_limits_hold_for_each_question_and_the_total_for_the_session(chat: ChatServer) -> None:
    chat.script = lambda request: format_turn("SUBMIT(1)" if "short" in request.messages[-1] else "print(1)")
    async with open_rlm(NAME, "local:none", max_llm_calls=2, max_total_llm_calls=4) as session:
        with pytest.raises(BudgetExceeded, match="raise `max_llm_calls`"):
            await session.ask("long?")
        assert session.answers[0].text == "1"
        assert (await session.ask("short?")).value == 1
        with pytest.raises(BudgetExceeded, match="raise `max_total_llm_calls`"):
            await session.ask("long?")
    # A question that could not pay for a last turn asks nothing.
    assert session.queries.calls == 3 == chat.stats.answered


async def test_a_question_that_takes_too_long_or_is_cancelled_keeps_the_names(chat: ChatServer) -> None:
    chat.script = take(
        format_turn("x = 5\nimport time\ntime.sleep(1000)"),
        Reply("late", delay=1000),
        format_turn("SUBMIT(x)"),
    )
    async with open_rlm(NAME, "local:none") as session:
        with pytest.raises(DeadlineExceeded, match="raise `timeout`"):
            await session.ask("first?", timeout=1)
        asked = asyncio.create_task(session.ask("second?"))
        await wait_until_async(lambda: chat.stats.requests == 2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert [answer.answered for answer in session.answers] == [False, False]
        assert session.answers[0].trajectory[0]["code"].startswith("x = 5")
        assert (await session.ask("third?")).value == 5
    # The unanswered question and the next one are one message, because some models refuse two in a row.
    roles = [message["role"] for message in chat.requests[-1].body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "second?" in get_question(chat)[-1]


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["short", "long"])
async def test_beyond_the_greatest_depth_a_model_answers_plainly(chat: ChatServer, size: int) -> None:
    """The prompt has the context, or its beginning and its end if it is too long for the model."""
    chat.rule("count them", "many")
    chat.script = make_script(("", f"SUBMIT(rlm_query('count them', context='A' + 'x' * {size} + 'Z'))"))
    async with open_rlm(NAME, "local:none", on_depth="plain", max_depth=1) as session:
        answer = await session.ask("how many?")
    assert answer.value == "many"
    assert "asks a model once" in chat.requests[0].messages[0]
    (prompt,) = chat.requests[1].messages
    assert prompt.startswith("count them\n\nAxx")
    assert prompt.endswith("xxZ")
    assert ("characters left out" in prompt) == (size > 100)
    assert len(prompt) < 301_000
    (query,) = answer.queries.tree[0]["queries"]
    assert (query["kind"], query["plain"], query["depth"], query["calls"]) == ("rlm_query", True, 2, 1)
    assert "trajectory" not in query


async def test_a_plain_prompt_without_room_has_nothing_of_its_context(chat: ChatServer) -> None:
    chat.rule("pp", "many")
    chat.script = make_script(("", "SUBMIT(rlm_query('p' * 300_000, context='x' * 3_000_000))"))
    async with open_rlm(NAME, "local:none", on_depth="plain", max_depth=1) as session:
        await session.ask("how many?")
    (prompt,) = chat.requests[1].messages
    assert "3,000,000 characters left out" in prompt
    assert len(prompt) < 301_000


async def test_turns_are_reported_and_questions_wait_for_each_other(chat: ChatServer) -> None:
    chat.script = lambda request: format_turn(f"SUBMIT({request.messages[-1][-1]})")
    heard: list[tuple[int, int, str]] = []
    session = open_rlm(NAME, "local:none", on_turn=lambda event: heard.append((event.index, event.turn, event.output)))
    async with session:
        answers = await asyncio.gather(*(session.ask(f"number {number}") for number in range(3)))
    assert [answer.value for answer in answers] == [0, 1, 2]
    assert heard == [(0, 1, "FINAL: 0"), (1, 1, "FINAL: 1"), (2, 1, "FINAL: 2")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"provider": "nowhere"}, "unknown provider 'nowhere'"),
        ({"max_turns": 0}, "max_turns"),
        ({"on_depth": "never"}, "on_depth"),
        ({"output_type": "list[open]"}, r"`output_type` is list\[open\], a str and not a type"),
        ({"context": "x", "context_volume_path": "y"}, "the context is given twice"),
        ({"nonsense": 1}, "LocalSandbox has no field nonsense"),
        ({"results_path": ""}, "results_path is empty"),
        ({"results_path": "nowhere://x"}, "Protocol not known"),
    ],
)
async def test_a_wrong_argument_is_refused_before_a_sandbox_opens(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_rlm(NAME, **arguments)
    open_rlm(NAME, DaytonaSandbox(credentials=DaytonaCredentials(api_key="key")))  # type: ignore[arg-type]


async def test_the_error_of_a_listener_ends_the_question(chat: ChatServer) -> None:
    chat.script = make_script(("Turns left", "SUBMIT(1)"), ("", "print(1)"))

    def fail(_event: Any) -> None:
        raise KeyError("mine")

    async with open_rlm(NAME, "local:none", on_turn=fail) as session:
        with pytest.raises(KeyError, match="mine"):
            await session.ask("q")
