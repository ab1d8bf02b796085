"""A process that is forked for executions: what it must not have, the service that forks it, and what each fork renews.

A request carries the descriptors for the fork; the reply is the fork's id. The fork's parent is a middle process that
ends at once. So the supervisor adopts the fork, and the kernel reports its end to the supervisor.
"""

from __future__ import annotations

import _thread
import errno
import gc
import os
import select
import sys
import time
from ctypes import PyDLL, get_errno

from .channel import CHANNEL_IN, CHANNEL_OUT, FORK_REQUESTS, place_descriptors, report_unconfined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ..confinement import Confinement
    from .runner import CodeRunner

END_SECONDS = 0.01  # time for a thread that is about to end
MAX_NAMES = 10  # names in a message
WORD_BITS = 32  # bits in each number of a numpy seed
SEED_BYTES = 32
# Exit functions that library modules register, for log handlers and processes. Python calls the last registered first.
EXIT_FUNCTIONS = (("logging", "shutdown"), ("multiprocessing.util", "_exit_function"))
FD_BYTES = 4
PIPES = 4  # pipes of a child
MAX_DESCRIPTORS = PIPES + 1  # the pipes and, with Landlock, the ruleset
MAX_MESSAGE_BYTES = 64
FIRST_DESCRIPTOR = 5  # the lowest descriptor of a code's file: below are its streams and channel
WATCHED_DESCRIPTORS = 128  # number of checked descriptors; if all are closed, files with higher ones are missed
LIBC_WITH_LOCK: Any = PyDLL(None, use_errno=True)  # keeps Python's lock during a call


class ThreadsLeftError(RuntimeError):
    """Threads that still run: a fork would not have them, and locks that they hold would stay locked."""


def import_common_modules() -> None:
    """Import the modules that most code and every traceback needs."""
    for name in ("json", "signal", "traceback", "linecache"):
        __import__(name)


def check_threads() -> None:
    """Raise ThreadsLeftError with the names of all threads besides the calling one."""
    names: list[str] = []
    unnamed = 0
    for pause in (END_SECONDS, 0.0):
        threading: Any = sys.modules.get("threading")
        threads: list[Any] = [] if threading is None else threading.enumerate()
        names = [str(thread.name) for thread in threads if thread.ident != _thread.get_ident()]
        unnamed = _thread._count() - len(names)  # type: ignore[reportPrivateUsage]
        if not names and unnamed <= 0:
            return
        time.sleep(pause)
    if unnamed > 0:
        names.append(f"{unnamed} without a name, which _thread started")
    more = len(names) - MAX_NAMES
    raise ThreadsLeftError(", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else ""))


def disarm_finalizers() -> None:
    """Clear the exit functions in a fork: they belong to the forked process, and each fork would run them again.

    Those that library modules register at import stay, because a fork needs them for its own objects.
    """
    import atexit

    atexit._clear()  # type: ignore[reportPrivateUsage]
    for name, function in EXIT_FUNCTIONS:
        at_exit: Any = getattr(sys.modules.get(name), function, None)
        if at_exit is not None:
            atexit.register(at_exit)
    finalize: Any = getattr(sys.modules.get("weakref"), "finalize", None)
    if finalize is not None:
        for entry in list(finalize._registry):
            entry.atexit = False
        finalize._registered_with_atexit = False
    registry: Any = getattr(sys.modules.get("multiprocessing.util"), "_finalizer_registry", None)
    if registry is not None:
        registry.clear()


def load_generators() -> None:
    """Import, once for all forks, the generators that each fork seeds. Numpy imports its own only at first use."""
    __import__("random")
    if "numpy" in sys.modules:
        try:
            __import__("numpy.random")
        except ImportError:
            pass  # a module named numpy that is not numpy


def seed_generators(seed: int | None) -> None:
    """Seed the global random generators; None takes a seed from the operating system."""
    if seed is None:
        seed = int.from_bytes(os.urandom(SEED_BYTES), "little")
    __import__("random").seed(seed)
    # Modules named numpy or torch may be others, without these functions.
    seed_numpy: Any = getattr(sys.modules.get("numpy.random"), "seed", None)
    if seed_numpy is not None:
        seed_numpy([seed >> at & (1 << WORD_BITS) - 1 for at in range(0, 8 * SEED_BYTES, WORD_BITS)])
    seed_torch: Any = getattr(sys.modules.get("torch"), "manual_seed", None)
    if seed_torch is not None:
        seed_torch(seed & (1 << 63) - 1)


def encode_descriptors(fds: list[int]) -> list[tuple[int, int, bytes]]:
    import _socket

    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(fd.to_bytes(FD_BYTES, sys.byteorder) for fd in fds))]


def serve_code(runner: CodeRunner, confinement: Confinement, supervisor: int, *, has_forks: bool) -> NoReturn:
    """Run executions in the calling process, or with `has_forks` run `prepare`, and each execution in a fork."""
    if has_forks:
        runner.prepare(confinement)
        _serve_forks(runner, confinement, supervisor)
    runner.serve(confinement)


def _serve_forks(runner: CodeRunner, confinement: Confinement, supervisor: int) -> None:
    """Fork the calling process for each request. Returns only in each fork, which then runs its execution."""
    import _socket

    requests = _socket.socket(fileno=FORK_REQUESTS)
    requests.setblocking(True)  # the code may have called `socket.setdefaulttimeout`
    # With a Landlock domain per fork it stays open: the host must see which pages forks share, to sum their memory.
    if not confinement.has_domain:
        confinement.close_to_others()
    while True:
        (count, fds), status = _receive_request(requests), 0
        try:
            if len(fds) != count:  # this process has reached its limit on open files; the missing descriptors are lost
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            confinement.adopt_orphans(adopts=False)  # The supervisor must adopt the grandchild.
            middle = _fork_bare()
            if middle == 0:
                break
            status = os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1])
        except ChildProcessError:
            pass  # The middle process has ended: the code's signal handler reaped it, or the code ignores SIGCHLD.
        except OSError as error:
            status = error.errno or 1
        confinement.adopt_orphans()  # this process adopts the processes that the code left running
        has_children = _reap_orphans()
        for fd in fds:
            os.close(fd)
        requests.send(b"end %d %d" % (status, has_children))
    _fork_once_more(requests)
    requests.detach()
    _become_execution(runner, confinement, supervisor, fds)


def _receive_request(requests: Any) -> tuple[int, list[int]]:
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
    """Reap ended children; return whether others still run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _fork_bare() -> int:
    """Call fork(2) without Python's work in the child, which touches hundreds of pages. The child must soon fork."""
    pid: int = LIBC_WITH_LOCK.fork()
    if pid < 0:
        raise OSError(get_errno(), "fork")
    return pid


def _fork_once_more(requests: Any) -> None:
    """Fork again and return in the child; the parent sends the child's id and exits.

    First leave the prepared process's group: the supervisor kills this group if the prepared process is lost, but the
    child's execution may continue.
    """
    try:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            return
        requests.send(b"pid %d" % pid)
    except OSError as error:
        requests.send(b"error %d" % (error.errno or 1))
    os._exit(0)


def _become_execution(runner: CodeRunner, confinement: Confinement, supervisor: int, fds: list[int]) -> None:
    """Turn the calling process into one that waits for an execution and owns the descriptors."""
    os.setsid()
    places = place_descriptors(fds[:PIPES])
    try:
        confinement.adopt_orphans()
        # From its inner domain the fork can neither signal nor read the forked process or any other fork.
        for ruleset in fds[PIPES:]:
            confinement.enter_domain(ruleset)
    except OSError as error:
        report_unconfined(error)
    for fd in {*places, *fds} - {1, 2, CHANNEL_IN, CHANNEL_OUT}:  # Some may be in place already.
        os.close(fd)
    os.close(FORK_REQUESTS)
    runner.begin_fork(supervisor)


class OpenFiles:
    """The files that code may have opened. Create this object in the process that children are forked from."""

    def __init__(self) -> None:
        self._inherited: list[Any] = []  # files of the forked process, which gc no longer lists in a fork
        self._poll = select.poll()
        for fd in range(FIRST_DESCRIPTOR, WATCHED_DESCRIPTORS):
            self._poll.register(fd, 0)

    def write_inherited(self) -> None:
        """Flush all files, because each fork would write the data again, and keep a list of them for the forks."""
        self._inherited = _find_writers()
        _flush(self._inherited)

    def write_at_end(self) -> None:
        """Flush files that stay open after the code's names are deleted: in reference cycles or held by other modules.

        This takes a tenth of a millisecond, so it is skipped if no file is open.
        """
        closed = [fd for fd, event in self._poll.poll(0) if event & select.POLLNVAL]
        if len(closed) == WATCHED_DESCRIPTORS - FIRST_DESCRIPTOR:
            return
        _flush([*_find_writers(), *self._inherited])
        gc.collect()  # closes files in cycles, in any order; a compressed file then writes its end


def _find_writers() -> list[Any]:
    import _io

    writers = (_io.TextIOWrapper, _io.BufferedWriter, _io.BufferedRandom)
    found = [item for item in gc.get_objects() if issubclass(type(item), writers)]
    # Text files first: they flush into their binary buffers.
    return sorted(found, key=lambda item: not issubclass(type(item), _io.TextIOWrapper))


def _flush(files: list[Any]) -> None:
    for file in files:
        try:
            file.flush()
        except Exception:  # a closed or read-only file, or a class of the code
            pass
