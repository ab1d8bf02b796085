"""Changes of modes, owners and times whose success the seccomp filter fakes: a missing file must raise an error.

The filter sees no paths, so it reports success for missing files too. `Path.touch` would then not create its file.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLLOWING = ("chmod", "chown", "utime", "setxattr", "removexattr")
NOT_FOLLOWING = ("lchown",)
FUNCTION_SETS = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)  # sets that shutil reads


def report_missing_files() -> None:
    """Make these functions of `os` raise FileNotFoundError for a missing file, in this process."""
    code_os = sys.modules["os"]  # the driver has its own copy
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
            return None  # The filter refuses the time `now`: `touch` programs then create missing files.
        return function(path, *arguments, **options)

    change.__name__ = change.__qualname__ = function.__name__
    change.__doc__ = function.__doc__
    return change
