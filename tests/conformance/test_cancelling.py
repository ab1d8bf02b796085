"""An execution that nobody waits for any more ends, and the sandbox can be used again."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import OutcomeUnknown, SandboxLost
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

# Holds a lock for as long as its process lives, and says so.
HOLDING = """
import fcntl, time
file = open("lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held")
time.sleep(1000)
"""
STUBBORN = HOLDING.replace("time.sleep(1000)", "while True:\n    try: time.sleep(1000)\n    except BaseException: pass")
RELEASED = """
import fcntl, time
file = open("lock", "w")
until = time.monotonic() + 5
while time.monotonic() < until:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        SUBMIT(released=True)
    except BlockingIOError:
        time.sleep(0.01)
SUBMIT(released=False)
"""


async def begun(interpreter: Interpreter, code: str, context: str | None = None) -> asyncio.Task[object]:
    """An execution that has printed something."""
    heard = asyncio.Event()
    task: asyncio.Task[object] = asyncio.ensure_future(
        interpreter.execute(code, context=context, on_output=lambda *_: heard.set())
    )
    await asyncio.wait_for(heard.wait(), 10)
    return task


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


@pytest.mark.every_provider
async def test_cancelling_ends_the_execution_and_leaves_the_sandbox_usable(interpreter: Interpreter) -> None:
    for code in (HOLDING, STUBBORN):
        await cancelled(await begun(interpreter, code))
        assert (await interpreter.execute(RELEASED)).released


async def test_cancelling_one_execution_ends_no_other(interpreter: Interpreter) -> None:
    other = asyncio.ensure_future(interpreter.execute("import time; time.sleep(0.5); SUBMIT(x=1)"))
    await cancelled(await begun(interpreter, HOLDING))
    assert (await other).x == 1


async def test_a_cancelled_execution_of_a_context_keeps_its_state(interpreter: Interpreter) -> None:
    await interpreter.execute("kept = 1", context="c")
    for _ in range(3):
        await cancelled(await begun(interpreter, "print('on'); import time; time.sleep(1000)", context="c"))
        assert (await interpreter.execute("SUBMIT(kept=kept)", context="c")).kept == 1


async def test_cancelling_at_any_moment_leaves_the_sandbox_usable(interpreter: Interpreter) -> None:
    for context in (None, "c"):
        for pause in range(12):
            task: asyncio.Task[object] = asyncio.ensure_future(
                interpreter.execute("x = 1\nimport time; time.sleep(0.003)", context=context)
            )
            await asyncio.sleep(pause / 1500)
            task.cancel()
            await asyncio.wait([task])
        assert (await interpreter.execute("SUBMIT(x=1)", context=context)).x == 1


@pytest.mark.full
async def test_cancelling_while_a_large_variable_is_sent_leaves_the_sandbox_usable(interpreter: Interpreter) -> None:
    other = asyncio.ensure_future(interpreter.execute("import time; time.sleep(0.5); SUBMIT(x=1)"))
    variables = {"text": "x" * 30_000_000}
    for turns in (1, 2, 3, 5, 10):
        task: asyncio.Task[object] = asyncio.ensure_future(interpreter.execute("SUBMIT()", variables))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=20)
    assert (await interpreter.execute("SUBMIT(x=2)", timeout=5)).x == 2
    assert (await other).x == 1


async def test_code_that_has_run_when_its_start_is_heard_of_is_not_called_unsent(provider: SandboxProvider) -> None:
    interpreter, held, endings = provider.interpreter(timeout=20), bytearray(), list[asyncio.Task[None]]()
    receive = interpreter._receive  # type: ignore[reportPrivateUsage]

    def receive_at_once(data: bytes) -> None:  # as a host does that has been busy meanwhile
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
async def test_shutdown_during_an_execution_ends_it_with_an_error(provider: SandboxProvider) -> None:
    interpreter = provider.interpreter(timeout=20)
    task = await begun(interpreter, "print('on')\n" + STUBBORN)
    await interpreter.shutdown()
    with pytest.raises(OutcomeUnknown, match="shut down") as caught:
        await asyncio.wait_for(task, 10)
    assert caught.value.meta is not None
    assert caught.value.meta.stdout.startswith("on\n")
    with pytest.raises(SandboxLost):
        await interpreter.execute("SUBMIT()")
    await interpreter.shutdown()


@pytest.mark.every_provider
@pytest.mark.own_machine
async def test_shutdown_waits_for_nothing_that_the_code_does(provider: SandboxProvider) -> None:
    code = """
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
    interpreter = provider.interpreter(timeout=None)
    task = await begun(interpreter, dedent(code))
    await asyncio.wait_for(interpreter.shutdown(), 10)
    with pytest.raises(OutcomeUnknown):
        await task


@pytest.mark.every_provider
async def test_cancelling_the_start_leaves_nothing(provider: SandboxProvider) -> None:
    for pause in (0, 0.001, 0.005, 0.01, 0.02):
        interpreter = provider.interpreter()
        task = asyncio.ensure_future(interpreter.start())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await interpreter.shutdown()


async def test_an_interpreter_that_was_shut_down_before_it_started_stays_so(provider: SandboxProvider) -> None:
    interpreter = provider.interpreter()
    await interpreter.shutdown()
    with pytest.raises(SandboxLost):
        await interpreter.start()
