"""A frozen driver, which reads no input. No caller waits for it forever."""

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from rlm_batch import LocalInterpreter, LocalSandbox, OutcomeUnknown, SandboxLost
from rlm_batch.blocks.local import handle
from rlm_batch.blocks.local.channel import LocalChannel
from rlm_batch.sandbox import sync_interpreter
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.pipe_transport import PipeTransport

from ...infra.machine import is_alive
from ...infra.waiting import wait_until, wait_until_async

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
    """Check after each test that no process is left."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the grace period. Only SIGKILL, after two grace periods, ends a frozen driver."""
    monkeypatch.setattr(handle, "END_GRACE_SECONDS", 0.5)


def count_unread(pipe: int) -> int:
    """Return how many bytes are in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


class NewPipes:
    """The pipes that this process has opened since the object was created, including pipes to drivers."""

    def __init__(self) -> None:
        self._others = set(self._list_pipes())

    def find_unread(self) -> dict[str, int]:
        """Return the number of unread bytes in each new pipe."""
        return {name: count_unread(fd) for name, fd in self._list_pipes().items() if name not in self._others}

    async def wait_for_more(self, before: dict[str, int]) -> None:
        """Wait until a new pipe has more unread bytes than before."""
        await wait_until_async(
            lambda: any(count > before.get(name, 0) for name, count in self.find_unread().items()),
            "more for the driver",
        )

    @staticmethod
    def _list_pipes() -> dict[str, int]:
        pipes: dict[str, int] = {}
        for path in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the descriptor of this listing itself
                if (name := os.readlink(path)).startswith("pipe:"):
                    pipes[name] = int(path.name)
        return pipes


async def freeze(interpreter: Interpreter) -> int:
    """Stop the interpreter's driver and return its process id."""
    driver = (await interpreter.execute(FIND_DRIVER)).output
    os.kill(driver, signal.SIGSTOP)
    return driver


async def test_shutdown_ends_executions_that_are_being_sent_or_cancelled() -> None:
    pipes = NewPipes()
    interpreter = LocalSandbox(isolation="none").interpreter(timeout=600)
    await freeze(interpreter)
    before = pipes.find_unread()
    cancelled, *others = [asyncio.ensure_future(interpreter.execute("SUBMIT()", {"text": TEXT})) for _ in range(3)]
    await pipes.wait_for_more(before)
    cancelled.cancel()
    async with asyncio.timeout(90):
        await interpreter.shutdown()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for task in others:
            with pytest.raises(SandboxLost):
                await task


async def test_a_driver_that_takes_no_input_is_ended_with_its_executions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "LocalChannel", partial(LocalChannel, stall_seconds=0.5))
    async with LocalSandbox(isolation="none").interpreter(timeout=600) as interpreter, asyncio.timeout(90):
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


async def test_output_between_two_executions_of_a_context_belongs_to_neither() -> None:
    pipes = NewPipes()
    async with LocalSandbox(isolation="none").interpreter() as interpreter:
        result = await interpreter.execute(LEAVE_WRITER, context="c")
        os.kill(result.driver, signal.SIGSTOP)  # after it continues, the driver reads all following requests at once
        before = pipes.find_unread()
        another = asyncio.create_task(interpreter.execute("pass", context="another"))
        await pipes.wait_for_more(before)
        Path(f"/proc/{result.left}/fd/0").write_text("late\n")
        await wait_until_async(lambda: not is_alive(result.left), "the end of what was left, which has written")
        before = pipes.find_unread()
        following = asyncio.create_task(interpreter.execute("print(left.wait())", context="c"))
        await pipes.wait_for_more(before)
        os.kill(result.driver, signal.SIGCONT)
        assert (await following).meta.stdout == "0\n"
        await another


async def test_a_driver_that_took_its_input_while_the_host_was_stopped_survives() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    # The text is longer than the pipe, but shorter than two pipes, so a second write sends the rest.
    text = b"x" * (fcntl.fcntl(writes, fcntl.F_GETPIPE_SZ) * 3 // 2)
    sending = asyncio.ensure_future(LocalChannel(writes, stall_seconds=1).send(text))
    for _ in range(5):  # let the channel reach its wait for room in the pipe
        await asyncio.sleep(0)
    assert count_unread(writes)
    reader = subprocess.Popen(["cat"], stdin=reads, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    os.close(reads)
    time.sleep(1.2)  # noqa: ASYNC251 - blocks the loop, as a synchronous tool and Ctrl-Z do
    wait_until(lambda: not count_unread(writes), "the reader has taken all")
    await sending
    os.close(writes)
    assert reader.wait(90) == 0


def test_a_script_abandons_a_driver_that_takes_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_interpreter, "PipeTransport", partial(PipeTransport, stall_seconds=0.5))
    with LocalInterpreter(isolation="none", timeout=600) as interpreter:
        os.kill(interpreter.execute(FIND_DRIVER).output, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="none of its input"):
                interpreter.execute("SUBMIT()", {"text": TEXT})
