"""The driver's start: the wire is moved out of the code's reach, and the supervisor begins."""

from __future__ import annotations

import fcntl
import os

from .confinement import Confinement
from .orphans import kill_all_children
from .processes import send_signal, signal
from .supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .child.runner import CodeRunner

EXIT_LEFT = 75  # EX_TEMPFAIL


def main(
    watched: bool = False,
    first: str = "",
    runner: CodeRunner | None = None,
    child: tuple[int, list[int]] | None = None,
) -> None:
    """Runs the driver on descriptors 0 and 1; `watched` by a process that outlives it, `first` frames given at once.

    `runner` is one that was made when what most code needs had been imported. `child` was forked ahead (its id, and our
    ends of the pipes to it), and waits for the settings.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a host may have blocked some, and this process inherits that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the host's terminal is the host's to handle
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if watched:
        fork_supervisor()
    # What reads or writes later where the wire was finds /dev/null.
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    _close_wire(os.open(os.devnull, os.O_RDWR))
    try:
        Supervisor(reads, writes, runner, child).run(first.encode("utf-8"))
    except BrokenPipeError:
        pass
    finally:
        # The first process of a namespace takes all others with it.
        left = "" if os.getpid() == 1 else kill_all_children()
    _end(left)


def _end(left: str) -> None:
    """Ends the process, with a status that says whether something of the sandbox is left."""
    if left:
        os.write(2, f"these processes could not be ended: {left}\n".encode())
    os._exit(EXIT_LEFT if left else 0)


def _close_wire(null: int) -> None:
    """Puts /dev/null, which is open there, in the wire's place."""
    os.dup2(null, 0)
    os.dup2(null, 1)
    if null > 2:
        os.close(null)


def fork_supervisor() -> None:
    """Forks. The child returns, as the supervisor; the parent stays, and ends what that leaves behind if it is killed.

    For a driver that is a program of its own without a process namespace, where what code has moved to a session of its
    own would live on; elsewhere the zygote does so. Raises OSError.
    """
    confinement = Confinement({})
    confinement.request_term_on_parent_end()
    confinement.adopt_orphans()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # what fails does so while this is one process
    pid = os.fork()
    if pid == 0:
        os.close(null)
        return
    # Comes once for each thread of the host that this process was handed on to when they ended.
    signal.signal(signal.SIGTERM, lambda _number, _frame: send_signal(pid, signal.SIGKILL))
    _close_wire(null)  # it is the supervisor's: its end has to be seen
    while os.waitpid(-1, 0)[0] != pid:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its id may be another's from now on
    _end(kill_all_children())
