"""A program that runs a confined shell on a pseudo-terminal: a person looks into a sandbox of this machine."""

from __future__ import annotations

import fcntl
import os

from ..wire.strict_json import loads
from .child.environment import enter_environment
from .confinement import Confinement
from .main import become_driver, end_driver
from .orphans import kill_all_children
from .processes import signal

TIOCSCTTY = 0x540E  # request that makes a terminal the controlling one; `termios` is an import more
READ_BYTES = 65536
SIGNAL_STATUS = 128  # added to a signal's number


def main(watched: bool, terminal: int) -> None:
    """Run a shell until it ends, write its exit status to descriptor 1, and exit.

    Descriptor 0 has JSON until its end: the settings, and the command of the shell.

    Args:
        watched: Fork, so that the parent process cleans up if this process dies.
        terminal: Descriptor of the shell's pseudo-terminal.
    """
    become_driver(watched)
    data = b""
    while piece := os.read(0, READ_BYTES):
        data += piece
    request = loads(data.decode("utf-8"))
    enter_environment(request["settings"])
    confinement = Confinement(request["settings"]["confinement"])
    confinement.become_supervisor()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_shell(terminal, confinement, supervisor, request["command"])
        except BaseException as error:
            os.write(2, f"the shell did not start: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(127)
    os.close(terminal)
    status = 0
    ended = 0
    while ended != pid:
        ended, status = os.waitpid(-1, 0)  # The first process of a namespace also gets its orphans.
    code = os.waitstatus_to_exitcode(status)
    # A killed shell has the status that a person's own shell would show, such as 137.
    os.write(1, str(code if code >= 0 else SIGNAL_STATUS - code).encode())
    end_driver("" if os.getpid() == 1 else kill_all_children())


def _become_shell(terminal: int, confinement: Confinement, supervisor: int, command: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(terminal, TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(terminal, fd)
    confinement.confine(supervisor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execvp(command[0], command)
