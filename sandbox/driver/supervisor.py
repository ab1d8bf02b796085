"""The supervisor: serves the wire to the host, and follows each execution from its start to the end of its child."""

from __future__ import annotations

import gc
import os
import time

from ..wire.collection import COLLECT_TIMEOUT_SECONDS
from ..wire.frames import BadFrameError
from ..wire.pipes import READ_BYTES, read_available
from ..wire.strict_json import dumps, loads
from ..wire.submission import MAX_SUBMIT_BYTES, check_displays
from .child.environment import enter_environment, needs_new_start
from .child.forking import import_common_modules
from .child.fresh_python import write_start_file
from .child.runner import CODE_NAME, CodeRunner
from .child_process import NEVER, ChildProcess, ChildSource, Execution, build_child
from .collection import COLLECTOR_FRAMES, Collection, encode_collected, encode_collector_end
from .event_loop import EventLoop
from .fork_server import ForkServer
from .host_wire import HostWire
from .orphans import ORPHANS_TIMEOUT_SECONDS, OrphanKiller
from .processes import (
    KILL_GRACE_SECONDS,
    count_memory_kills,
    describe_end,
    has_ended,
    kill_session,
    send_signal,
    signal,
)
from .shared_folders import SharedFolders
from .volume_commits import VolumeCommits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeGuard

MAX_OUTCOME_BYTES = MAX_SUBMIT_BYTES + 256 * 1024  # bytes: a traceback, or the fields and their framing
MAX_REPLIES_BYTES = 64 * 1024 * 1024  # bytes of unread replies; a child with more is killed
SUBMIT_GRACE_SECONDS = 5.0  # time for `finally` blocks after SUBMIT; the result is already recorded
FULL_PIPE_READS = 16  # reads that empty a full pipe
MAX_WAIT_SECONDS = 3600.0  # seconds of one wait; epoll itself allows some 24 days


class Supervisor:
    """The server of one host, over the descriptors `reads` and `writes`."""

    def __init__(
        self, reads: int, writes: int, runner: CodeRunner | None = None, child: tuple[int, list[int]] | None = None
    ) -> None:
        self._loop = EventLoop()
        self._wire = HostWire(reads, writes, os.urandom(12).hex(), self._loop, self._pause_children)
        self._processes: dict[int, ChildProcess] = {}
        self._contexts: dict[str, ChildProcess] = {}  # children that keep their globals, by context
        self._losses: dict[str, str] = {}  # reasons for which the processes of contexts ended
        self._commits = VolumeCommits([], self._wire.send)
        self._fork_server: ForkServer | None = None  # forks each execution, if there is code to prepare
        self._spare: ChildProcess | None = None  # a confined child that waits for the next execution
        self._orphans = OrphanKiller()
        # Ended children with their exit status and signal. Their orphans are killed before the end is reported.
        self._ended: list[tuple[ChildProcess, Execution, int | None, int | None]] = []
        self._folders: SharedFolders  # set by `_op_start`
        self._settings: dict[str, Any] = {}
        self._wake: tuple[int, ...] = ()
        self._beat_seconds = self._silence_seconds = self._expires_at = NEVER
        self._is_warm = runner is not None  # common modules have been imported
        self._source = ChildSource(runner or CodeRunner(), self._loop, self._list_fds)
        if child is not None:
            self._spare = build_child(*child, self._loop)
            self._add_child(self._spare)
        self._is_done = self._is_staying = False
        self._executions = self._memory_kills = 0

    def run(self, first: bytes = b"") -> None:
        """Serve until the host sends stop, closes the wire or falls silent. `first` holds bytes received before."""
        wake_reads, wake_writes = os.pipe()
        for fd in (wake_reads, wake_writes, self._wire.reads, self._wire.writes):
            os.set_blocking(fd, False)
        gc.disable()  # a collection touches every page that children would share
        signal.set_wakeup_fd(wake_writes, warn_on_full_buffer=False)
        # Without a handler, SIGCHLD writes nothing to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, self._op_stop)
        self._wake = (wake_reads, wake_writes)
        self._loop.watch(wake_reads, self._on_signal)
        self._loop.watch(self._wire.reads, lambda: self._take_frames(self._wire.read()))
        self._take_frames(self._wire.parse(first))
        while not self._is_done:
            if self._wire.is_closed and not self._is_staying:
                break
            now = time.monotonic()
            next_at = self._find_next_timer(now)
            seconds = next_at - now if next_at > now else 0.0
            self._loop.run_once(min(seconds, MAX_WAIT_SECONDS))
            now = time.monotonic()
            if now >= next_at:
                self._end_overdue(now)

    def close(self) -> None:
        """Close the descriptors that this object opened, but not the wire. Call it before any child exists."""
        self._loop.close()
        for fd in self._wake:
            os.close(fd)
        self._source.confinement.close()

    # -- time

    def _find_next_timer(self, now: float) -> float:
        """Return when to call `_end_overdue` next, in monotonic seconds."""
        moments = [
            self._expires_at, self._wire.last_sent + self._beat_seconds, self._wire.last_heard + self._silence_seconds,
            self._orphans.next_at,
        ]  # fmt: skip
        moments += [process.execution.due_at for process in self._processes.values() if process.execution is not None]
        moments += [commit.deadline for commit in self._commits.running.values()]
        return min(moments)

    def _end_overdue(self, now: float) -> None:
        """Send the heartbeat, and end executions, commits and the driver itself after their deadlines."""
        if now >= min(self._expires_at, self._wire.last_heard + self._silence_seconds):
            # The end of the lifetime alone counts too: some providers delete only idle sandboxes.
            self._is_done = True
        elif now >= self._wire.last_sent + self._beat_seconds:
            self._wire.send({"op": "beat", "id": 0})
        for process in list(self._processes.values()):
            if process.execution is not None and now >= process.execution.due_at:
                self._end_overdue_execution(process, process.execution)
        self._commits.kill_late(now)
        if now >= self._orphans.next_at:
            self._kill_orphans()

    def _end_overdue_execution(self, process: ChildProcess, execution: Execution) -> None:
        if not execution.is_ending:
            # Read what the child sent in time: its frames wait in the pipe while the host is slow.
            self._on_channel(process)
            if process.execution is execution and not execution.is_ending:
                self._stop(process, execution, "timeout")
        elif execution.interrupts_left:
            execution.interrupts_left -= 1
            is_last = execution.interrupts_left == 0
            execution.set_end(KILL_GRACE_SECONDS if is_last else KILL_GRACE_SECONDS / 2)
            send_signal(process.pid, signal.SIGINT)
        else:
            execution.set_end(KILL_GRACE_SECONDS)
            kill_session(process.pid)

    def _stop(self, process: ChildProcess, execution: Execution, cause: str) -> None:
        """Interrupt an execution. Then it can report its line, and its context is kept. The kill follows later.

        A cancelled execution without a context has no state to keep, so it is killed at once.
        """
        if execution.end_cause and process.context is not None:
            return  # It was interrupted before. A cancellation after the timeout must not delay the kill.
        execution.end_cause = execution.end_cause or cause
        execution.set_interrupted_end(KILL_GRACE_SECONDS, process)
        if cause == "cancelled" and process.context is None:
            kill_session(process.pid)
            return
        send_signal(process.pid, signal.SIGINT)

    # -- from the host

    def _take_frames(self, frames: list[tuple[dict[str, Any], bytes | None]]) -> None:
        for header, body in frames:
            getattr(self, "_op_" + header["op"])(header, body)

    def _op_start(self, _header: dict[str, Any], body: bytes) -> None:
        settings = self._settings = loads(body.decode("utf-8"))
        starts_python = needs_new_start(settings["environment"])
        if starts_python:
            self._end_spare()
        if self._spare is not None:
            self._spare.send_settings(settings, body)  # This comes first, so that the child gets ready in parallel.
        if settings["heartbeat"] is not None:
            self._beat_seconds, self._silence_seconds = settings["heartbeat"], settings["silence"]
        if settings["lifetime"] is not None:
            self._expires_at = time.monotonic() + settings["lifetime"]
        if settings.get("stay_seconds") is not None:
            signal.signal(signal.SIGUSR1, self._stay)
        self._wire.files_folder = settings.get("files")
        self._commits = VolumeCommits(settings["commit"], self._wire.send)
        enter_environment(settings)  # done once here, because children inherit it
        start_file = write_start_file(settings) if starts_python else None
        self._folders = SharedFolders(settings["cwd"], settings["temporary"])
        self._source.apply_settings(settings, start_file)
        self._source.confinement.become_supervisor()
        self._memory_kills = count_memory_kills()
        self._wire.send({"op": "ready", "id": 0, "pid": os.getpid()})
        if not self._is_warm:
            # The first compilation in a process creates a hundred types. Children inherit them and save a millisecond.
            compile("0", CODE_NAME, "exec")

    def _stay(self, _number: object, _frame: object) -> None:
        """Stay open without a host for a time, so that a person can look into the sandbox. No code runs any more."""
        self._is_staying = True
        self._loop.unwatch(self._wire.reads)
        self._beat_seconds = self._silence_seconds = NEVER
        self._expires_at = time.monotonic() + self._settings["stay_seconds"]

    def _op_beat(self, _header: dict[str, Any], _body: bytes | None) -> None:
        pass  # reading the frame has already updated the wire's `last_heard`

    def _op_stop(self, _header: object, _body: object) -> None:
        self._is_done = True

    def _op_prepare(self, header: dict[str, Any], body: bytes) -> None:
        self._is_warm = True  # executions will not be forks of this process, so they inherit no modules from it
        execution = Execution(header["id"], header["timeout"], self._settings["output_cap"])
        self._end_spare()  # The spare process would count against the process limit.
        try:
            server = ForkServer(self._source)
        except OSError as error:
            self._refuse(execution, "setup", f"no process could be made for it: {error.strerror}")
            return
        self._fork_server = server
        self._add_child(server.process)
        self._watch_output(server.process)
        server.process.begin(execution, body)

    def _op_execute(self, header: dict[str, Any], body: bytes) -> None:
        self._executions += 1
        if self._executions == 2 and not self._is_warm:
            # Later children inherit the modules. The import takes as long as the rest of a sandbox's only execution.
            self._is_warm = True
            import_common_modules()
            gc.collect()
            gc.freeze()
        execution = Execution(header["id"], header["timeout"], self._settings["output_cap"])
        context: str | None = header["context"]
        if context in self._losses:
            self._refuse(execution, "lost", self._losses[context])
            return
        if "collect" in header:
            execution.collection = Collection(header["collect"], header["collect_bytes"])
        process = None if context is None else self._contexts.get(context)
        if process is not None and process.execution is not None:
            process.waiting.append((execution, body))  # the last execution was cancelled and is about to end
            return
        if process is None:
            process = self._take_free_process(execution)
        if process is None:
            return
        if context is not None:
            process.context = context
            self._contexts[context] = process
        if process.executions:
            self._drain(process)  # drops output that processes of earlier executions have written
        else:
            self._watch_output(process)
        if self._is_idle:
            self._folders.note_contents()
        process.begin(execution, body)
        if context is None and self._executions > 1 and self._spare is None:
            # Forking takes half the time of a short execution, so fork the next child while this one runs.
            try:
                self._spare = self._fork()
            except OSError:
                pass  # the next execution reports the error if it persists

    def _take_free_process(self, execution: Execution) -> ChildProcess | None:
        """Return a child that has run nothing yet, or refuse the execution and return None."""
        if self._executions > 1:
            damage = self._folders.restore(self._source, is_idle=self._is_idle)
            if damage:
                self._refuse(execution, "unprepared", damage)
                return None
        if self._spare is not None and has_ended(self._spare.pid):
            self._on_signal()  # Its SIGCHLD may not have arrived yet.
        if self._spare is not None:
            process, self._spare = self._spare, None
            return process
        try:
            return self._fork()
        except OSError as error:
            if self._fork_server is not None and self._fork_server.loss:
                self._refuse(execution, "unprepared", self._fork_server.loss)
            else:
                self._refuse(execution, "setup", f"no process could be made for the code: {error.strerror}")
            return None

    def _refuse(self, execution: Execution, status: str, message: str) -> None:
        body = dumps({"message": message}).encode("utf-8")
        self._wire.send({"op": "end", "id": execution.id, "status": status, "seconds": 0.0}, body)

    def _op_reply(self, header: dict[str, Any], body: bytes) -> None:
        for process in self._processes.values():
            execution = process.execution
            if execution is None or execution.id != header["id"]:
                continue
            if len(process.backlog) > MAX_REPLIES_BYTES:
                self._end_child(process, f"it left {len(process.backlog):,} bytes of answers unread", "replies")
            else:
                process.send({"op": "reply", "token": execution.call_token, "call": header["call"]}, body)
            return

    def _op_cancel(self, header: dict[str, Any], _body: bytes | None) -> None:
        for process in self._processes.values():
            if process.execution is not None and process.execution.id == header["id"]:
                self._stop(process, process.execution, "cancelled")
                return
            for waiting in process.waiting:
                execution = waiting[0]
                if execution.id == header["id"]:
                    process.waiting.remove(waiting)
                    self._refuse(execution, "cancelled", "")
                    return

    def _op_forget(self, header: dict[str, Any], _body: bytes | None) -> None:
        self._losses.pop(header["context"], None)
        process = self._contexts.pop(header["context"], None)
        if process is not None:
            if process.execution is not None:
                process.execution.end_cause = process.execution.end_cause or "cancelled"
            kill_session(process.pid)

    # -- children

    def _fork(self) -> ChildProcess:
        """Fork a confined child that waits for an execution, add it and return it. Raises OSError."""
        server = self._fork_server
        process = self._source.fork_runner() if server is None else server.fork(self._processes)
        self._add_child(process)
        return process

    @property
    def _is_idle(self) -> bool:
        """Return whether no child runs an execution or keeps a context."""
        prepared = None if self._fork_server is None else self._fork_server.process
        for process in self._processes.values():
            is_busy = process.execution is not None or process.context is not None
            if is_busy and process is not prepared:
                return False
        return True

    def _end_spare(self) -> None:
        spare = self._spare
        if spare is not None:
            kill_session(spare.pid)
            _, status = os.waitpid(spare.pid, 0)
            del self._processes[spare.pid]
            self._on_child_end(spare, status)

    def _add_child(self, process: ChildProcess) -> None:
        self._processes[process.pid] = process
        if not self._wire.is_paused:
            self._loop.watch(process.reads, lambda: self._on_channel(process))

    def _watch_output(self, process: ChildProcess) -> None:
        """Read a child's output from now on. Earlier output, such as why a new Python cannot start, is read too."""
        for fd in process.outputs.values():
            self._loop.watch(fd, lambda: self._drain(process))

    def _list_fds(self) -> list[int]:
        """Return the descriptors of this process that children must close."""
        fds = [self._wire.reads, self._wire.writes, self._loop.fd, *self._wake]
        if self._fork_server is not None:
            fds.append(self._fork_server.fd)
        for process in self._processes.values():
            fds += process.list_fds()
        return fds + [commit.stderr for commit in self._commits.running.values()]

    def _pause_children(self, is_paused: bool) -> None:
        for process in self._processes.values():
            if is_paused:
                self._loop.unwatch(process.reads)
            else:
                self._loop.watch(process.reads, lambda process=process: self._on_channel(process))

    def _drain(self, process: ChildProcess) -> None:
        """Read the output pipes, and drop output between two executions of a context.

        This reads at most one full pipe, so that endless output does not block other children.
        """
        if not process.outputs_poll.poll(0):
            return
        for stream, fd in process.outputs.items():
            for _ in range(FULL_PIPE_READS):
                data = read_available(fd)
                if data == b"":
                    self._loop.unwatch(fd)
                if not data:
                    break
                if process.execution is not None:
                    text = process.execution.read_output(stream, data)
                    if text:
                        self._send_output(process.execution, stream, text)
                if len(data) < READ_BYTES:
                    break

    def _send_output(self, execution: Execution, stream: str, text: str, dropped: int = 0) -> None:
        """Send the code's output to the host; `dropped` is the number of characters cut before `text`."""
        for begin in range(0, len(text), READ_BYTES):  # the host's limit for one frame
            header = {"op": "output", "id": execution.id, "stream": stream, "dropped": 0 if begin else dropped}
            self._wire.send(header, dumps(text[begin : begin + READ_BYTES]).encode("utf-8", "replace"))

    def _on_channel(self, process: ChildProcess) -> None:
        data = read_available(process.reads)
        if data == b"":
            self._loop.unwatch(process.reads)  # SIGCHLD reports the child's end.
        elif data:
            self._read_channel(process, data)

    def _read_channel(self, process: ChildProcess, data: bytes) -> None:
        if process.is_broken:
            return
        # First send the output that the child wrote before this frame. The frame may end the execution.
        self._drain(process)
        try:
            for header, body in process.frames.feed(data):
                self._take_child_frame(process, header, body)
        except BadFrameError as error:
            process.is_broken = True
            self._end_child(process, str(error), "channel")

    def _end_child(self, process: ChildProcess, message: str, cause: str) -> None:
        """Kill a child whose code misused its channel, and report the message to the host."""
        execution = process.execution
        if execution is not None and not execution.end_cause:
            execution.end_cause, execution.outcome = cause, dumps({"message": message}).encode("utf-8", "replace")
        kill_session(process.pid)

    def _take_child_frame(self, process: ChildProcess, header: dict[str, Any], body: bytes | None) -> None:
        """Handle a frame from a child. The code may have written it. Raises BadFrameError."""
        op, execution = header.get("op"), process.execution
        if body is None or b"\n" in body or op not in process.frame_kinds:
            raise BadFrameError(f"a frame of kind {op!r} that is none of a child's")
        max_bytes = MAX_SUBMIT_BYTES if op == "submit" else MAX_OUTCOME_BYTES
        if op not in ("call", "display") and len(body) > max_bytes:
            raise BadFrameError(f"an outcome of {len(body):,} bytes")
        if op == "end" and header.get("status") == "setup" and process.executions <= 1:
            # Code may have forged this frame, so the status becomes "unconfined". The host retries only "setup".
            process.unconfined = body
            if execution is not None and not execution.status:
                execution.status, execution.outcome = "unconfined", body
            return
        if execution is None:
            return  # a frame from a thread of an earlier execution
        tokens = (execution.token, execution.call_token) if op == "call" else (execution.token,)
        if header.get("token") not in tokens:
            return  # a frame from a thread of an earlier execution, too
        if op == "call":
            number, name = header.get("call"), header.get("name")
            if type(number) is not int or type(name) is not str:
                raise BadFrameError("a call without a number or a name")
            self._wire.send({"op": "call", "id": execution.id, "call": number, "name": name}, body)
        elif op == "submit":
            if execution.submitted is None and not execution.end_cause:
                execution.submitted = body
                execution.set_interrupted_end(SUBMIT_GRACE_SECONDS, process)
                if header.get("interrupt"):
                    send_signal(process.pid, signal.SIGINT)
        elif op == "files":
            execution.files = body
        elif op == "value":
            execution.value = body
        elif op == "display":
            execution.displays += 1
            execution.displays_bytes += len(body)
            check_displays(execution.displays, execution.displays_bytes)
            self._wire.send({"op": op, "id": execution.id}, body)
        elif op == "collect":
            self._wire.send({"op": op, "id": execution.id}, body)
        else:
            self._take_end_frame(process, execution, header, body)

    def _take_end_frame(self, process: ChildProcess, execution: Execution, header: dict[str, Any], body: bytes) -> None:
        """Note how the execution ended. Finish it now if its process continues, or else when the process has ended."""
        status = header.get("status")
        if status not in ("finished", "error"):
            raise BadFrameError(f"an end with the status {status!r}")
        if not execution.status:
            execution.status, execution.outcome = str(status), body
            microseconds, peak_kib = header.get("cpu_microseconds"), header.get("peak_kib")
            # The kernel counts for a process that ends. A context continues, so its process counts for itself.
            if process.context is not None and _is_count(microseconds) and _is_count(peak_kib):
                execution.usage = process.subtract_cpu(microseconds), peak_kib
        server = self._fork_server
        if server is not None and process is server.process:
            if execution.end_cause:
                kill_session(process.pid)
            elif execution.status == "finished":  # After an error in its code, the process ends.
                server.is_ready = True
                self._finish(process, execution)
        elif process.context is not None and process.has_ended_with_all(execution):
            self._finish(process, execution)

    # -- ends

    def _on_signal(self) -> None:
        while read_available(self._wake[0]):
            pass
        for pid in [*self._processes, *self._commits.running]:  # The orphan killer reaps the others.
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if not ended:
                continue
            process = self._processes.pop(pid, None)
            if process is not None:
                if process.execution is not None:
                    microseconds = int((usage.ru_utime + usage.ru_stime) * 1e6)
                    process.execution.usage = process.subtract_cpu(microseconds), usage.ru_maxrss
                self._on_child_end(process, status)
            else:
                self._commits.on_end(pid, status)
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what executions left running. Once all is dead or the time is up, report these executions' ends."""
        kept = () if self._fork_server is None else self._fork_server.list_kept()
        are_dead = self._orphans.kill(self._processes, self._commits.running, kept)
        if not are_dead and not self._orphans.is_late:
            return
        survivors = self._orphans.describe()
        ended, self._ended = self._ended, []
        for process, execution, exit_code, signal_number in ended:
            if survivors:
                text = f"rlm-batch: after {ORPHANS_TIMEOUT_SECONDS:g} s these processes had not ended: {survivors}\n"
                self._send_output(execution, "stderr", text)
            self._finish(process, execution, exit_code, signal_number)

    def _on_child_end(self, process: ChildProcess, status: int) -> None:
        while data := read_available(process.reads):
            self._read_channel(process, data)
        self._drain(process)
        if process is self._spare:
            self._spare = None
        exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if self._fork_server is not None and process is self._fork_server.process:
            self._fork_server.loss = f"the process that prepare had run in {describe_end(exit_code, signal_number)}"
        loss = "its context was forgotten"
        if process.context is not None and self._contexts.get(process.context) is process:
            loss = f"the process that held the state {describe_end(exit_code, signal_number)}"
            self._losses[process.context] = loss
            del self._contexts[process.context]
        if process.execution is not None:
            self._ended.append((process, process.execution, exit_code, signal_number))
        for waiting, _body in process.waiting:
            self._refuse(waiting, "lost", loss)
        for fd in process.list_fds():
            self._loop.unwatch(fd)
            os.close(fd)

    def _finish(
        self,
        process: ChildProcess,
        execution: Execution,
        exit_code: int | None = None,
        signal_number: int | None = None,
    ) -> None:
        """Send an execution's end to the host. The exit code or the signal is set if the child has ended."""
        process.execution = None
        if process.is_collector:
            self._wire.send(*encode_collector_end(process, execution, exit_code, signal_number))
            return
        self._send_rest(execution)
        header, body = execution.encode_end(exit_code, signal_number)
        if header["status"] == "crashed" and signal_number == signal.SIGKILL:
            earlier_kills, self._memory_kills = self._memory_kills, count_memory_kills()
            header["out_of_memory"] = self._memory_kills > earlier_kills
        has_ended = exit_code is not None or signal_number is not None
        if process.context is not None and has_ended:
            header["state_lost"] = True
        if process.context is None or has_ended:
            damage = self._folders.restore(self._source, is_idle=self._is_idle)
            if damage:
                header["loss"] = damage
        if execution.collection is not None and execution.end_cause != "cancelled":
            header["collects"] = True
            self._collect(execution.id, execution.collection)
        self._commits.send_when_committed(header, body)
        if process.waiting and not has_ended:
            self._drain(process)
            process.begin(*process.waiting.pop(0))

    def _send_rest(self, execution: Execution) -> None:
        """Send what the execution has kept for its end: the last half of its output, its files and its value."""
        for name, stream in execution.streams.items():
            text, tail = stream.finish()
            if text:
                self._send_output(execution, name, text)
            if tail:
                self._send_output(execution, name, tail, stream.dropped)
        if execution.files is not None:
            self._wire.send({"op": "files", "id": execution.id}, execution.files)
        if execution.value is not None:
            self._wire.send({"op": "value", "id": execution.id}, execution.value)

    def _collect(self, number: int, collection: Collection) -> None:
        sending = Execution(number, COLLECT_TIMEOUT_SECONDS, self._settings["output_cap"])
        try:
            process = self._source.fork(lambda: collection.send(sending.token))
        except OSError as error:
            self._wire.send(*encode_collected(number, f"no process could be made that reads them: {error.strerror}"))
            return
        process.is_collector, process.frame_kinds, process.execution = True, COLLECTOR_FRAMES, sending
        sending.start_clock()
        self._add_child(process)
        self._watch_output(process)


def _is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value from the code's process is a 63-bit number; longer ones could not be sent on."""
    return type(value) is int and 0 <= value < 1 << 63
