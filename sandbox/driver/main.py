"""The driver's start: it moves the wire out of the code's reach, and runs the supervisor."""

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
    """Run the driver on descriptors 0 and 1.

    Args:
        watched: Fork, so that the parent process cleans up if the supervisor dies.
        first: Frames that arrived with the start of the driver.
        runner: A runner made by the zygote, which has imported the common modules.
        child: A child forked ahead, which waits for the settings: its id and our ends of its pipes.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The host may have blocked signals, which this process inherits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host handles Ctrl-C in its terminal
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if watched:
        fork_supervisor()
    # The code must not reach the wire, so the supervisor moves it away from descriptors 0 and 1.
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    _replace_wire(os.open(os.devnull, os.O_RDWR))
    try:
        Supervisor(reads, writes, runner, child).run(first.encode("utf-8"))
    except BrokenPipeError:
        pass
    finally:
        is_first_of_namespace = os.getpid() == 1  # With it, the kernel kills all processes of the namespace.
        survivors = "" if is_first_of_namespace else kill_all_children()
    end_driver(survivors)


def end_driver(survivors: str) -> None:
    """End this process. `survivors` names the processes that could not be killed; then the exit status is EXIT_LEFT."""
    if not survivors:
        os._exit(0)
    os.write(2, f"these processes could not be ended: {survivors}\n".encode())
    os._exit(EXIT_LEFT)


def _replace_wire(null: int) -> None:
    """Replace descriptors 0 and 1 by `null`, a descriptor of /dev/null, and close it."""
    os.dup2(null, 0)
    os.dup2(null, 1)
    if null > 2:
        os.close(null)


def fork_supervisor() -> None:
    """Fork. The child returns and becomes the supervisor; the parent kills the processes that the supervisor leaves.

    A driver without a process namespace needs this: if its supervisor is killed, the code's processes in sessions of
    their own survive. (The zygote does this for its sandboxes.) Raises OSError.
    """
    confinement = Confinement({})
    confinement.signal_at_parent_end()
    confinement.adopt_orphans()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # An error before the fork ends only one process.
    pid = os.fork()
    if pid == 0:
        os.close(null)
        return
    # The kernel sends SIGTERM when the host's thread that started this process ends.
    signal.signal(signal.SIGTERM, lambda _number, _frame: send_signal(pid, signal.SIGKILL))
    _replace_wire(null)  # Only the supervisor has the wire, so the wire closes when the supervisor ends.
    while os.waitpid(-1, 0)[0] != pid:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor's id may belong to another process from now on
    end_driver(kill_all_children())
