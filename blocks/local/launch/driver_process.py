"""The process of a local sandbox's driver, as its handle sees it, and the way to start one as a program of its own."""

import asyncio
import errno
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from typing import IO

from ....sandbox.driver_bundle import build_driver_code
from ....sandbox.errors import SandboxStartError
from ....sandbox.wire.pipes import READ_BYTES, widen_pipe

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # of descriptors, memory, processes
SHORTAGE_HINT = "Let this process have more (ulimit -n, ulimit -u, ulimit -v), or use fewer workers"
PIPE_BYTES = 256 * 1024  # of the wire; a user has 64 MiB of it before the kernel makes all new pipes narrow
# What Python reads when it starts, as the processes of the code do.
START_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
BOOT_COMMENT = "# rlm-batch: "  # with it a program begins, for whoever looks at the list of processes


class DriverProcess(ABC):
    """A driver that runs: its process, and our ends of its pipes, which do not block.

    `boot` is what it has to be sent ahead of the first frame. `is_supervisor`: it is the driver's supervisor itself,
    and not a process that has the supervisor below it.
    """

    boot = b""
    is_supervisor = False

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._stderr_tail = b""
        for pipe in (stdin, stdout, stderr):
            os.set_blocking(pipe.fileno(), False)
        widen_pipe(stdin.fileno(), PIPE_BYTES)

    @abstractmethod
    async def find_pid(self) -> int:
        """Its id. Raises SandboxStartError where it could not start."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Its exit status, or the signal's number below zero; None while it runs."""

    @abstractmethod
    async def wait(self, seconds: float) -> bool:
        """Whether it ends within that time."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends it a signal; where it has ended that is no error."""

    async def has_lost_zygote(self) -> bool:
        """Return whether it ended because the zygote that it was forked from did."""
        return False

    def read_stderr_tail(self) -> str:
        """The end of what came on its standard error."""
        with suppress(OSError, ValueError):
            self._stderr_tail += os.read(self.stderr.fileno(), READ_BYTES)
        return self._stderr_tail[-2000:].decode("utf-8", "replace").strip()

    def close_pipes(self) -> None:
        """Closes our ends, upon which the driver ends everything."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()


class SpawnedProcess(DriverProcess):
    """A driver that is a program of its own. Raises SandboxStartError."""

    def __init__(self, command: list[str], cwd: str) -> None:
        # On this thread and no other: a parent-death signal comes when the thread that started a process ends.
        process = self._process = spawn_process(command, cwd, subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        super().__init__(process.stdin, process.stdout, process.stderr)
        self.boot = build_driver_code()

    async def find_pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def wait(self, seconds: float) -> bool:
        try:
            handle = os.pidfd_open(self._process.pid)
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, seconds)
            return self.exit_code is not None
        try:
            await wait_readable(handle, seconds)
        finally:
            os.close(handle)
        return self.exit_code is not None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


def spawn_process(command: list[str], cwd: str, stdin: int) -> subprocess.Popen[bytes]:
    """Starts a program with `START_ENVIRONMENT` alone, in a session of its own. Raises SandboxStartError."""
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=START_ENVIRONMENT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is the host's to handle
        )
    except OSError as error:
        remedy = f". {SHORTAGE_HINT}" if error.errno in SHORTAGES else ""
        raise SandboxStartError(f"{command[0]} could not be started: {error.strerror}{remedy}") from error


def is_shortage(error: BaseException) -> bool:
    """Whether a sandbox failed for want of what there may be again in a moment, and not of what a machine offers.

    A driver tells its own errors in words. No space is one only where a file was written: where there are to be no
    namespaces, the kernel calls that so.
    """
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (*SHORTAGES, errno.ENOSPC, errno.EDQUOT):
        return True
    return any(os.strerror(number) in str(error) for number in SHORTAGES)


def find_python() -> str:
    """This Python's own executable, not a virtual environment's: the code sees the standard library."""
    return _resolve(getattr(sys, "_base_executable", None) or sys.executable)


def build_python_command(program: str) -> list[str]:
    """The words that start the driver: without `site`, so that no package of the machine runs outside the walls.

    Its other options are those that Python would hand on to the processes of the code.
    """
    return [find_python(), "-S", "-c", program]


@cache
def _resolve(path: str) -> str:
    return os.path.realpath(path)


def build_boot_program(what: str, size: int, call: str) -> str:
    """A program that takes a marshalled one of that size from standard input and calls its `main`, as `call` says."""
    return (
        f"{BOOT_COMMENT}{what}\nimport sys\nsys.path[:] = [path for path in sys.path if path]\n"
        f"import marshal, os\nrest = {size}\ndata = []\n"
        "while rest:\n    data.append(os.read(0, rest))\n    rest -= len(data[-1]) or os._exit(0)\n"
        "driver = {'__name__': 'driver'}\nexec(marshal.loads(b''.join(data)), driver)\n"
        f"driver['main']({call})"
    )


async def wait_readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read from a descriptor within that time."""
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    loop.add_reader(fd, lambda: is_readable.done() or is_readable.set_result(None))
    try:
        done, _ = await asyncio.wait([is_readable], timeout=seconds)
    finally:
        loop.remove_reader(fd)
    return bool(done)
