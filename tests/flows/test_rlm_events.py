"""The events of recursive models: `on_turn`, `rlm.stream` and the flow's listener."""

import asyncio
import threading
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import AsyncLocalInterpreter, ConfigurationError, ExecutionsFailed, LocalInterpreter, RlmEvent, rlm
from rlm_batch.flows.listener import FlowListener

from ..infra.listening import run_with_listener
from ..infra.scripted_turns import make_hanging_script, make_script
from ..infra.waiting import wait_until_async
from ..standins.openai_chat import ChatServer
from .conftest import read_ledger

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"
TURNS = make_script(
    ("Turns left: 19.", "SUBMIT('forty-two')"),
    ("", "print(llm_query('Which number?'))"),
)


@pytest.fixture(autouse=True)
def answers(openai: ChatServer, chat: ChatServer) -> None:
    """Let the model of the environment answer."""
    chat.rule("Which number", "42, I think. " * 50)
    chat.script = TURNS


class Listener(FlowListener):
    """A listener that keeps the events."""

    def __init__(self) -> None:
        self.events: list[RlmEvent] = []

    def on_rlm_event(self, index: int, event: RlmEvent) -> None:
        assert index == event.index
        self.events.append(event)


async def test_a_stream_has_each_turn_with_its_code_output_and_queries_and_ends_with_the_answer() -> None:
    stream = rlm.stream("What is the number?", NAME)
    events = [event async for event in stream]
    kinds = ["turn", "code", "query", "output", "turn", "code", "output", "answer"]
    assert [event.kind for event in events] == kinds
    assert [event.turn for event in events] == [1, 1, 1, 1, 2, 2, 2, 0]
    _, code, query, output, *_, answer = events
    assert (code.text, code.reasoning) == ("print(llm_query('Which number?'))", "Let me see.")
    assert (query.depth, query.query.prompt, query.text) == (2, "Which number?", ("42, I think. " * 50)[:200])
    assert output.output.startswith("42, I think.")
    assert (output.queries, output.usage.calls, output.failed) == (1, 2, False)
    assert output.seconds >= query.seconds > 0
    assert (answer.text, answer.usage.calls, answer.depth) == ("forty-two", 3, 1)
    assert stream.result.answer == "forty-two"
    assert [turn["seconds"] for turn in stream.result.trajectory] == [
        event.seconds for event in events if event.kind == "output"
    ]


async def test_a_stream_raises_the_error_of_the_run_after_the_error_of_the_query(chat: ChatServer) -> None:
    events: list[RlmEvent] = []

    async def read(stream: AsyncIterable[RlmEvent]) -> None:
        async for event in stream:
            events.append(event)  # noqa: PERF401 - a comprehension would lose the events before the error

    with pytest.raises(ExecutionsFailed, match="raise `max_llm_calls`"):
        await read(rlm.stream("q", NAME, max_llm_calls=1))
    assert [event.kind for event in events[-3:]] == ["output", "turn", "answer"]
    assert events[-1].failed
    assert "BudgetExceeded" in events[-1].error
    with pytest.raises(ConfigurationError, match="given twice"):
        await read(rlm.stream("q", NAME, "text", context_file="b"))


async def test_leaving_the_loop_cancels_the_run(chat: ChatServer, results: Path) -> None:
    chat.script = make_hanging_script("print(1)", turns=1)
    stream = rlm.stream("q", NAME)
    async for event in stream:
        if event.kind == "output":
            break
    # The run ends in the background, and keeps what was paid for.
    await wait_until_async(lambda: stream.is_over, "the end of the run")
    with pytest.raises(ConfigurationError, match="was left early"):
        _ = stream.result
    (ledger,) = results.iterdir()
    *_, last = read_ledger(ledger)
    assert last["meta"]["queries"]["calls"] == 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_on_turn_gets_each_turn_in_order_without_delaying_the_run(is_async: bool) -> None:
    turns: list[tuple[int, str, bool]] = []

    def note(turn: RlmEvent) -> None:
        turns.append((turn.turn, turn.output, threading.current_thread() is threading.main_thread()))

    async def note_later(turn: RlmEvent) -> None:
        await asyncio.sleep(0)
        note(turn)

    answer = await rlm("q", NAME, on_turn=note_later if is_async else note)
    assert [(number, output) for number, output, _ in turns] == [
        (number, turn["output"]) for number, turn in enumerate(answer.trajectory, 1)
    ]
    assert {is_main for *_, is_main in turns} == {is_async}


async def test_an_exception_of_on_turn_ends_the_run_with_its_own_traceback(chat: ChatServer, results: Path) -> None:
    def fail(turn: RlmEvent) -> None:
        raise LookupError(f"no place for turn {turn.turn}")

    chat.script = make_hanging_script("print(1)", turns=1)
    with pytest.raises(LookupError, match="no place for turn 1") as caught:
        await rlm("q", NAME, on_turn=fail)
    assert caught.traceback[-1].name == "fail"
    (ledger,) = results.iterdir()
    *_, last = read_ledger(ledger)
    assert last["meta"]["queries"]["calls"] == 1


async def test_a_wrong_on_turn_is_refused_with_one_sentence() -> None:
    cases: list[tuple[Any, str]] = [
        (7, "on_turn is 7: pass a function"),
        (Path("x"), "on_turn is PosixPath.'x'.: pass a function"),
        ("no.such:thing", "on_turn, no.such:thing, cannot"),
    ]
    for on_turn, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            await rlm("q", NAME, on_turn=on_turn)
    with pytest.raises(ConfigurationError, match="on_turn must be a plain function"):
        AsyncLocalInterpreter(on_turn=asyncio.sleep)  # type: ignore[arg-type]


async def test_turns_of_deeper_models_have_their_depth(chat: ChatServer) -> None:
    chat.script = make_script(
        ("deep question", "SUBMIT('low')"),
        ("Turns left: 19.", "SUBMIT('high')"),
        ("", "rlm_query('deep question')"),
    )
    listener = Listener()
    await run_with_listener(rlm, listener, "q", NAME)
    assert [(event.kind, event.depth, event.turn) for event in listener.events] == [
        ("turn", 1, 1), ("code", 1, 1),
        ("turn", 2, 1), ("code", 2, 1), ("output", 2, 1), ("query", 2, 1),
        ("output", 1, 1), ("turn", 1, 2), ("code", 1, 2), ("output", 1, 2), ("answer", 1, 0),
    ]  # fmt: skip
    assert listener.events[6].usage.calls == 2


def test_an_interpreter_passes_turns_and_raises_what_on_turn_raises(chat: ChatServer) -> None:
    turns: list[str] = []

    def note(turn: RlmEvent) -> None:
        turns.append(turn.code)
        if turn.code.startswith("SUBMIT"):
            raise LookupError("enough")

    with LocalInterpreter(language_model=NAME, on_turn=note) as interpreter:
        with pytest.raises(LookupError, match="enough"):
            interpreter.execute("try:\n    rlm_query('q')\nexcept QueryError:\n    pass\nllm_query('Which number?')")
        assert turns == ["print(llm_query('Which number?'))", "SUBMIT('forty-two')"]
        assert chat.stats.requests == 3  # Nothing is asked after the exception.
        assert interpreter.execute("SUBMIT(x=1)").x == 1
