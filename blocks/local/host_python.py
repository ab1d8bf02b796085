"""The Python that runs in a local sandbox, which is the host's own, and how the driver starts in it."""

from __future__ import annotations

import os
import sys

from ...sandbox.driver_bundle import build_driver_code


def find_python() -> str:
    """This Python's own executable, not a virtual environment's: the code sees the standard library."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def find_python_prefixes() -> list[str]:
    """Directories of this Python's installation that lie outside of the system's."""
    prefixes = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix))
    return [path for path in prefixes if not path.startswith(("/usr/", "/bin/", "/lib/")) and path not in ("/usr", "/")]


def build_boot_program(is_watched: bool) -> str:
    """A program that takes the driver from standard input, ahead of the first frame, and becomes it."""
    return (
        f"import marshal, os\nrest = {len(build_driver_code())}\ndata = []\n"
        "while rest:\n    data.append(os.read(0, rest))\n    rest -= len(data[-1]) or os._exit(0)\n"
        "driver = {'__name__': 'driver'}\nexec(marshal.loads(b''.join(data)), driver)\n"
        f"driver['main'](watched={is_watched})"
    )
