"""The process of a local sandbox's driver: its interface for the handle, and its start as a separate program."""

import asyncio
import errno
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import IO

from ....sandbox.driver_bundle import build_driver_code
from ....sandbox.errors import SandboxStartError
from ....sandbox.wire.pipes import READ_BYTES, widen_pipe
from ...settings import START_ENVIRONMENT

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # no free descriptors, memory or processes
SHORTAGE_HINT = "Raise the limits of this process (ulimit -n, -u, -v), or use fewer workers"
PIPE_BYTES = 256 * 1024  # size of the wire's pipe; if a user's pipes exceed 64 MiB, new ones are small
_resolve = cache(os.path.realpath)
BOOT_COMMENT = "# rlm-batch: "  # first words of a program, to show its purpose in a list of processes


class DriverProcess(ABC):
    """A running driver: its process, and the host's ends of its pipes, which do not block."""

    boot = b""  # must be sent before the first frame
    is_supervisor = False  # True if the process is the driver's supervisor itself, not the supervisor's parent

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._stderr_tail = b""
        for pipe in (stdin, stdout, stderr):
            os.set_blocking(pipe.fileno(), False)
        widen_pipe(stdin.fileno(), PIPE_BYTES)

    @abstractmethod
    async def find_pid(self) -> int:
        """Return the process id. Raises SandboxStartError if the driver could not start."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the exit status, a negative signal number after a signal, or None while the process runs."""

    @property
    def has_ended_all(self) -> bool:
        """Return whether the process has ended together with all processes of the sandbox."""
        return self.exit_code == 0  # The driver exits with another status if it could not end them.

    def kill_namespace(self) -> None:
        """Kill the process and its process namespace. Without a namespace, do nothing."""
        return

    @abstractmethod
    async def wait(self, seconds: float) -> bool:
        """Return whether the process ends within `seconds`."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send a signal. An ended process is not an error."""

    def read_stderr_tail(self) -> str:
        with suppress(OSError, ValueError):
            self._stderr_tail += os.read(self.stderr.fileno(), READ_BYTES)
        return self._stderr_tail[-2000:].decode("utf-8", "replace").strip()

    def close_pipes(self) -> None:
        """Close the host's ends of the pipes, which makes the driver end everything."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()


class SpawnedProcess(DriverProcess):
    """A driver that runs as a separate program. The constructor raises SandboxStartError."""

    def __init__(self, command: list[str], cwd: str) -> None:
        # Start it on the calling thread: the kernel sends a parent-death signal when the starting thread ends.
        process = spawn_process(command, cwd, subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        super().__init__(process.stdin, process.stdout, process.stderr)
        self._process = process
        self.boot = build_driver_code()

    async def find_pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, seconds)
        return self.exit_code is not None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


def spawn_process(
    command: list[str], cwd: str, stdin: int, environment: Mapping[str, str] = START_ENVIRONMENT
) -> subprocess.Popen[bytes]:
    """Start a program in a new session, with this environment alone. Raises SandboxStartError."""
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Only the host handles Ctrl-C in the terminal.
        )
    except OSError as error:
        remedy = f". {SHORTAGE_HINT}" if error.errno in SHORTAGES else ""
        raise SandboxStartError(f"{command[0]} could not be started: {error.strerror}{remedy}") from error


def is_shortage(error: BaseException) -> bool:
    """Return whether a sandbox failed for a temporary shortage, and not because the machine lacks a feature."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (*SHORTAGES, errno.ENOSPC, errno.EDQUOT):
        return True
    # A driver reports its errors as text. There, ENOSPC may mean that namespaces are disabled.
    return any(os.strerror(number) in str(error) for number in SHORTAGES)


def find_python() -> str:
    """Return the base executable of this Python, outside a virtual environment, with only the standard library."""
    return _resolve(getattr(sys, "_base_executable", None) or sys.executable)


def build_python_command(program: str) -> list[str]:
    """Return the command that starts the driver, without `site`: no package of the machine may run unconfined.

    `-I` is missing, because Python would pass it on to the processes of the code.
    """
    return [find_python(), "-S", "-c", program]


def build_boot_program(title: str, size: int, arguments: str, descriptor: int = 0) -> str:
    """Return a program that reads `size` bytes of marshalled code from a descriptor and calls its `main`.

    `title` names the program in a list of processes. `arguments` is the source text of the arguments of `main`.
    """
    return (
        f"{BOOT_COMMENT}{title}\nimport sys\nsys.path[:] = [path for path in sys.path if path]\n"
        f"import marshal, os\nrest = {size}\ndata = []\n"
        f"while rest:\n    data.append(os.read({descriptor}, rest))\n    rest -= len(data[-1]) or os._exit(0)\n"
        # A variable that kept the code's bytes would cost each fork 130 more pages.
        "program = marshal.loads(b''.join(data))\ndel data\n"
        "driver = {'__name__': 'driver'}\nexec(program, driver)\n"
        f"driver['main']({arguments})"
    )


async def wait_readable(fd: int, seconds: float) -> bool:
    """Return whether the descriptor becomes readable within `seconds`."""
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    loop.add_reader(fd, lambda: is_readable.done() or is_readable.set_result(None))
    try:
        done, _ = await asyncio.wait([is_readable], timeout=seconds)
    finally:
        loop.remove_reader(fd)
    return bool(done)
