"""The forks of a process that executions build on: made when the supervisor asks, each to be a child of its own.

Who asks sends the descriptors that the fork shall have, and is told its id. The fork's parent is a process that ends at
once: so it becomes the supervisor's child, and the supervisor is told by the kernel how it ends. What else loses its
parent in that moment becomes the supervisor's too, which is why it is told whether there is anything.
"""

from __future__ import annotations

import errno
import os
import sys

from ..channel import CHANNEL_IN, CHANNEL_OUT, FORK_REQUESTS, place_descriptors, report_unconfined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...confinement import Confinement
    from ..runner import CodeRunner

FD_BYTES = 4
PIPES = 4  # of a child, whose ends it gets
MAX_DESCRIPTORS = PIPES + 1  # in a request: one more is of the ruleset, where there is one
MAX_MESSAGE_BYTES = 64


def encode_descriptors(fds: list[int]) -> list[tuple[int, int, bytes]]:
    """Descriptors as they go along with a message."""
    import _socket

    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(fd.to_bytes(FD_BYTES, sys.byteorder) for fd in fds))]


def serve_forks(runner: CodeRunner, confinement: Confinement, supervisor: int) -> None:
    """Forks the calling process for each request. Returns in each fork, which is to run its execution."""
    import _socket

    requests, fork_bare = _socket.socket(fileno=FORK_REQUESTS), _find_bare_fork()
    requests.setblocking(True)  # whatever `socket.setdefaulttimeout` was given
    confinement.close_to_forks()
    while True:
        (count, fds), status = _receive_request(requests), 0
        try:
            if len(fds) != count:  # this process can have no more; what does not come is not known
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            confinement.release_orphans()  # the grandchild becomes the supervisor's child
            middle = fork_bare()
            if middle == 0:
                break
            status = os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1])
        except ChildProcessError:
            pass  # the code has a handler that waits for children, or none shall be waited for: it has ended
        except OSError as error:
            status = error.errno or 1
        confinement.adopt_orphans()  # what the code has left running is this process's, whenever its parent ends
        has_children = _reap_orphans()
        for fd in fds:
            os.close(fd)
        requests.send(b"end %d %d" % (status, has_children))
    _fork_once_more(requests)
    requests.detach()
    _become_execution(runner, confinement, supervisor, fds)


def _receive_request(requests: Any) -> tuple[int, list[int]]:
    """How many descriptors come with the next request, and those. Ends the process where the supervisor has gone."""
    import _socket

    message, rights, _flags, _address = requests.recvmsg(
        MAX_MESSAGE_BYTES, _socket.CMSG_LEN(MAX_DESCRIPTORS * FD_BYTES), _socket.MSG_CMSG_CLOEXEC
    )
    if not message:
        os._exit(0)
    return int(message), [
        int.from_bytes(data[at : at + FD_BYTES], sys.byteorder)
        for _level, _kind, data in rights
        for at in range(0, len(data) - len(data) % FD_BYTES, FD_BYTES)
    ]


def _reap_orphans() -> bool:
    """Whether there are children that live on."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _find_bare_fork() -> Callable[[], int]:
    """fork(2) without what Python does in a child, which touches pages by the hundred: for one that only forks."""
    try:
        import _ctypes

        raw: Any = _ctypes
        number = type("Number", (raw._SimpleCData,), {"_type_": "i"})
        flags = raw.FUNCFLAG_CDECL | raw.FUNCFLAG_PYTHONAPI | raw.FUNCFLAG_USE_ERRNO
        function: Any = type("Function", (raw.CFuncPtr,), {"_flags_": flags, "_restype_": number})
        call = function(raw.dlsym(raw.dlopen(None, 0), "fork"))
    except (ImportError, AttributeError):  # another Python than CPython
        return os.fork

    def fork_bare() -> int:
        pid: int = call()
        if pid < 0:
            raise OSError(raw.get_errno(), "fork")
        return pid

    return fork_bare


def _fork_once_more(requests: Any) -> None:
    """Returns in a child, whose parent says the child's id and ends."""
    try:
        pid = os.fork()
        if pid == 0:
            return
        requests.send(b"pid %d" % pid)
    except OSError as error:
        requests.send(b"error %d" % (error.errno or 1))
    os._exit(0)


def _become_execution(runner: CodeRunner, confinement: Confinement, supervisor: int, fds: list[int]) -> None:
    """Makes the calling process one that waits for an execution; the descriptors are its own from now on."""
    os.setsid()
    places = place_descriptors(fds[:PIPES])
    try:
        confinement.confine_fork(fds[PIPES:])
    except OSError as error:
        report_unconfined(error)
    for fd in {*places, *fds} - {1, 2, CHANNEL_IN, CHANNEL_OUT}:  # where they belong, if prepare had closed those
        os.close(fd)
    os.close(FORK_REQUESTS)
    runner.begin_fork(supervisor)
