"""The process that has run the code which executions build on, seen from the supervisor: each execution is its fork."""

from __future__ import annotations

import errno
import os
import select
import time

from .child.forking.fork_service import MAX_MESSAGE_BYTES, encode_descriptors
from .child_process import build_child, close_all, fork_runner, open_pipes
from .processes import describe_end, has_ended, kill_session, list_children, list_descendants, read_end, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

    from .child.runner import CodeRunner
    from .child_process import ChildProcess
    from .confinement import Confinement
    from .event_loop import EventLoop

FORK_TIMEOUT_SECONDS = 10.0  # for a fork that takes a millisecond, unless there are gigabytes to be mapped
LOOK_SECONDS = 0.1  # between two looks at whether the process still lives
END_SECONDS = 1.0  # for one that was killed; others wait meanwhile


class ForkServer:
    """Makes children that are forks of one `process`, once that `is_ready`. `loss` says why it makes no more, if so.

    The supervisor waits for each fork: until it knows its id, it could not tell it from what code has left running.
    """

    def __init__(
        self,
        runner: CodeRunner,
        settings: dict[str, Any],
        confinement: Confinement,
        loop: EventLoop,
        supervisor_fds: list[int],
        start_file: int | None = None,
    ) -> None:
        """Forks the process, which waits for its code. Raises OSError."""
        import _socket

        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            fds = [*supervisor_fds, ours.fileno()]
            self.process = fork_runner(runner, settings, confinement, loop, fds, theirs.fileno(), start_file)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.is_ready = False
        self.loss = ""
        self._kept: set[int] = set()  # what was left running and is the supervisor's, and all below that
        self._may_have_children = True
        self._requests = ours
        self._confinement = confinement
        self._loop = loop

    @property
    def fd(self) -> int:
        return int(self._requests.fileno())

    def list_kept(self) -> set[int]:
        """What the code had left running, and a child of the supervisor since it lost its parent during a fork.

        It ends with the process; those that have ended are the supervisor's to reap. What they have below them stays
        as they do, as far as the last look has seen it.
        """
        if self.loss or not self._kept:
            return set()
        living = {pid for pid in list_children() if pid in self._kept and not has_ended(pid)}
        self._kept = {*living, *list_descendants(*living)} if living else set()
        return living

    def fork(self, known: Container[int]) -> ChildProcess:
        """A child that has what the process had, and waits for an execution; none that is `known`. Raises OSError."""
        if self.loss or not self.is_ready:
            raise OSError(errno.ESRCH, self.loss or "prepare has not ended yet")
        # For a list of all processes, which most have no need of.
        below = list_descendants(self.process.pid) if self._may_have_children else {}
        ends, ours = open_pipes()
        try:
            pid, status = self._request_fork(ends + self._confinement.rulesets)
            if below:
                self._kept.update(child for child in list_children() if child in below)
            if status < 0:
                raise OSError(errno.ECHILD, f"what forks it was killed by signal {-status}")
            if status:
                raise OSError(status, os.strerror(status))
            if pid in known or pid in self._kept or not _is_child(pid):
                raise self._give_up()
        except BaseException:
            close_all(ours)
            raise
        finally:
            close_all(ends)
        return build_child(pid, ours, self._loop)

    def _request_fork(self, fds: list[int]) -> tuple[int, int]:
        """The id of a child that has these descriptors, or the number of the error for which there is none."""
        poll, until = select.poll(), time.monotonic() + FORK_TIMEOUT_SECONDS
        poll.register(self.fd, select.POLLIN)
        pid = failure = 0
        try:
            self._requests.sendmsg([b"%d" % len(fds)], encode_descriptors(fds))
            while time.monotonic() < until and not has_ended(self.process.pid):
                if poll.poll(LOOK_SECONDS * 1000):
                    word, number, *more = self._requests.recv(MAX_MESSAGE_BYTES).split()
                    if word == b"end":
                        self._may_have_children = bool(int(more[0]))
                        return pid, failure or int(number)
                    if word == b"error":
                        failure = int(number)
                    else:
                        pid = int(number)
        except (OSError, ValueError, IndexError):
            pass  # the process has gone, or what it had run has written there
        raise self._give_up()

    def _give_up(self) -> OSError:
        kill_session(self.process.pid)
        until = time.monotonic() + END_SECONDS
        while (end := read_end(self.process.pid)) is None and time.monotonic() < until:
            time.sleep(0.001)
        # It may have been about to end by itself.
        why = "makes no more forks" if end is None or end[1] == signal.SIGKILL else describe_end(*end)
        self.loss = self.loss or f"the process that prepare had run in {why}"
        return OSError(errno.ESRCH, self.loss)


def _is_child(pid: int) -> bool:
    try:
        has_ended(pid)
    except (OSError, OverflowError):  # another's, or none at all
        return False
    return True
