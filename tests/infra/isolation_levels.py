"""Detection of this machine's isolation levels without the project's code.

If the project rejects a level that the machine supports, its tests must fail and not be skipped.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

LANDLOCK_CREATE_RULESET = 444
LANDLOCK_CREATE_RULESET_VERSION = 1


def find_strongest_level() -> str:
    """Return the isolation level that a user gets by default; empty if the machine supports none."""
    return next((level for level in ("bubblewrap", "landlock") if not find_missing_support(level)), "")


def find_missing_support(level: str, uid: int | None = None) -> str:
    """Return what this machine lacks for the level, in words; empty if nothing. `uid` defaults to the current user."""
    if level == "none":
        return ""
    if level == "auto":
        return find_missing_support("bubblewrap", uid) and find_missing_support("landlock", uid)
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"isolation needs Linux on x86_64 or aarch64, and this is {sys.platform} on {platform.machine()}"
    if level == "landlock":
        version = landlock()
        return "" if version >= 1 else f"this kernel's version of Landlock is {version}"
    return _bubblewrap(shutil.which("bwrap"), os.getuid() if uid is None else uid)


@cache
def landlock() -> int:
    """Return the kernel's Landlock version; a value below 1 means that Landlock is missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION))


@cache
def _bubblewrap(program: str | None, uid: int) -> str:
    if program is None:
        return "there is no bwrap here (the stronger level of local isolation): install bubblewrap"
    who: dict[str, Any] = {} if uid == os.getuid() else {"user": uid, "group": uid, "extra_groups": []}
    namespaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    command = [program, "--ro-bind", "/", "/", *(("--unshare-user",) if uid else ()), *namespaces, "--proc", "/proc"]
    try:
        done = subprocess.run(
            [*command, "true"], check=False, capture_output=True, text=True, cwd="/", timeout=60, **who
        )
    except subprocess.TimeoutExpired:
        return f"bwrap starts nothing here as user {uid} within a minute"
    return f"bwrap starts nothing here as user {uid}: {done.stderr.strip()}" if done.returncode else ""
