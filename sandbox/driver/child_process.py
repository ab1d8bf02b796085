"""A child, seen from the supervisor: how it is made, the pipes to it, and the execution that it has."""

from __future__ import annotations

import fcntl
import os
import time

from ..wire.frames import MAX_CALL_BYTES, FrameReader, encode_frame
from ..wire.pipes import READ_BYTES, widen_pipe
from ..wire.strict_json import dumps
from .child.channel import CHANNEL_IN, CHANNEL_OUT
from .child.runner import CodeRunner
from .output_stream import OutputStream
from .processes import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .confinement import Confinement
    from .event_loop import EventLoop

CHANNEL_PIPE_BYTES = 1024 * 1024  # of pipe to a child, the most that an ordinary user may ask for
NEVER = float("inf")  # a moment
CPU_GRACE_SECONDS = 10.0  # beyond its timeout that an execution has to be interrupted, and to be ended
MAX_CPU_SECONDS = 1e9  # above which there is no limit
INHERIT_EXIT = 70  # a child that could not even report why it failed (EX_SOFTWARE)


class Execution:
    """One execution; `timeout` is in seconds, and `output_cap` is a number of characters of each stream."""

    def __init__(self, number: int, timeout: float | None, output_cap: int) -> None:
        self.id = number
        # Drawn anew, so that what runs in one execution of a context cannot tell that of a later one.
        self.token = os.urandom(16).hex()  # of what ends it
        self.call_token = os.urandom(16).hex()  # of calls, also from threads that earlier executions have left
        self.timeout = NEVER if timeout is None else timeout
        self.started_at = 0.0  # monotonic seconds, as below
        self.due_at = NEVER  # when its timeout is over; once it `is_ending`, when it is killed
        self.is_ending = False
        self.has_second_interrupt = False  # to come before it is killed
        self.end_cause = ""  # why we ended it: timeout, cancelled, channel
        self.submitted: bytes | None = None
        self.status = ""  # the child's last word
        self.outcome: bytes | None = None
        self.files: bytes | None = None  # that it wrote on the volume
        self.streams: dict[str, OutputStream] = {}  # of those that it has written to
        self._output_cap = output_cap

    def set_end(self, grace: float) -> None:
        """Has it killed if it has not ended after `grace` seconds."""
        self.is_ending, self.due_at = True, time.monotonic() + grace

    def read_output(self, stream: str, data: bytes) -> str:
        if stream not in self.streams:
            self.streams[stream] = OutputStream(self._output_cap)
        return self.streams[stream].feed(data)


class ChildProcess:
    """A child that is confined and waits for an execution, or has one.

    `waiting` are the executions of its context that come next; `unconfined` is why it could not be confined, if so;
    `is_broken` says that what it wrote to its channel was wrong.
    """

    def __init__(self, pid: int, reads: int, writes: int, outputs: dict[str, int], loop: EventLoop) -> None:
        self.pid = pid
        self.context: str | None = None
        self.execution: Execution | None = None
        self.waiting: list[tuple[Execution, bytes]] = []
        self.reads, self.writes = reads, writes  # our ends of its channel
        self.outputs = outputs
        self.unconfined: bytes | None = None
        self.frames = FrameReader(MAX_CALL_BYTES)
        self.is_broken = False
        self.executions = 0  # that it was handed
        self._backlog = bytearray()
        self._loop = loop

    def list_fds(self) -> list[int]:
        return [self.reads, self.writes, *self.outputs.values()]

    @property
    def backlog_bytes(self) -> int:
        """Those that it has been sent and has not taken yet."""
        return len(self._backlog)

    def begin(self, execution: Execution, body: bytes) -> None:
        """Hands an execution to the child, which is free."""
        self.execution = execution
        self.executions += 1
        execution.started_at = time.monotonic()
        execution.due_at = execution.started_at + execution.timeout
        if self.unconfined is not None:
            execution.status, execution.outcome = "unconfined", self.unconfined
        if len(body) > READ_BYTES:
            widen_pipe(self.writes, CHANNEL_PIPE_BYTES)
        header: dict[str, Any] = {"op": "execute", "token": execution.token, "call_token": execution.call_token}
        header["once"] = self.context is None
        if self.context is None and execution.timeout < MAX_CPU_SECONDS:
            # What all processors can do in that time: for what outlives it although it should not.
            header["cpu_seconds"] = int((execution.timeout + CPU_GRACE_SECONDS) * (os.cpu_count() or 1)) + 1
        self.send(header, body)

    def send(self, header: dict[str, Any], body: bytes) -> None:
        self._backlog += encode_frame(header, body)
        self._flush()

    def _flush(self) -> None:
        # One that takes no more is dead or dying: the kernel will say so.
        self._loop.flush(self.writes, self._backlog, self._flush)


def fork_child(
    settings: dict[str, Any], confinement: Confinement, loop: EventLoop, list_supervisor_fds: Callable[[], list[int]]
) -> ChildProcess:
    """Forks a child that runs code; it closes the supervisor's descriptors. Raises OSError."""
    pipes: list[int] = []
    try:
        for _ in range(4):
            pipes += os.pipe()
        supervisor = os.getpid()
        pid = os.fork()
    except OSError:
        for fd in pipes:
            os.close(fd)
        raise
    in_reads, in_writes, out_reads, out_writes, stdout_reads, stdout_writes, stderr_reads, stderr_writes = pipes
    ends = (in_reads, out_writes, stdout_writes, stderr_writes)
    if pid == 0:
        try:
            _become_child(supervisor, confinement, ends, list_supervisor_fds())
            CodeRunner(settings).serve(confinement)
        except BaseException as error:
            os.write(2, f"the driver failed: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(INHERIT_EXIT)
    for fd in ends:
        os.close(fd)
    for fd in (in_writes, out_reads, stdout_reads, stderr_reads):
        os.set_blocking(fd, False)
    return ChildProcess(pid, out_reads, in_writes, {"stdout": stdout_reads, "stderr": stderr_reads}, loop)


def _become_child(supervisor: int, confinement: Confinement, ends: tuple[int, ...], supervisor_fds: list[int]) -> None:
    """Leaves everything of the supervisor's behind. Ends the process if the confinement cannot be had."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    for fd in supervisor_fds:
        os.close(fd)  # first, so that there are some left for what follows
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, CHANNEL_OUT + 1) for fd in ends]  # clear of where they go
    os.dup2(high[0], CHANNEL_IN, inheritable=False)
    os.dup2(high[1], CHANNEL_OUT, inheritable=False)
    os.dup2(high[2], 1)
    os.dup2(high[3], 2)
    try:
        confinement.confine(supervisor)
    except OSError as error:
        message = dumps({"message": f"the confinement could not be had: {error.strerror or error}"}).encode()
        os.write(CHANNEL_OUT, encode_frame({"op": "end", "status": "setup"}, message))
        os._exit(0)
    os.closerange(CHANNEL_OUT + 1, max(*high, *supervisor_fds, *ends) + 1)
