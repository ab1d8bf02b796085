"""Where code runs, and what it finds there beside its names: the directory, the environment, modules, streams."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def enter_environment(settings: dict[str, Any]) -> None:
    """Gives the calling process, and each that it forks, what the settings say; ``cwd`` is absolute then.

    Raises OSError where the directory cannot be entered.
    """
    settings["cwd"] = os.path.abspath(settings["cwd"])
    os.chdir(settings["cwd"])
    os.environ.update(settings["environment"])
    sys.path += settings["path"]


def open_streams() -> dict[str, Any]:
    """Streams on the descriptors 0, 1 and 2, by their names in `sys`, for processes that are forked later on.

    They look at their descriptors once, when they are made. So 0 is /dev/null already, as theirs is, and a pipe is in
    the place of 1 and 2 meanwhile. Raises OSError.
    """
    pipe = os.pipe()
    kept = [os.dup(fd) for fd in (1, 2)]
    try:
        for fd in (1, 2):
            os.dup2(pipe[1], fd)
        options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
        return {
            "stdin": open(0, encoding="utf-8", errors="replace", closefd=False),
            "stdout": open(1, "w", **options),
            "stderr": open(2, "w", **options),
        }
    finally:
        for copy, fd in zip(kept, (1, 2)):
            os.dup2(copy, fd)
        for fd in (*pipe, *kept):
            os.close(fd)
