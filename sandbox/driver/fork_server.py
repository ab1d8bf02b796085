"""The process that ran `prepare`, as the supervisor sees it: each execution is a fork of that process."""

from __future__ import annotations

import errno
import os
import select
import time

from .child.forking import MAX_MESSAGE_BYTES, encode_descriptors
from .child_process import build_child, close_all, open_pipes
from .processes import (
    describe_end,
    has_ended,
    kill_session,
    list_children,
    list_descendants,
    read_exit,
    signal,
    wait_for_end,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

    from .child_process import ChildProcess, ChildSource

FORK_TIMEOUT_SECONDS = 10.0  # A fork takes a millisecond, or longer with gigabytes to map.
LOOK_SECONDS = 0.1  # pause between two checks that the process still lives
END_SECONDS = 1.0  # wait for a killed process; other executions wait meanwhile


class ForkServer:
    """The process that ran `prepare`, and the requests for its forks.

    `is_ready` is True after `prepare`. `loss` says why the process has ended, and is empty until then.
    """

    def __init__(self, source: ChildSource) -> None:
        """Fork the process, which then waits for its code. Raises OSError."""
        import _socket

        self._source = source
        # Our end has the lower number, so the process closes it: it closes all descriptors up to its own end.
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
        """Return the living processes that `prepare` left running and that the supervisor has adopted.

        There are none after the prepared process has ended: the supervisor then kills them.
        """
        if self.loss or not self._kept:
            return set()
        living = {pid for pid in list_children() if pid in self._kept and not has_ended(pid)}
        # The supervisor may adopt their descendants later, and must keep these too.
        self._kept = {*living, *list_descendants(*living)} if living else set()
        return living

    def fork(self, known: Container[int]) -> ChildProcess:
        """Fork the process and return the fork, which waits for an execution. Raises OSError.

        The supervisor waits for the fork's id, which tells the fork from an orphan. `known` has the ids of the
        supervisor's other children: an answer that names one of them was forged by the code of `prepare`.
        """
        if self.loss or not self.is_ready:
            raise OSError(errno.ESRCH, self.loss or "prepare has not ended yet")
        # Scanning all processes takes long, and `prepare` rarely leaves some running.
        descendants = list_descendants(self.process.pid) if self._may_have_children else {}
        ends, ours = open_pipes()
        try:
            pid, status = self._request_fork(ends + self._source.confinement.rulesets)
            if descendants:
                self._kept.update(child for child in list_children() if child in descendants)
            if status < 0:
                raise OSError(errno.ECHILD, f"its forking process {describe_end(None, -status)}")
            if status > 0:
                raise OSError(status, os.strerror(status))
            is_other_child = pid in known or pid in self._kept
            if is_other_child or not _is_child(pid):
                raise self._give_up()  # The code of `prepare` wrote this answer.
        except BaseException:
            close_all(ours)
            raise
        finally:
            close_all(ends)
        return build_child(pid, ours, self._source.loop)

    def _request_fork(self, fds: list[int]) -> tuple[int, int]:
        """Request a fork with these descriptors. Return its id, and 0, an error number or minus the number of a signal.

        The answers are "pid ID" or "error NUMBER", and then "end STATUS HAS_CHILDREN".
        """
        poll, until = select.poll(), time.monotonic() + FORK_TIMEOUT_SECONDS
        poll.register(self.fd, select.POLLIN)
        pid = error_number = 0
        try:
            self._requests.sendmsg([b"%d" % len(fds)], encode_descriptors(fds))
            while time.monotonic() < until and not has_ended(self.process.pid):
                if not poll.poll(LOOK_SECONDS * 1000):
                    continue
                word, *numbers = self._requests.recv(MAX_MESSAGE_BYTES).split()
                if word == b"end":
                    status, has_children = numbers
                    self._may_have_children = has_children == b"1"
                    return pid, error_number or int(status)
                if word == b"error":
                    error_number = int(numbers[0])
                else:
                    pid = int(numbers[0])
        except (OSError, ValueError, IndexError):
            pass  # the process has ended, or its code wrote to the socket
        raise self._give_up()

    def _give_up(self) -> OSError:
        """Kill the process, record why in `loss`, and return the error for the caller to raise."""
        kill_session(self.process.pid)
        wait_for_end(self.process.pid, END_SECONDS)
        exit_code, signal_number = read_exit(self.process.pid) or (None, signal.SIGKILL)
        # The process may have ended by itself before the kill.
        end = "makes no more forks" if signal_number == signal.SIGKILL else describe_end(exit_code, signal_number)
        self.loss = self.loss or f"the process that prepare had run in {end}"
        return OSError(errno.ESRCH, self.loss)


def _is_child(pid: int) -> bool:
    try:
        has_ended(pid)
    except (OSError, OverflowError):  # `waitid` takes only the ids of children.
        return False
    return True
