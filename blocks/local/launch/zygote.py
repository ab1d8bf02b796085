"""The host's side of a zygote: its start, the requests to it, and the drivers forked from it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ....sandbox.driver_bundle import ZYGOTE_MODULES, build_driver_code
from ....sandbox.errors import SandboxStartError
from ...settings import START_ENVIRONMENT
from .driver_process import (
    SHORTAGE_HINT,
    DriverProcess,
    build_boot_program,
    build_python_command,
    spawn_process,
    wait_readable,
)

# The loader looks up all functions of libraries at the start. Otherwise each fork would look up 15 of them again.
ENVIRONMENT = {**START_ENVIRONMENT, "LD_BIND_NOW": "1"}
START_TIMEOUT_SECONDS = 20.0  # limit for a zygote's start and for a fork; a busy machine takes 1 s
PACKET_BYTES = 32 * 1024
SEND_RETRY_SECONDS = 0.005  # pause when the zygote's queue is full
MAX_MESSAGE_BYTES = 4096
MAX_MESSAGE_CHARACTERS = 2000  # characters of an error's text


class ZygoteError(Exception):
    """The error of a zygote that did not start, ended, or could not set up its first sandbox."""


class Zygote:
    """A process that forks drivers. It ends with this object, and so do all processes that it forked."""

    def __init__(self, command: list[str], folders: str | None, python_directory: Mapping[str, Any]) -> None:
        """Start the zygote and wait until it is ready. Raises ZygoteError.

        Args:
            command: bubblewrap's command line, which goes before the zygote's program; empty without bubblewrap.
            folders: Where the zygote sees the folders of all sandboxes. None if sandboxes have no namespaces.
            python_directory: The arguments of `write_python_directory`.
        """
        code = build_driver_code(ZYGOTE_MODULES)
        user = None if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        arguments = f"folders={folders!r}, user={user!r}, python_directory={python_directory!r}"
        program = build_boot_program("zygote of local sandboxes", len(code), arguments)
        control, zygote_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with zygote_control:
            try:
                self._process = spawn_process(
                    [*command, *build_python_command(program)], "/", zygote_control.fileno(), ENVIRONMENT
                )
            except SandboxStartError as error:
                control.close()
                raise ZygoteError(str(error)) from error
        self._control = control
        self.processes = weakref.WeakSet[ForkedProcess]()
        self.has_namespaces = folders is not None  # Each sandbox has a process namespace.
        self.has_forked = False  # True after the first sandbox was ready
        self.used_at = time.monotonic()
        self._handles: list[int] = []  # pidfd of the forking process, which may be a child of bubblewrap
        self._finalizer = weakref.finalize(self, _end_zygote, control, self._process, self._handles)
        self._boot(code)

    def _boot(self, code: bytes) -> None:
        """Send the zygote its code, and wait until it is ready. Raises ZygoteError."""
        with suppress(OSError):
            self._control.settimeout(START_TIMEOUT_SECONDS)
            for begin in range(0, len(code), PACKET_BYTES):
                self._control.send(code[begin : begin + PACKET_BYTES])
            _, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            self._handles += fds
            self._control.setblocking(False)
        if not self._handles:
            self._control.close()  # The zygote ends when its socket closes.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._process.kill()
            _, stderr = self._process.communicate()
            self.end()
            message = stderr.decode("utf-8", "replace").strip()[-MAX_MESSAGE_CHARACTERS:]
            raise ZygoteError(message or "it was not ready in time")

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive and self._process.poll() is None

    def end(self) -> None:
        self._finalizer()

    def forget(self) -> None:
        """Release the zygote in a forked process; it keeps serving the parent process."""
        self._finalizer.detach()
        self._control.close()
        while self._handles:
            os.close(self._handles.pop())

    async def fork(self, request: dict[str, Any]) -> "ForkedProcess":
        """Fork a new sandbox's driver, which waits for its first frame. Raises ZygoteError, SandboxStartError.

        Only the first fork waits until its sandbox is ready. The failure of another fork shows on the wire or in
        `find_pid`.
        """
        self.used_at = time.monotonic()
        process, driver_fds = self._open_pipes()
        try:
            await self._send(json.dumps(request).encode(), driver_fds)
            if not self.has_forked:
                await self._wait_for_first(process)
        except BaseException:
            process.close()
            raise
        return process

    async def _wait_for_first(self, process: "ForkedProcess") -> None:
        try:
            await process.find_pid()
        except SandboxStartError as error:
            raise ZygoteError(str(error)) from error
        self.has_forked = True

    def _open_pipes(self) -> tuple["ForkedProcess", list[int]]:
        """Return a driver that is not forked yet, and its ends of the pipes to it. Raises SandboxStartError."""
        fds: list[int] = []
        try:
            for _ in range(3):
                fds += os.pipe()
            status, driver_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise SandboxStartError(
                f"a sandbox's pipes could not be created: {error.strerror}. {SHORTAGE_HINT}"
            ) from error
        driver_stdin, stdin, stdout, driver_stdout, stderr, driver_stderr = fds
        pipes = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
        return ForkedProcess(self, *pipes, status), [driver_stdin, driver_stdout, driver_stderr, driver_status.detach()]

    async def _send(self, data: bytes, fds: list[int]) -> None:
        """Send a request with descriptors, and close them in this process. Raises ZygoteError."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            while time.monotonic() < deadline:
                try:
                    socket.send_fds(self._control, [data], fds)
                    return
                except BlockingIOError:
                    await asyncio.sleep(SEND_RETRY_SECONDS)
            raise ZygoteError(f"it answered no request for {START_TIMEOUT_SECONDS:g} s")
        except OSError as error:
            raise ZygoteError(f"it has ended: {error.strerror}") from error
        finally:
            for fd in fds:
                os.close(fd)


class ForkedProcess(DriverProcess):
    """A driver that was forked from a zygote."""

    is_supervisor = True

    def __init__(
        self, zygote: Zygote, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes], status: socket.socket
    ) -> None:
        super().__init__(stdin, stdout, stderr)
        self._zygote = zygote  # Without this reference the zygote could end, and the driver with it.
        self._status = status
        self._pidfd = -1  # descriptor of the process once the sandbox is ready
        self._failure = ""  # reason why the sandbox did not become ready
        self._was_cut_off = False  # True if the zygote reported no exit status
        self._has_killed_namespace = False
        self._exit_code: int | None = None
        status.setblocking(False)
        zygote.processes.add(self)
        self._finalizer = weakref.finalize(self, status.close)

    async def find_pid(self) -> int:
        """Wait until the sandbox is ready and return the process id. Raises SandboxStartError."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while self._pidfd < 0 and self._exit_code is None and time.monotonic() < deadline:
            await wait_readable(self._status.fileno(), deadline - time.monotonic())
            self._read_status()
        if self._pidfd < 0:
            reason = f"it did not start within {START_TIMEOUT_SECONDS:g} s"
            if self._failure:
                reason = self._failure
            elif self._exit_code is not None:
                reason = "it ended before it started"
            raise SandboxStartError(f"the sandbox could not be started: {reason}. See rlm-batch doctor")
        # The kernel shows the process id of a pidfd here.
        information = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text(encoding="ascii")
        _, _, after_label = information.partition("Pid:")
        return int(after_label.split()[0])

    def _read_status(self) -> None:
        """Read the messages that the sandbox and the zygote have sent about it."""
        with suppress(BlockingIOError):
            while self._exit_code is None:
                data, fds, _, _ = socket.recv_fds(self._status, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                kind, _, rest = data.decode("utf-8", "replace").partition(" ")
                if fds:
                    self._pidfd = fds[0]
                    self._finalizer.detach()
                    self._finalizer = weakref.finalize(self, _close_all, self._status, self._pidfd)
                elif kind == "failed":
                    _error_number, _, self._failure = rest.partition(" ")
                elif kind == "ended":
                    self._exit_code = int(rest)
                else:
                    # If the zygote was killed, the kernel also killed this driver, or the handle kills what still runs.
                    self._was_cut_off = True
                    self._exit_code = -signal.SIGKILL

    @property
    def exit_code(self) -> int | None:
        self._read_status()
        return self._exit_code

    @property
    def has_ended_all(self) -> bool:
        # The kernel reports the end of a namespace's first process after the ends of all others.
        has_status_of_kill = self.exit_code == -signal.SIGKILL and not self._was_cut_off
        return (self._has_killed_namespace and has_status_of_kill) or super().has_ended_all

    def kill_namespace(self) -> None:
        self._read_status()
        if self._zygote.has_namespaces and self._pidfd >= 0:
            self._has_killed_namespace = True
            self.send_signal(signal.SIGKILL)

    async def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < deadline:
            await wait_readable(self._status.fileno(), deadline - time.monotonic())
        return self.exit_code is not None

    def send_signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, number)

    def read_stderr_tail(self) -> str:
        self._read_status()
        return self._failure or super().read_stderr_tail()

    def close(self) -> None:
        """Close all descriptors and release the zygote."""
        self.close_pipes()
        self._finalizer()
        self._zygote.processes.discard(self)


def _close_all(status: socket.socket, pidfd: int) -> None:
    status.close()
    os.close(pidfd)


def _end_zygote(control: socket.socket, process: subprocess.Popen[bytes], handles: list[int]) -> None:
    """End the zygote by closing its socket, and kill it after 1 s. The end of this process also closes the socket."""
    while handles:
        os.close(handles.pop())
    control.close()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
        return
    process.kill()
    process.wait()
