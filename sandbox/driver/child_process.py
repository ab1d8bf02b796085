"""A child, seen from the supervisor: how it is made, the pipes to it, and the execution that it has."""

from __future__ import annotations

import os
import time

from ..wire.displays import check_displays
from ..wire.frames import MAX_CALL_BYTES, FrameReader, encode_frame_parts
from ..wire.pipes import READ_BYTES, widen_pipe, write_available
from ..wire.strict_json import dumps
from .child.channel import FORK_REQUESTS, place_descriptors, report_unconfined
from .child.forking.fork_service import serve_forks
from .child.fresh_python import start_fresh_python
from .orphans import kill_descendants
from .output_stream import OutputStream
from .processes import has_ended, kill_session, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .child.runner import CodeRunner
    from .collection import Collection
    from .confinement import Confinement
    from .event_loop import EventLoop

CHANNEL_PIPE_BYTES = 1024 * 1024  # of pipe to a child, the most that an ordinary user may ask for
CHILD_FRAMES: tuple[str, ...] = ("submit", "call", "files", "value", "display", "end")
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
        self.value: bytes | None = None  # of its last expression
        self.collection: Collection | None = None  # of the files that it brings home
        self._displays = self._displays_bytes = 0  # that were handed on
        self.streams: dict[str, OutputStream] = {}  # of those that it has written to
        self._output_cap = output_cap

    def start_clock(self) -> None:
        """Has its timeout run from now on."""
        self.started_at = time.monotonic()
        self.due_at = self.started_at + self.timeout

    def set_end(self, grace: float) -> None:
        """Has it killed if it has not ended after `grace` seconds."""
        self.is_ending, self.due_at = True, time.monotonic() + grace

    def set_interrupted_end(self, grace: float, process: ChildProcess) -> None:
        """The same of one that has been interrupted. In a context it is interrupted once more before it is killed.

        Python drops what is raised in a finalizer, and sleeps on where the signal came just before it slept; and the
        state is worth a second try.
        """
        self.set_end(grace)
        self.has_second_interrupt = process.context is not None

    def encode_end(self, code: int | None, number: int | None) -> tuple[dict[str, Any], bytes]:
        """Its end's frame; `code` and `number` are its process's exit status and signal, where that has ended."""
        header: dict[str, Any] = {"op": "end", "id": self.id, "seconds": time.monotonic() - self.started_at}
        if self.submitted is not None:
            header["status"] = "submitted"
            return header, self.submitted
        header["status"] = self.end_cause or self.status or "crashed"
        if header["status"] == "crashed":
            header["exit_code"], header["signal"] = code, number
        return header, self.outcome or b"null"

    def count_display(self, body: bytes) -> None:
        """Raises BadFrameError for more than our child sends."""
        self._displays += 1
        self._displays_bytes += len(body)
        check_displays(self._displays, self._displays_bytes)

    def read_output(self, stream: str, data: bytes) -> str:
        if stream not in self.streams:
            self.streams[stream] = OutputStream(self._output_cap)
        return self.streams[stream].feed(data)


class ChildProcess:
    """A child that is confined and waits for an execution, or has one.

    `waiting` are the executions of its context that come next; `unconfined` is why it could not be confined, if so;
    `is_broken` says that what it wrote to its channel was wrong, `is_collector` that it runs no code, and sends files.
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
        self.is_broken = self.is_collector = False
        self.frame_kinds = CHILD_FRAMES  # that it may send
        self.executions = 0  # that it was handed
        self._backlog = bytearray()
        self._loop = loop

    def list_fds(self) -> list[int]:
        return [self.reads, self.writes, *self.outputs.values()]

    @property
    def has_ended(self) -> bool:
        """Whether the kernel says so; it stays unreaped."""
        return has_ended(self.pid)

    @property
    def backlog_bytes(self) -> int:
        """Those that it has been sent and has not taken yet."""
        return len(self._backlog)

    def begin(self, execution: Execution, body: bytes) -> None:
        """Hands an execution to the child, which is free."""
        self.execution = execution
        self.executions += 1
        execution.start_clock()
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

    def has_ended_with_all(self, execution: Execution) -> bool:
        """Whether nothing that an execution of a context has started goes on, if it was for us to end it.

        Where something does, and forks as fast as we kill, the context ends too, and with it all that it has.
        """
        if not execution.end_cause:
            return True  # what it leaves is of the state
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - execution.started_at)
        if kill_descendants(self.pid, since):
            return True
        kill_session(self.pid)
        return False

    def send(self, header: dict[str, Any], body: bytes) -> None:
        parts = encode_frame_parts(header, body)
        if not self._backlog:  # most of the time: then nothing large is copied
            try:
                parts = write_available(self.writes, parts)
            except OSError:
                return  # it is dead or dying: the kernel will say so
        if parts:
            self._backlog += b"".join(parts)
            self._flush()

    def send_settings(self, settings: dict[str, Any], body: bytes) -> None:
        """Hands the settings, of which `body` is the JSON, to a child that was forked before they were known.

        Where the limit on processes goes beyond those that the user had, the child was among these: it is lowered.
        """
        if settings["confinement"].get("counts_user"):
            settings["confinement"]["limits"]["NPROC"] -= 1
            body = dumps(settings).encode("utf-8")
        self.send({"op": "start"}, body)

    def _flush(self) -> None:
        # One that takes no more is dead or dying: the kernel will say so.
        self._loop.flush(self.writes, self._backlog, self._flush)


def open_pipes() -> tuple[list[int], list[int]]:
    """A child's ends of its pipes (its channel's two, standard output and error), and ours. Raises OSError."""
    pipes: list[tuple[int, int]] = []
    try:
        while len(pipes) < 4:
            pipes.append(os.pipe())
    except OSError:
        close_all([fd for pipe in pipes for fd in pipe])
        raise
    (in_reads, in_writes), *outgoing = pipes
    ours = [in_writes, *(reads for reads, _ in outgoing)]
    for fd in ours:
        os.set_blocking(fd, False)
    return [in_reads, *(writes for _, writes in outgoing)], ours


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def build_child(pid: int, ours: list[int], loop: EventLoop) -> ChildProcess:
    """The child that has that id and the other ends of our pipes."""
    in_writes, out_reads, stdout, stderr = ours
    return ChildProcess(pid, out_reads, in_writes, {"stdout": stdout, "stderr": stderr}, loop)


def fork_child(
    work: Callable[[], None],
    confinement: Confinement,
    loop: EventLoop,
    supervisor_fds: list[int],
    requests: int | None = None,
    start_file: int | None = None,
) -> ChildProcess:
    """Forks a child that does the work, as confined, and exits with status 0 where that came to its end.

    It closes the supervisor's descriptors. With a socket for `requests` it is itself forked when it is asked to. It has
    `start_file` behind the descriptors that have a place. Raises OSError.
    """

    def run(supervisor: int, ends: list[int], ours: list[int]) -> None:
        is_forked_on = requests is not None
        highest = leave_supervisor([*ends, requests] if requests is not None else ends, supervisor_fds + ours)
        kept = FORK_REQUESTS + is_forked_on
        if start_file is not None:
            os.dup2(start_file, kept)
            kept += 1
        confine(confinement, supervisor, is_forked_on=is_forked_on)
        os.closerange(kept, highest + 1)
        work()
        os._exit(0)

    return build_child(*fork_process(run), loop)


def fork_runner(
    runner: CodeRunner,
    settings: dict[str, Any],
    confinement: Confinement,
    loop: EventLoop,
    supervisor_fds: list[int],
    requests: int | None = None,
    start_file: int | None = None,
) -> ChildProcess:
    """Forks a child that runs code, and waits for an execution. Raises OSError.

    With a socket for `requests` it runs the code that executions build on, and is forked for them. With `start_file` it
    starts a Python of its own.
    """
    supervisor = os.getpid()

    def run_code() -> None:
        if start_file is not None:
            start_fresh_python(supervisor, is_forked_on=requests is not None)
        runner.enter_process()
        runner.apply_settings(settings)
        if requests is not None:
            runner.prepare(confinement)
            serve_forks(runner, confinement, supervisor)
        runner.serve(confinement)

    return fork_child(run_code, confinement, loop, supervisor_fds, requests, start_file)


def fork_process(run: Callable[[int, list[int], list[int]], None]) -> tuple[int, list[int]]:
    """The id of a new process, and our ends of the pipes to it. Raises OSError.

    It runs the function, and ends with it: with the caller's id, its own ends, and ours, which it is to close.
    """
    ends, ours = open_pipes()
    supervisor = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        close_all(ends + ours)
        raise
    if pid == 0:
        try:
            run(supervisor, ends, ours)
        except BaseException as error:
            os.write(2, f"the driver failed: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(INHERIT_EXIT)
    close_all(ends)
    return pid, ours


def leave_supervisor(ends: list[int], supervisor_fds: list[int]) -> int:
    """Leaves everything of the supervisor's behind; returns the highest descriptor that is not the child's own."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    close_all(supervisor_fds)  # first, so that there are some left for what follows
    return max(*place_descriptors(ends), *supervisor_fds, *ends)


def confine(confinement: Confinement, supervisor: int, *, is_forked_on: bool = False) -> None:
    """Confines the calling process, a child. Ends it where that cannot be had, which its supervisor is told."""
    try:
        confinement.confine(supervisor, is_forked_on=is_forked_on)
    except OSError as error:
        report_unconfined(error)
