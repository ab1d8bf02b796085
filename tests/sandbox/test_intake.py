"""Tests of the intake of a sandbox's data: large JSON in parts, and a limited number of calls of host functions."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlm_batch import CodeCrashed, ExecutionTimeout, LocalInterpreter, LocalSandbox
from rlm_batch.sandbox.intake import large_json
from rlm_batch.sandbox.intake.large_json import finish, read_json
from rlm_batch.sandbox.wire.strict_json import MAX_CONTAINERS, dumps, loads

from .conftest import read_memory

# This code calls host functions as fast as a thousand threads would, and waits for no answer.
CALL = """
import time
channel = next(cell.cell_contents for cell in ask.__closure__ if hasattr(cell.cell_contents, "_channel"))._channel
def call(body=b'{"args":[],"kwargs":{}}', number=[1_000_000]):
    number[0] += 1
    channel.send({"op": "call", "token": channel.token, "call": number[0], "name": "ask"}, body)
"""


def read(text: str) -> Any:
    """Read the text in parts and return the value, or "refused"."""
    try:
        value = finish(read_json(text.encode()))
        dumps(value).encode()
    except (ValueError, RecursionError):
        return "refused"
    return value


def expect(text: str) -> Any:
    """Read the text at once and return the value, or "refused"."""
    try:
        value = loads(text)
        dumps(value).encode()
    except (ValueError, RecursionError):
        return "refused"
    return value


def make_value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.random()
    if depth < 4 and kind < 0.3:
        return [make_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if depth < 4 and kind < 0.6:
        return {dice.choice(["a", 'é"', "\\", ""]): make_value(dice, depth + 1) for _ in range(dice.randrange(4))}
    texts = ["", 'x"y', "[", "é😀", "\n,", "\\" * dice.randrange(9), '"\\u' * dice.randrange(30), "x" * 50]
    return dice.choice([1, -2, 3.5, 1e300, None, True, False, *texts])


def test_json_read_in_parts_equals_json_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check JSON that is cut anywhere, even inside escapes and surrogate pairs, and JSON that is broken."""
    for name, value in {
        "QUICK_BYTES": 0, "QUICK_VALUES": 0, "QUICK_TEXT_BYTES": 0, "CHARACTERS_AT_ONCE": 13, "SHORT_CHARACTERS": 3,
    }.items():  # fmt: skip
        monkeypatch.setattr(large_json, name, value)
    dice = random.Random(16)
    for _ in range(1500):
        value = make_value(dice)
        text = dumps(value) if dice.random() < 0.5 else json.dumps(value, separators=(",", ":"))
        if dice.random() < 0.6 and text:
            at = dice.randrange(len(text))
            text = text[:at] + dice.choice(["", *',]}":1[{x\\', "\\ud83d", "\\ude00"]) + text[at + 1 :]
        assert repr(read(text)) == repr(expect(text)), text


def test_large_json_is_read_in_parts_up_to_the_depth_limit() -> None:
    texts = (
        "[" + "0," * 300_000 + "0]",
        "{" + ",".join(f'"{i:x}":0' for i in range(60_000)) + "}",
        '"' + "\\n" * 2_000_000 + '"',
        '"' + "é" * 2_000_000 + '"',
    )
    for text in texts:
        parts, count, value = read_json(text.encode()), 0, None
        while value is None:
            count += 1
            try:
                next(parts)
            except StopIteration as end:
                value = end.value
        assert value == loads(text)
        assert count > 20
    bodies = [f"{'[' * levels}{'0,' * 200_000}0{']' * levels}".encode() for levels in (101, 102)]
    assert finish(read_json(bodies[0], 101))
    with pytest.raises(RecursionError, match="more than 101 levels"):
        finish(read_json(bodies[1], 101))


@pytest.mark.full
def test_too_many_lists_in_json_are_refused() -> None:
    assert read("[" + "[]," * (MAX_CONTAINERS - 2) + "[]]") != "refused"
    assert read("[" + "[]," * MAX_CONTAINERS + "[]]") == "refused"


def test_code_that_submits_too_many_lists_gets_a_clear_error() -> None:
    code = "try: SUBMIT(x=[[]] * 100_001)\nexcept ValueError as error: SUBMIT(said=str(error), text='[{' * 200_000)"
    with LocalInterpreter(isolation="none") as interpreter:
        result = interpreter.execute(code)
    assert "more than 100,000 lists and dicts" in result.said
    assert "save_to_volume" in result.said
    assert len(result.text) == 400_000


@pytest.mark.anyio
async def test_calls_beyond_a_sandboxs_256_threads_wait() -> None:
    under_way, most, answered, lock, is_full = 0, 0, 0, threading.Lock(), threading.Event()

    def ask() -> None:
        nonlocal under_way, most, answered
        with lock:
            under_way += 1
            most = max(most, under_way)
            if under_way == 256:
                is_full.set()
        is_full.wait(90)
        time.sleep(0.02)  # long enough to see a 257th call, if there were one
        with lock:
            under_way -= 1
            answered += 1

    async with LocalSandbox(isolation="none").interpreter(tools={"ask": ask}) as interpreter:
        await interpreter.execute(f"{CALL}\nfor _ in range(600): call()\nask()")
        assert answered >= 601 - 256  # calls without a waiting caller end with their execution
    assert most == 256


@pytest.mark.full
@pytest.mark.anyio
async def test_calls_with_many_lists_wait_for_each_other() -> None:
    under_way, most, lock = 0, 0, threading.Lock()

    def ask(value: list[Any]) -> int:
        nonlocal under_way, most
        with lock:
            under_way += len(value)
            most = max(most, under_way)
        time.sleep(0.2)
        with lock:
            under_way -= len(value)
        return len(value)

    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(12) as pool:
    SUBMIT(sizes=list(pool.map(lambda size: ask([[]] * size), [40_000] * 6 + [90_000] * 2 + [1] * 4)))
"""
    async with LocalSandbox(isolation="none").interpreter(tools={"ask": ask}) as interpreter:
        result = await interpreter.execute(code)
    assert result.sizes == [40_000] * 6 + [90_000] * 2 + [1] * 4
    assert most <= MAX_CONTAINERS


@pytest.mark.anyio
async def test_a_timeout_holds_while_calls_wait_for_a_thread() -> None:
    gate = threading.Event()
    try:
        async with LocalSandbox(isolation="none").interpreter(timeout=1, tools={"ask": gate.wait}) as interpreter:
            with pytest.raises(ExecutionTimeout):
                await interpreter.execute(f"{CALL}\nfor _ in range(300): call()\nask()")
            assert (await interpreter.execute("SUBMIT(x=1)", timeout=60)).x == 1
    finally:
        gate.set()


@pytest.mark.parametrize("is_sync", [False, True])
def test_code_that_floods_the_host_with_calls_is_ended_with_a_sentence(is_sync: bool) -> None:
    gate = threading.Event()
    code = f"{CALL}\nwhile True: call()"

    def run_in_script() -> None:
        with LocalInterpreter(isolation="none", tools={"ask": gate.wait}) as interpreter:
            interpreter.execute(code)

    async def run() -> None:
        async with LocalSandbox(isolation="none").interpreter(tools={"ask": gate.wait}) as interpreter:
            try:
                await interpreter.execute(code)
            finally:
                assert (await interpreter.execute("SUBMIT(x=1)")).x == 1

    try:
        with pytest.raises(CodeCrashed, match="more than 10,256 times without waiting for an answer: make fewer"):
            run_in_script() if is_sync else asyncio.run(run())
    finally:
        gate.set()


@pytest.mark.anyio
async def test_unread_answers_end_the_execution_before_memory_fills(
    processes: Callable[[], dict[int, str]],
) -> None:
    before = set(processes())
    code = f"{CALL}\nfor _ in range(150): call()\ntime.sleep(1000)"
    tools = {"ask": lambda: "x" * 1_000_000}
    async with LocalSandbox(isolation="none").interpreter(tools=tools) as interpreter:
        with pytest.raises(CodeCrashed, match="bytes of answers unread: wait for each answer of a host function"):
            await interpreter.execute(code)
        assert max(read_memory(pid, "VmHWM") for pid in set(processes()) - before) < 120 * 1024
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
