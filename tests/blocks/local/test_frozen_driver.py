"""A driver that has stopped reading, as one that is frozen: nothing waits for it for ever."""

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import LocalInterpreter, LocalSandbox, OutcomeUnknown, SandboxLost
from rlm_batch.blocks.local import handle
from rlm_batch.blocks.local.channel import LocalChannel
from rlm_batch.sandbox import sync_interpreter
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.pipe_transport import PipeTransport

pytestmark = pytest.mark.anyio

TEXT = "x" * 2_000_000  # more than any pipe holds
FIND_DRIVER = "import os; SUBMIT(os.getppid())"
LEAVE_WRITER = """
import os, subprocess
left = subprocess.Popen(["sh", "-c", "read line; echo $line"], stdin=subprocess.PIPE)
SUBMIT(driver=os.getppid(), left=left.pid)
"""


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Every test here starts processes."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen driver ends by SIGKILL alone, after two graces."""
    monkeypatch.setattr(handle, "END_GRACE_SECONDS", 0.5)


def count_unread(pipe: int) -> int:
    """The bytes that are in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


@pytest.fixture
def deaf_process() -> Iterator[int]:
    """The input of a process that never reads it."""
    process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    yield process.stdin.fileno()
    process.kill()
    process.wait()
    process.stdin.close()


async def freeze(interpreter: Interpreter) -> None:
    os.kill((await interpreter.execute(FIND_DRIVER)).output, signal.SIGSTOP)


async def send_too_much(interpreter: Interpreter) -> asyncio.Task[Any]:
    """An execution whose frame the driver does not take."""
    task = asyncio.ensure_future(interpreter.execute("SUBMIT()", {"text": TEXT}))
    assert not (await asyncio.wait([task], timeout=0.3))[0]
    return task


async def test_shutdown_ends_what_is_being_sent() -> None:
    interpreter = LocalSandbox(isolation="none").interpreter(timeout=600)
    await freeze(interpreter)
    sending = [await send_too_much(interpreter) for _ in range(2)]
    async with asyncio.timeout(15):
        await interpreter.shutdown()
        for task in sending:
            with pytest.raises(SandboxLost):
                await task


async def test_shutdown_ends_what_was_cancelled_while_it_was_being_sent() -> None:
    interpreter = LocalSandbox(isolation="none").interpreter(timeout=600)
    await freeze(interpreter)
    task = await send_too_much(interpreter)
    task.cancel()
    async with asyncio.timeout(15):
        await interpreter.shutdown()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_driver_that_takes_no_input_is_given_up_with_all_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "LocalChannel", partial(LocalChannel, stall_seconds=0.5))
    async with LocalSandbox(isolation="none").interpreter(timeout=600) as interpreter, asyncio.timeout(15):
        heard = asyncio.Event()
        code = "print('on'); import time; time.sleep(1000)"
        running = asyncio.ensure_future(interpreter.execute(code, on_output=lambda *_: heard.set()))
        await heard.wait()
        await freeze(interpreter)
        with pytest.raises(SandboxLost, match="none of its input"):
            await interpreter.execute("SUBMIT()", {"text": TEXT})
        with pytest.raises(OutcomeUnknown, match="none of its input"):
            await running
        assert not interpreter.is_alive


async def test_what_is_written_between_two_executions_of_a_context_belongs_to_neither() -> None:
    async with LocalSandbox(isolation="none").interpreter(timeout=15) as interpreter:
        result = await interpreter.execute(LEAVE_WRITER, context="c")
        os.kill(result.driver, signal.SIGSTOP)  # so that it finds all at once what comes one after the other
        another = asyncio.create_task(interpreter.execute("pass", context="another"))
        await asyncio.sleep(0.1)
        Path(f"/proc/{result.left}/fd/0").write_text("late\n")
        await asyncio.sleep(0.1)
        following = asyncio.create_task(interpreter.execute("print(left.wait())", context="c"))
        await asyncio.sleep(0.1)
        os.kill(result.driver, signal.SIGCONT)
        assert (await following).meta.stdout == "0\n"
        await another


async def test_sends_that_wait_end_with_the_channel(deaf_process: int) -> None:
    channel = LocalChannel(deaf_process)
    sending = [asyncio.ensure_future(channel.send(TEXT.encode())) for _ in range(3)]
    await asyncio.wait(sending, timeout=0.1)
    channel.close()
    async with asyncio.timeout(15):
        for task in (*sending, channel.send(b"more")):
            with pytest.raises(SandboxLost, match="it was removed"):
                await task


async def test_a_driver_that_took_its_input_while_the_host_stood_still_is_kept() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    reader = subprocess.Popen(["sh", "-c", "sleep 0.3; cat >/dev/null"], stdin=reads)  # noqa: ASYNC220
    os.close(reads)
    sending = asyncio.ensure_future(LocalChannel(writes, stall_seconds=0.2).send(TEXT.encode()))
    await asyncio.sleep(0.05)
    time.sleep(1)  # noqa: ASYNC251 - as a tool does that is no coroutine, and as Ctrl-Z does
    until = time.monotonic() + 10
    while count_unread(writes) and time.monotonic() < until:
        time.sleep(0.02)  # noqa: ASYNC251
    await sending
    os.close(writes)
    assert reader.wait(15) == 0


def test_a_script_gives_up_a_driver_that_takes_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_interpreter, "PipeTransport", partial(PipeTransport, stall_seconds=0.5))
    with LocalInterpreter(isolation="none", timeout=600) as interpreter:
        os.kill(interpreter.execute(FIND_DRIVER).output, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="none of its input"):
                interpreter.execute("SUBMIT()", {"text": TEXT})
