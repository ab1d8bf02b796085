"""A child process as the supervisor sees it: how to fork it, the pipes to it, and the execution that it runs."""

from __future__ import annotations

import os
import select
import time
from codecs import getincrementaldecoder

from ..wire.frames import MAX_CALL_BYTES, FrameReader, encode_frame_parts
from ..wire.pipes import READ_BYTES, widen_pipe, write_available
from ..wire.strict_json import dumps
from .child.channel import FORK_REQUESTS, place_descriptors, report_unconfined
from .child.forking import serve_code
from .child.fresh_python import start_fresh_python
from .confinement import Confinement
from .orphans import kill_descendants
from .processes import kill_session, signal, wait_for_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .child.runner import CodeRunner
    from .collection import Collection
    from .event_loop import EventLoop

CHANNEL_PIPE_BYTES = 1024 * 1024  # bytes of a pipe to a child: the largest pipe that an ordinary user may request
CHILD_FRAMES: tuple[str, ...] = ("submit", "call", "files", "value", "display", "end")
NEVER = float("inf")  # monotonic seconds
CPU_GRACE_SECONDS = 10.0  # seconds beyond its timeout in which an execution is interrupted and killed
MAX_CPU_SECONDS = 1e9  # seconds; longer timeouts get no CPU limit
INHERIT_EXIT = 70  # EX_SOFTWARE: a child that could not even report why it failed


class OutputStream:
    """One of an execution's output streams, cut to `cap` characters: the beginning and the end of the output are kept.

    The beginning, half of the cap, is sent at once. The end is kept here until the execution ends.
    """

    def __init__(self, cap: int) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._head_room = cap // 2  # characters that may still be sent at once
        self._tail_cap = cap - cap // 2
        self._tail = ""
        self.dropped = 0  # characters

    def feed(self, data: bytes, final: bool = False) -> str:
        """Add output and return the text to send now."""
        text = self._decoder.decode(data, final)
        head = text[: self._head_room]
        self._head_room -= len(head)
        self._tail += text[len(head) :]
        if len(self._tail) > 2 * self._tail_cap:
            self._trim()
        return head

    def finish(self) -> tuple[str, str]:
        """Return the text of an incomplete last character that belongs to the beginning, and the end of the output."""
        head = self.feed(b"", final=True)
        self._trim()
        return head, self._tail

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_cap
        if excess > 0:
            self.dropped += excess
            self._tail = self._tail[excess:]


class Execution:
    """One execution; `timeout` is in seconds, and `output_cap` is a number of characters of each stream."""

    def __init__(self, number: int, timeout: float | None, output_cap: int) -> None:
        self.id = number
        # New random tokens for each execution, so that code in a context cannot guess the tokens of a later execution.
        tokens = os.urandom(32).hex()
        self.token = tokens[:32]  # authenticates the frames that end this execution
        self.call_token = tokens[32:]  # authenticates calls, also those from threads of earlier executions
        self.timeout = NEVER if timeout is None else timeout
        self.started_at = 0.0  # monotonic seconds, as in `due_at`
        self.due_at = NEVER  # end of the timeout; once `is_ending`, time of the kill
        self.is_ending = False
        self.interrupts_left = 0  # further interrupts that the child gets before the kill
        self.end_cause = ""  # why the supervisor ended it: timeout, cancelled, channel, replies
        self.submitted: bytes | None = None
        self.status = ""  # the status that the child reported
        self.outcome: bytes | None = None
        self.files: bytes | None = None  # JSON: files that the code wrote on the volume
        self.value: bytes | None = None  # JSON: value of the last expression
        self.collection: Collection | None = None  # the files to send to the host
        self.displays = self.displays_bytes = 0  # displays sent to the host
        self.usage: tuple[int, int] | None = None  # CPU microseconds, and KiB of the process with the most memory
        self.streams: dict[str, OutputStream] = {}  # only streams that have output
        self._output_cap = output_cap

    def start_clock(self) -> None:
        self.started_at = time.monotonic()
        self.due_at = self.started_at + self.timeout

    def set_end(self, grace: float) -> None:
        """Mark the execution as ending, and schedule the next interrupt or the kill in `grace` seconds."""
        self.is_ending, self.due_at = True, time.monotonic() + grace

    def set_interrupted_end(self, grace: float, process: ChildProcess) -> None:
        """Schedule the kill of an execution that was just interrupted. In a context two more interrupts come first.

        The kill would lose the context's state, and an interrupt may have no effect: code that awaits can catch it, and
        Python drops it in a finalizer or just before a sleep.
        """
        self.set_end(grace)
        self.interrupts_left = 0 if process.context is None else 2

    def encode_end(self, exit_code: int | None, signal_number: int | None) -> tuple[dict[str, Any], bytes]:
        """Return the header and the body of the end frame. One of the arguments is set if the process has ended."""
        header: dict[str, Any] = {"op": "end", "id": self.id, "seconds": time.monotonic() - self.started_at}
        if self.usage is not None:
            header["cpu_microseconds"], header["peak_kib"] = self.usage
        if self.submitted is not None:
            header["status"] = "submitted"
            return header, self.submitted
        header["status"] = self.end_cause or self.status or "crashed"
        if header["status"] == "crashed":
            header["exit_code"], header["signal"] = exit_code, signal_number
        return header, self.outcome or b"null"

    def read_output(self, stream: str, data: bytes) -> str:
        """Add output of a stream, "stdout" or "stderr", and return the text to send now."""
        if stream not in self.streams:
            self.streams[stream] = OutputStream(self._output_cap)
        return self.streams[stream].feed(data)


class ChildProcess:
    """A confined child that waits for an execution or runs one.

    `waiting` holds the next executions of its context, with their bodies. `unconfined` is the error, as JSON, if the
    child could not be confined. `is_broken` is True after an invalid frame from the child. `is_collector` is True for a
    child that runs no code and sends files.
    """

    def __init__(self, pid: int, reads: int, writes: int, outputs: dict[str, int], loop: EventLoop) -> None:
        self.pid = pid
        self.context: str | None = None
        self.execution: Execution | None = None
        self.waiting: list[tuple[Execution, bytes]] = []
        self.reads, self.writes = reads, writes  # the supervisor's ends of the channel
        self.outputs = outputs
        self.outputs_poll = select.poll()  # asks both pipes at once, in half the time of two empty reads
        for fd in outputs.values():
            self.outputs_poll.register(fd, select.POLLIN)
        self.unconfined: bytes | None = None
        self._cpu_microseconds = 0  # CPU time of earlier executions of its context
        self.frames = FrameReader(MAX_CALL_BYTES)
        self.is_broken = self.is_collector = False
        self.frame_kinds = CHILD_FRAMES  # frames that the child may send
        self.executions = 0  # number of executions started in the child
        self.backlog = bytearray()  # frames that the child's pipe has no room for
        self._loop = loop

    def subtract_cpu(self, total: int) -> int:
        """Return the CPU microseconds since the last call. `total` has those of the whole process."""
        used = total - self._cpu_microseconds
        self._cpu_microseconds = total
        return max(0, used)  # the code's process may report a wrong total

    def list_fds(self) -> list[int]:
        return [self.reads, self.writes, *self.outputs.values()]

    def begin(self, execution: Execution, body: bytes) -> None:
        """Send an execution to a free child."""
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
            # The CPU time of all processors within the timeout. This limit ends a process that escapes the kill.
            header["cpu_seconds"] = int((execution.timeout + CPU_GRACE_SECONDS) * (os.cpu_count() or 1)) + 1
        self.send(header, body)

    def has_ended_with_all(self, execution: Execution) -> bool:
        """Kill the processes that an interrupted execution in a context started, and return whether all were killed.

        If they fork as fast as they are killed, kill the child too: the context ends.
        """
        if not execution.end_cause:
            return True  # The execution ended by itself, so its processes belong to the context's state.
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - execution.started_at)
        if kill_descendants(self.pid, since):
            return True
        kill_session(self.pid)
        return False

    def send(self, header: dict[str, Any], body: bytes) -> None:
        """Send a frame to the child now as far as the pipe has room, and the rest when it has."""
        parts = encode_frame_parts(header, body)
        if not self.backlog:  # the usual case; avoids copying a large body
            try:
                parts = write_available(self.writes, parts)
            except OSError:
                return  # a dead or dying child: SIGCHLD follows
        if parts:
            self.backlog += b"".join(parts)
            self._flush()

    def send_settings(self, settings: dict[str, Any], body: bytes) -> None:
        """Send the settings (`body` is their JSON) to a child that was forked before they were known."""
        # A process limit that counts the user's other processes was computed with this child among them.
        if settings["confinement"].get("counts_user"):
            settings["confinement"]["limits"]["NPROC"] -= 1
            body = dumps(settings).encode("utf-8")
        self.send({"op": "start"}, body)

    def _flush(self) -> None:
        # A failed write means a dead or dying child: SIGCHLD follows.
        self._loop.flush(self.writes, self.backlog, self._flush)


def open_pipes() -> tuple[list[int], list[int]]:
    """Open a child's pipes; return the child's ends (channel in and out, stdout, stderr) and ours. Raises OSError."""
    ends: list[int] = []
    ours: list[int] = []
    try:
        for name in ("channel in", "channel out", "stdout", "stderr"):
            reads, writes = os.pipe()
            is_to_child = name == "channel in"
            ends.append(reads if is_to_child else writes)
            ours.append(writes if is_to_child else reads)
    except OSError:
        close_all(ends + ours)
        raise
    for fd in ours:
        os.set_blocking(fd, False)
    return ends, ours


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def build_child(pid: int, ours: list[int], loop: EventLoop) -> ChildProcess:
    in_writes, out_reads, stdout, stderr = ours
    return ChildProcess(pid, out_reads, in_writes, {"stdout": stdout, "stderr": stderr}, loop)


class ChildSource:
    """The source of a supervisor's confined children. They close the descriptors that `list_fds` lists."""

    def __init__(self, runner: CodeRunner, loop: EventLoop, list_fds: Callable[[], list[int]]) -> None:
        self.confinement = Confinement({})
        self.loop = loop
        self._runner = runner
        self._list_fds = list_fds
        self._settings: dict[str, Any] = {}
        self._start_file: int | None = None

    def apply_settings(self, settings: dict[str, Any], start_file: int | None) -> None:
        """Confine later children by the settings. Raises OSError.

        With `start_file`, the descriptor of a file of `write_start_file`, their code runs in a newly started Python.
        """
        self.confinement = Confinement(settings["confinement"])
        self._settings, self._start_file = settings, start_file

    def fork_runner(self, requests: int | None = None) -> ChildProcess:
        """Fork a child that waits for an execution and runs its code. Raises OSError.

        With `requests`, a socket, the child runs the code of `prepare` and is then forked for each execution.
        """
        runner, supervisor = self._runner, os.getpid()
        has_forks = requests is not None

        def run_code() -> None:
            if self._start_file is not None:
                start_fresh_python(supervisor, has_forks=has_forks)
            runner.enter_process()
            runner.apply_settings(self._settings)
            serve_code(runner, self.confinement, supervisor, has_forks=has_forks)

        return self.fork(run_code, requests, self._start_file)

    def fork(
        self, work: Callable[[], None], requests: int | None = None, start_file: int | None = None
    ) -> ChildProcess:
        """Fork a child that runs `work` and then exits with status 0. Raises OSError.

        The child keeps its pipes, the socket `requests` and the file `start_file`, at fixed descriptors in this order.
        """
        supervisor_fds = self._list_fds()

        def run(supervisor: int, ends: list[int], ours: list[int]) -> None:
            own_fds, first_to_close = ends, FORK_REQUESTS
            if requests is not None:
                own_fds, first_to_close = [*ends, requests], FORK_REQUESTS + 1
            highest = leave_supervisor(own_fds, supervisor_fds + ours)
            if start_file is not None:
                os.dup2(start_file, first_to_close)
                first_to_close += 1
            confine(self.confinement, supervisor, has_forks=requests is not None)
            os.closerange(first_to_close, highest + 1)
            work()
            os._exit(0)

        self.confinement.build()
        return build_child(*fork_process(run), self.loop)

    def run(self, work: Callable[[], None], seconds: float) -> None:
        """Run `work` in a child, and kill the child after `seconds`. Raises OSError."""
        child = self.fork(work)
        wait_for_end(child.pid, seconds)
        kill_session(child.pid)
        os.waitpid(child.pid, 0)
        close_all(child.list_fds())


def fork_process(run: Callable[[int, list[int], list[int]], None]) -> tuple[int, list[int]]:
    """Fork a process that calls `run` and exits; return its id and our ends of its pipes. Raises OSError.

    `run` gets the caller's process id, the child's ends of the pipes, and our ends, which it must close.
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
    """Detach the calling child from the supervisor, and move `ends`, the child's own descriptors, to fixed numbers.

    Return the highest open descriptor. The caller must close all from the fixed numbers up to it.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    close_all(supervisor_fds)  # This comes first, because the limit on descriptors may be reached.
    return max(*place_descriptors(ends), *supervisor_fds, *ends)


def confine(confinement: Confinement, supervisor: int, *, has_forks: bool = False) -> None:
    """Confine the calling child. On failure report the error to the supervisor and exit."""
    try:
        confinement.confine(supervisor, has_forks=has_forks)
    except OSError as error:
        report_unconfined(error)
