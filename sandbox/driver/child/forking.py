"""Forks of the process that has run `prepare`: one for each execution.

The supervisor's request carries the descriptors for the fork, and the reply its id. The process forks a middle process,
which forks the execution's process and ends at once. So the supervisor adopts the execution's process, and the kernel
reports its end to the supervisor.
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
MAX_WORD = (1 << WORD_BITS) - 1
MAX_TORCH_SEED = (1 << 63) - 1
SEED_BYTES = 32
# Exit functions that library modules register, for log handlers and processes. Python calls the last registered first.
EXIT_FUNCTIONS = (("logging", "shutdown"), ("multiprocessing.util", "_exit_function"))
FD_BYTES = 4
PIPES = 4  # pipes of a child
MAX_DESCRIPTORS = PIPES + 1  # the pipes and, with Landlock, the ruleset
MAX_MESSAGE_BYTES = 64
FIRST_DESCRIPTOR = 5  # the lowest descriptor of a code's file: below are its streams and channel
WATCHED_DESCRIPTORS = 128  # the descriptors below are checked; if all are closed, files with higher ones are missed
LIBC_WITH_LOCK: Any = PyDLL(None, use_errno=True)  # keeps Python's lock during a call


class ThreadsLeftError(RuntimeError):
    """Threads that still run: a fork would not have them, and locks that they hold would stay locked."""


def import_common_modules() -> None:
    """Import the modules that most code and every traceback needs."""
    for name in ("json", "signal", "traceback", "linecache"):
        __import__(name)


def check_threads() -> None:
    """Raise ThreadsLeftError with the names of all threads besides the calling one."""
    names = _list_other_threads()
    if names:
        time.sleep(END_SECONDS)
        names = _list_other_threads()
    unnamed = len(names) - MAX_NAMES
    if unnamed > 0:
        raise ThreadsLeftError(f"{', '.join(names[:MAX_NAMES])} and {unnamed} more")
    if names:
        raise ThreadsLeftError(", ".join(names))


def _list_other_threads() -> list[str]:
    threading: Any = sys.modules.get("threading")
    threads: list[Any] = [] if threading is None else threading.enumerate()
    names = [str(thread.name) for thread in threads if thread.ident != _thread.get_ident()]
    nameless = _thread._count() - len(names)  # type: ignore[reportPrivateUsage]
    if nameless > 0:
        names.append(f"{nameless} without a name, which _thread started")
    return names


def disarm_finalizers() -> None:
    """Clear the exit functions in a fork: they belong to `prepare`, and each fork would run them again.

    Those of EXIT_FUNCTIONS stay, because a fork needs them for its own objects.
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
        seed_numpy([seed >> shift & MAX_WORD for shift in range(0, 8 * SEED_BYTES, WORD_BITS)])
    seed_torch: Any = getattr(sys.modules.get("torch"), "manual_seed", None)
    if seed_torch is not None:
        seed_torch(seed & MAX_TORCH_SEED)


def encode_descriptors(fds: list[int]) -> list[tuple[int, int, bytes]]:
    import _socket

    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(fd.to_bytes(FD_BYTES, sys.byteorder) for fd in fds))]


def serve_code(runner: CodeRunner, confinement: Confinement, supervisor: int, *, has_forks: bool) -> NoReturn:
    """Run executions in the calling process, or with `has_forks` run `prepare` and then each execution in a fork."""
    if has_forks:
        runner.prepare(confinement)
        _serve_forks(runner, confinement, supervisor)
    runner.serve(confinement)


def _serve_forks(runner: CodeRunner, confinement: Confinement, supervisor: int) -> None:
    """Fork the calling process for each request. Returns only in each fork, which then runs its execution."""
    import _socket

    requests = _socket.socket(fileno=FORK_REQUESTS)
    requests.setblocking(True)  # the code may have called `socket.setdefaulttimeout`
    # With a Landlock domain per fork, forks cannot read this process anyway, and the host must read which pages they
    # share with it, to sum their memory.
    if not confinement.has_domain:
        confinement.close_to_others()
    while True:
        count, fds = _receive_request(requests)
        status = 0
        try:
            if len(fds) != count:  # this process has reached its limit on open files; the missing descriptors are lost
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            confinement.adopt_orphans(adopts=False)  # The supervisor must adopt the execution's process.
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
    """Wait for a request, and exit if the supervisor sends none any more.

    Return the number of descriptors that were sent, and the descriptors that have arrived.
    """
    import _socket

    message, ancillary, _flags, _address = requests.recvmsg(
        MAX_MESSAGE_BYTES, _socket.CMSG_LEN(MAX_DESCRIPTORS * FD_BYTES), _socket.MSG_CMSG_CLOEXEC
    )
    if not message:
        os._exit(0)
    fds: list[int] = []
    packed = b"".join(data for _level, _kind, data in ancillary)
    while len(packed) >= FD_BYTES:
        fds.append(int.from_bytes(packed[:FD_BYTES], sys.byteorder))
        packed = packed[FD_BYTES:]
    return int(message), fds


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
    """Fork the execution's process from the middle process. The middle process sends the id and exits."""
    try:
        # Leave the group: the supervisor kills that of a lost prepared process, and executions must survive.
        os.setsid()
        pid = os.fork()
        if pid == 0:
            return  # in the execution's process
        requests.send(b"pid %d" % pid)
    except OSError as error:
        requests.send(b"error %d" % (error.errno or 1))
    os._exit(0)


def _become_execution(runner: CodeRunner, confinement: Confinement, supervisor: int, fds: list[int]) -> None:
    """Turn the calling process into one that waits for an execution, with its own pipes and Landlock domain."""
    os.setsid()
    copied = place_descriptors(fds[:PIPES])
    try:
        confinement.adopt_orphans()
        # From its inner domain the fork can neither signal nor read the forked process or any other fork.
        for ruleset in fds[PIPES:]:
            confinement.enter_domain(ruleset)
    except OSError as error:
        report_unconfined(error)
    fixed = {1, 2, CHANNEL_IN, CHANNEL_OUT}  # A request's descriptors may have these numbers already.
    for fd in {*copied, *fds} - fixed:
        os.close(fd)
    os.close(FORK_REQUESTS)
    runner.begin_fork(supervisor)


class OpenFiles:
    """The files that code may have opened. Create it in the process that children are forked from, to save time."""

    def __init__(self) -> None:
        self._inherited: list[Any] = []  # files of the forked process, which gc no longer lists in a fork
        self._poll = select.poll()
        for fd in range(FIRST_DESCRIPTOR, WATCHED_DESCRIPTORS):
            self._poll.register(fd, 0)  # Without events, a poll still reports the descriptors that are not open.

    def write_inherited(self) -> None:
        """Flush all files, because each fork would write the data again, and keep a list of them for the forks."""
        self._inherited = _find_writers()
        _flush(self._inherited)

    def write_at_end(self) -> None:
        """Flush files that stay open after the code's names are deleted: in reference cycles or in other modules."""
        closed = [fd for fd, event in self._poll.poll(0) if event & select.POLLNVAL]
        if len(closed) == WATCHED_DESCRIPTORS - FIRST_DESCRIPTOR:
            return  # No file is open, and the search takes a tenth of a millisecond.
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
