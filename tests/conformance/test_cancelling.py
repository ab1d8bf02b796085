"""Tests that a cancelled execution ends, and that its sandbox stays usable."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import OutcomeUnknown, SandboxLost
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import HANG_SECONDS
from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

# This code holds a lock while its process lives, and prints that it has the lock.
HOLDING = """
import fcntl, time
file = open("lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held")
time.sleep(1000)
"""
STUBBORN = HOLDING.replace("time.sleep(1000)", "while True:\n    try: time.sleep(1000)\n    except BaseException: pass")
TAKE_LOCK = "import fcntl; fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)"
# This code leaves processes that only SIGKILL ends.
DEAF = """
    import os, signal, time
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            break
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"on")
    time.sleep(1000)
    """


async def start_and_hear(interpreter: Interpreter, code: str, context: str | None = None) -> asyncio.Task[object]:
    """Start an execution, and return its task after its first output."""
    heard = asyncio.Event()
    task: asyncio.Task[object] = asyncio.ensure_future(
        interpreter.execute(code, context=context, on_output=lambda *_: heard.set())
    )
    await asyncio.wait_for(heard.wait(), HANG_SECONDS)
    return task


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, HANG_SECONDS)


@pytest.mark.every_provider
async def test_cancelling_ends_only_its_execution_and_keeps_the_sandbox_usable(
    interpreter: Interpreter,
) -> None:
    interpreter.tools["wait"] = gate = Gate()
    other = asyncio.ensure_future(interpreter.execute("wait(); SUBMIT(x=1)"))
    await gate.is_reached.wait()
    for code in (HOLDING, STUBBORN):
        await cancel(await start_and_hear(interpreter, code))
        await interpreter.execute(TAKE_LOCK)
    gate.open()
    assert (await other).x == 1


async def test_a_cancelled_execution_of_a_context_keeps_its_state(interpreter: Interpreter) -> None:
    await interpreter.execute("kept = 1", context="c")
    for _ in range(2):
        await cancel(await start_and_hear(interpreter, "print('on'); import time; time.sleep(1000)", context="c"))
        assert (await interpreter.execute("SUBMIT(kept=kept)", context="c")).kept == 1


async def test_cancelling_at_any_moment_keeps_the_sandbox_usable(interpreter: Interpreter) -> None:
    for context in (None, "c"):
        for pause in range(8):
            task: asyncio.Task[object] = asyncio.ensure_future(
                interpreter.execute("x = 1\nimport time; time.sleep(0.003)", context=context)
            )
            await asyncio.sleep(pause / 1000)
            task.cancel()
            await asyncio.wait([task])
        assert (await interpreter.execute("SUBMIT(x=1)", context=context)).x == 1


@pytest.mark.full
async def test_cancelling_an_upload_keeps_the_sandbox_usable(interpreter: Interpreter) -> None:
    interpreter.tools["wait"] = gate = Gate()
    other = asyncio.ensure_future(interpreter.execute("wait(); SUBMIT(x=1)"))
    variables = {"text": "x" * 30_000_000}
    for turns in (1, 2, 3, 5, 10):
        task: asyncio.Task[object] = asyncio.ensure_future(interpreter.execute("SUBMIT()", variables))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert (await interpreter.execute("SUBMIT(x=2)")).x == 2
    gate.open()
    assert (await other).x == 1


async def test_code_that_ran_before_its_start_was_reported_counts_as_sent(provider: SandboxProvider) -> None:
    interpreter, held, endings = provider.interpreter(), bytearray(), list[asyncio.Task[None]]()
    receive = interpreter._receive  # type: ignore[reportPrivateUsage]

    def receive_at_once(data: bytes) -> None:  # delivers late, like a busy host
        held.extend(data)
        if b'"output"' in held or endings:
            receive(bytes(held))
            held.clear()

    interpreter._receive = receive_at_once  # type: ignore[method-assign,reportPrivateUsage]
    with pytest.raises(OutcomeUnknown, match="shut down") as caught:
        await interpreter.execute(
            "print('on', flush=True)\n" + HOLDING,
            on_output=lambda *_: endings.append(asyncio.ensure_future(interpreter.shutdown())),
        )
    assert caught.value.meta is not None
    assert caught.value.meta.stdout.startswith("on\n")
    await asyncio.gather(*endings)


@pytest.mark.every_provider
async def test_shutdown_ends_an_execution_with_an_error_without_waiting_for_code(
    provider: SandboxProvider,
) -> None:
    interpreter = provider.interpreter(timeout=None)
    task = await start_and_hear(interpreter, dedent(DEAF))
    await asyncio.wait_for(interpreter.shutdown(), HANG_SECONDS)
    with pytest.raises(OutcomeUnknown, match="shut down") as caught:
        await asyncio.wait_for(task, HANG_SECONDS)
    assert caught.value.meta is not None
    assert caught.value.meta.stdout.startswith("on")
    with pytest.raises(SandboxLost):
        await interpreter.execute("SUBMIT()")
    await interpreter.shutdown()


@pytest.mark.every_provider
async def test_cancelling_the_start_leaves_no_sandbox(provider: SandboxProvider) -> None:
    for pause in (0, 0.002, 0.01):
        interpreter = provider.interpreter()
        task = asyncio.ensure_future(interpreter.start())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await interpreter.shutdown()
    never_started = provider.interpreter()
    await never_started.shutdown()
    with pytest.raises(SandboxLost):
        await never_started.start()
