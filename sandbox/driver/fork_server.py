"""The process that ran `prepare`, as the supervisor sees it: each execution is a fork of that process."""

from __future__ import annotations

import errno
import os
import select
import time

from .child.forking import MAX_MESSAGE_BYTES, encode_descriptors
from .child_process import build_child, close_all, open_pipes
from .processes import describe_end, has_ended, kill_session, list_children, list_descendants, read_exit, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

    from .child_process import ChildProcess, ChildSource

FORK_TIMEOUT_SECONDS = 10.0  # A fork takes a millisecond, or longer with gigabytes to map.
LOOK_SECONDS = 0.1  # pause between two checks that the process still lives
END_SECONDS = 1.0  # wait for a killed process; other executions wait meanwhile


class ForkServer:
    """A source of children that are forks of one `process`. It `is_ready` after `prepare`; `loss` says why it ended.

    The supervisor waits for each fork, because without the fork's id it cannot tell the fork from an orphan.
    """

    def __init__(self, source: ChildSource) -> None:
        """Fork the process, which then waits for its code. Raises OSError."""
        import _socket

        self._source = source
        # The process closes our end with the other descriptors below its own end's.
        self._requests, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self.fd: int = self._requests.fileno()
        try:
            self.process = source.fork_runner(theirs.fileno())
        except OSError:
            self._requests.close()
            raise
        finally:
            theirs.close()
        self.is_ready = False
        self.loss = ""
        self._kept: set[int] = set()  # adopted processes that `prepare` left running, and their descendants
        self._may_have_children = True

    def list_kept(self) -> set[int]:
        """Return the living processes that `prepare` left running and that the supervisor adopted during a fork.

        After the prepared process has ended, the supervisor kills them. Descendants that the last scan saw stay too.
        """
        if self.loss or not self._kept:
            return set()
        living = {pid for pid in list_children() if pid in self._kept and not has_ended(pid)}
        self._kept = {*living, *list_descendants(*living)} if living else set()
        return living

    def fork(self, known: Container[int]) -> ChildProcess:
        """Fork the process; return the fork, which waits for an execution and is not in `known`. Raises OSError."""
        if self.loss or not self.is_ready:
            raise OSError(errno.ESRCH, self.loss or "prepare has not ended yet")
        # Scan all processes only if the prepared process may have children, which is rare.
        below = list_descendants(self.process.pid) if self._may_have_children else {}
        ends, ours = open_pipes()
        try:
            pid, status = self._request_fork(ends + self._source.confinement.rulesets)
            if below:
                self._kept.update(child for child in list_children() if child in below)
            if status < 0:
                raise OSError(errno.ECHILD, f"its forking process {describe_end(None, -status)}")
            if status:
                raise OSError(status, os.strerror(status))
            if pid in known or pid in self._kept or not _is_child(pid):
                raise self._give_up()
        except BaseException:
            close_all(ours)
            raise
        finally:
            close_all(ends)
        return build_child(pid, ours, self._source.loop)

    def _request_fork(self, fds: list[int]) -> tuple[int, int]:
        """Request a child with these descriptors. Return its id and a status: 0, an error number, or minus a signal."""
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
            pass  # the process has ended, or its code wrote to the socket
        raise self._give_up()

    def _give_up(self) -> OSError:
        kill_session(self.process.pid)
        until = time.monotonic() + END_SECONDS
        while (end := read_exit(self.process.pid)) is None and time.monotonic() < until:
            time.sleep(0.001)
        # The process may have ended by itself before the kill.
        why = "makes no more forks" if end is None or end[1] == signal.SIGKILL else describe_end(*end)
        self.loss = self.loss or f"the process that prepare had run in {why}"
        return OSError(errno.ESRCH, self.loss)


def _is_child(pid: int) -> bool:
    try:
        has_ended(pid)
    except (OSError, OverflowError):  # not a child of this process, or no such process
        return False
    return True
