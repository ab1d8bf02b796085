"""The channel to a driver on Modal: standard streams of a command, through the client's own buffers."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rlm_batch import ModalSandbox, OutcomeUnknown

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]

SIXTEEN = """
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(16) as pool:
    answers = list(pool.map(lambda n: [ask(n, "x" * 3000 * k) for k in range(20)], range(16)))
SUBMIT(answers=answers)
"""


@pytest.mark.full
async def test_sixteen_threads_ask_the_host_at_once_and_none_is_lost(modal_sandbox: Make) -> None:
    together, most, lock = 0, 0, threading.Lock()

    def ask(number: int, text: str) -> list[int]:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        time.sleep(0.005)
        with lock:
            together -= 1
        return [number, len(text)]

    async with modal_sandbox().interpreter(tools={"ask": ask}) as interpreter:
        result = await interpreter.execute(SIXTEEN)
    assert result.answers == [[[n, 3000 * k] for k in range(20)] for n in range(16)]
    assert most > 1


async def test_sixteen_answers_at_the_same_moment_all_arrive(modal_sandbox: Make) -> None:
    everyone = asyncio.Barrier(16)

    async def meet(number: int) -> str:
        await everyone.wait()
        return f"{number} " * 1000

    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    SUBMIT(right=[answer == f"{n} " * 1000 for n, answer in enumerate(pool.map(meet, range(16)))])
"""
    async with modal_sandbox().interpreter(tools={"meet": meet}) as interpreter:
        for _ in range(5):
            assert (await interpreter.execute(code)).right == [True] * 16


@pytest.mark.full
async def test_answers_are_not_lost_where_the_network_breaks_off(modal_sandbox: Make, modal_standin: Any) -> None:
    async with modal_sandbox().interpreter(tools={"ask": lambda n, text: [n, len(text)]}) as interpreter:
        await interpreter.execute("1")
        modal_standin.ask(
            "faults",
            rules=[
                {"method": "TaskExecStdinWrite", "status": "UNAVAILABLE", "probability": 0.1},
                {"method": "TaskExecStdinWrite", "status": "UNAVAILABLE", "probability": 0.1, "after": True},
                {"method": "TaskExecStdinWrite", "status": "RESOURCE_EXHAUSTED", "probability": 0.1},
                {"method": "TaskExecStdinWrite", "drop": True, "probability": 0.05},
            ],
        )
        result = await interpreter.execute(SIXTEEN)
        assert result.answers == [[[n, 3000 * k] for k in range(20)] for n in range(16)]
        assert modal_standin.ask("state")["faults"]["TaskExecStdinWrite"] > 10


async def test_output_goes_on_where_its_stream_breaks_off(modal_sandbox: Make, modal_standin: Any) -> None:
    async with modal_sandbox().interpreter() as interpreter:
        await interpreter.execute("1")
        heard: list[str] = []
        code = "import time\nfor n in range(200):\n    print(n, flush=True)\n    time.sleep(0.01)\nSUBMIT(x=1)"
        running = asyncio.create_task(interpreter.execute(code, on_output=lambda _, text: heard.append(text)))
        modal_standin.ask(
            "faults",
            rules=[
                {"method": "TaskExecStdioRead", "status": "RESOURCE_EXHAUSTED", "probability": 0.3},
                {"method": "TaskExecStdioRead", "status": "UNAVAILABLE", "probability": 0.3},
            ],
        )
        for _ in range(6):
            await asyncio.sleep(0.25)
            modal_standin.ask("drop")
        result = await running
    assert "".join(heard).split() == [str(n) for n in range(200)]
    assert result.meta.stdout.split() == [str(n) for n in range(200)]
    assert modal_standin.ask("state")["counts"]["TaskExecStdioRead"] > 2


async def test_bytes_that_are_no_text_stop_nothing(modal_sandbox: Make) -> None:
    async with modal_sandbox().interpreter() as interpreter:
        result = await interpreter.execute(r"import os; os.write(1, b'\xff\xfe ok\n'); SUBMIT(x=1)")
    assert result.x == 1
    assert "ok" in result.meta.stdout


@pytest.mark.full
async def test_twenty_megabytes_go_in(modal_sandbox: Make) -> None:
    async with modal_sandbox().interpreter(timeout=60) as interpreter:
        text = "0123456789" * 2_000_000
        assert (await interpreter.execute("SUBMIT(size=len(text))", {"text": text})).size == 20_000_000


async def test_a_cancelled_execution_ends_and_the_sandbox_goes_on(modal_sandbox: Make) -> None:
    async with modal_sandbox().interpreter() as interpreter:
        begun = asyncio.Event()
        code = "print('on', flush=True)\nwhile True: pass"
        running = asyncio.create_task(interpreter.execute(code, on_output=lambda *_: begun.set()))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await interpreter.execute("SUBMIT(x=1)")).x == 1


async def test_a_driver_of_which_nothing_is_heard_has_an_unknown_outcome(
    modal_sandbox: Make, modal_standin: Any
) -> None:
    """The first execution goes with what starts the driver, and runs whether that is heard or not."""
    modal_standin.ask("faults", rules=[{"method": "TaskExecStdioRead", "status": "PERMISSION_DENIED"}])
    interpreter = modal_sandbox().interpreter(timeout=20)
    with ExecutionCounter() as counter:
        code = f"{COUNT_EXECUTION}\ncount_execution('x')"
        try:
            with pytest.raises(OutcomeUnknown, match=r"its output broke off.*idempotent=True"):
                await interpreter.execute(code, {"address": counter.address})
        finally:
            await interpreter.shutdown()
        assert counter.counts["x"] <= 1


async def test_a_fresh_sandbox_for_one_execution_takes_five_calls(modal_sandbox: Make, modal_standin: Any) -> None:
    async def execute() -> Counter[str]:
        interpreter = modal_sandbox().interpreter(timeout=20)
        try:
            assert (await interpreter.execute("SUBMIT(1)")).output == 1
        finally:
            await interpreter.shutdown()
        return Counter(modal_standin.ask("state")["counts"])

    before = await execute()  # which asks for the app and the image, too
    assert await execute() - before == Counter(
        ["SandboxCreateV2", "TaskExecStart", "TaskExecStdinWrite", "TaskExecStdioRead", "SandboxTerminateV2"]
    )
