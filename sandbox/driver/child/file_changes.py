"""Changes of modes, owners and times where they do nothing but say that they did: of what is not there they say so.

A filter of system calls sees no path, and answers for a missing file as for any other. `Path.touch` would take that
for a file that it need not make.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLLOWING = ("chmod", "chown", "utime", "setxattr", "removexattr")
NOT_FOLLOWING = ("lchown",)
FUNCTION_SETS = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)  # by which shutil asks what they take


def report_missing_files() -> None:
    """Has the functions of `os` raise FileNotFoundError for what is not there, in this process."""
    code_os = sys.modules["os"]  # for the driver has one of its own
    for name in (*FOLLOWING, *NOT_FOLLOWING):
        function = getattr(os, name)
        checked = _check_first(function, name in FOLLOWING)
        setattr(code_os, name, checked)
        for functions in FUNCTION_SETS:
            if function in functions:
                functions.add(checked)


def _check_first(function: Any, is_following: bool) -> Any:
    def change(path: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int):
            is_followed = is_following and options.get("follow_symlinks", True)
            os.stat(path, dir_fd=options.get("dir_fd"), follow_symlinks=is_followed)
        times = arguments[0] if arguments else options.get("times")
        if function.__name__ == "utime" and times is None and options.get("ns") is None:
            return None  # the filter refuses what would set the time to now, for programs that it is to help as well
        return function(path, *arguments, **options)

    change.__name__ = change.__qualname__ = function.__name__
    change.__doc__ = function.__doc__
    return change
