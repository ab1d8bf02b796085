"""A child, seen from the supervisor: how it is made, and the pipes to it."""

from __future__ import annotations

import fcntl
import os

from ..wire.frames import FrameReader, encode_frame
from ..wire.pipes import READ_BYTES, widen_pipe, write_available
from ..wire.strict_json import dumps
from .child.channel import CHANNEL_IN, CHANNEL_OUT, MAX_CALL_BYTES
from .child.runner import CodeRunner
from .signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .confinement import Confinement
    from .event_loop import EventLoop
    from .execution import Execution

CHANNEL_PIPE_BYTES = 1024 * 1024  # of pipe to a child, the most that an ordinary user may ask for
INHERIT_EXIT = 70  # a child that could not even report why it failed (EX_SOFTWARE)


class ChildProcess:
    """A child that is confined and waits for an execution, or has one.

    `waiting` are the executions of its context that come next; `unconfined` is why it could not be confined, if so;
    `broken` is what was wrong with what it wrote to its channel.
    """

    def __init__(self, pid: int, reads: int, writes: int, outputs: dict[str, int]) -> None:
        self.pid = pid
        self.context: str | None = None
        self.execution: Execution | None = None
        self.waiting: list[tuple[Execution, bytes]] = []
        self.reads, self.writes = reads, writes  # our ends of its channel
        self.outputs = outputs
        self.unconfined: bytes | None = None
        self.frames = FrameReader(MAX_CALL_BYTES)
        self.backlog = bytearray()
        self.broken = ""

    def list_fds(self) -> list[int]:
        return [self.reads, self.writes, *self.outputs.values()]

    def begin(self, execution: Execution, body: bytes, loop: EventLoop) -> None:
        """Hands an execution to the child, which is free."""
        execution.start_clock()
        self.execution = execution
        if self.unconfined is not None:
            execution.status, execution.outcome = "unconfined", self.unconfined
        if len(body) > READ_BYTES:
            widen_pipe(self.writes, CHANNEL_PIPE_BYTES)
        header = {"op": "execute", "token": execution.token, "once": self.context is None}
        self.send(encode_frame(header, body), loop)

    def send(self, data: bytes, loop: EventLoop) -> None:
        self.backlog += data
        self._flush(loop)

    def _flush(self, loop: EventLoop) -> None:
        if not write_available(self.writes, self.backlog):
            self.backlog.clear()  # it is dead or dying: the kernel will say so
        loop.watch_backlog(self.writes, self.backlog, lambda: self._flush(loop))


def fork_child(
    settings: dict[str, Any], confinement: Confinement, list_supervisor_fds: Callable[[], list[int]]
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
    if pid == 0:
        try:
            ends = (in_reads, out_writes, stdout_writes, stderr_writes)
            _become_child(supervisor, confinement, ends, list_supervisor_fds())
            CodeRunner(settings).serve(confinement)
        except BaseException as error:
            os.write(2, f"the driver failed: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(INHERIT_EXIT)
    for fd in (in_reads, out_writes, stdout_writes, stderr_writes):
        os.close(fd)
    for fd in (in_writes, out_reads, stdout_reads, stderr_reads):
        os.set_blocking(fd, False)
    return ChildProcess(pid, out_reads, in_writes, {"stdout": stdout_reads, "stderr": stderr_reads})


def _become_child(
    supervisor: int, confinement: Confinement, ends: tuple[int, int, int, int], supervisor_fds: list[int]
) -> None:
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
