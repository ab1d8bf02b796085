"""A program that becomes a confined shell in its terminal: a person looks into a sandbox of this machine."""

from __future__ import annotations

import os

from ..wire.strict_json import loads
from .child.environment import enter_environment
from .confinement import Confinement
from .processes import signal

READ_BYTES = 65536


def main(descriptor: int) -> None:
    """Become a shell. The descriptor has JSON until its end: the settings, and the command of the shell."""
    data = b""
    while piece := os.read(descriptor, READ_BYTES):
        data += piece
    request = loads(data.decode("utf-8"))
    enter_environment(request["settings"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    Confinement(request["settings"]["confinement"]).confine(os.getppid())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execvp(request["command"][0], request["command"])
