"""Tests of the intake of a sandbox's data: limited lists and dicts, and a limited number of calls of host functions."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlm_batch import CodeCrashed, ExecutionTimeout, LocalSandbox
from rlm_batch.sandbox.wire.strict_json import MAX_CONTAINERS

from .conftest import execute, read_memory

# This code calls host functions as fast as a thousand threads would, and waits for no answer.
CALL = """
import time
channel = next(cell.cell_contents for cell in ask.__closure__ if hasattr(cell.cell_contents, "_channel"))._channel
def call(body=b'{"args":[],"kwargs":{}}', number=[1_000_000]):
    number[0] += 1
    channel.send({"op": "call", "token": channel.token, "call": number[0], "name": "ask"}, body)
"""


@pytest.mark.anyio
async def test_code_that_submits_too_many_lists_gets_a_clear_error() -> None:
    code = "try: SUBMIT(x=[[]] * 100_001)\nexcept ValueError as error: SUBMIT(said=str(error), text='[{' * 200_000)"
    result = await execute(True, code)
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

    await execute(False, f"{CALL}\nfor _ in range(600): call()\nask()", ask=ask)
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


@pytest.mark.anyio
@pytest.mark.parametrize("is_sync", [False, True])
async def test_code_that_floods_the_host_with_calls_is_ended_with_a_sentence(is_sync: bool) -> None:
    gate = threading.Event()
    try:
        with pytest.raises(CodeCrashed, match="more than 10,256 times without waiting for an answer: make fewer"):
            await execute(is_sync, f"{CALL}\nwhile True: call()", ask=gate.wait)
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
