"""The deletion of a local sandbox: its processes, and its folder with all files of the code."""

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ...sandbox.errors import ConfigurationError, RlmBatchError
from ...sandbox.wire.process_table import read_process
from .cgroup import remove_group
from .inventory import (
    FOLDER_PATTERN,
    FOLDER_PREFIX,
    LABELS_FILE,
    compute_mark,
    is_own_directory,
    read_labels,
)

FIRST_UID = 0x5A000000  # first id of the users that run code for a root host; far from assigned ids
END_GRACE_SECONDS = 5.0  # time for the driver to end the code, before the driver is signalled
KILL_SECONDS = 10.0  # time to kill processes that keep forking and leave little processor time
MAX_STOPS = 20  # rounds of SIGSTOP before SIGKILL, even if some processes still run
ROUND_SECONDS = 0.05
REMOVAL_SECONDS = 60.0  # time to remove a folder; half a million files take less

log = logging.getLogger("rlm_batch.local")


async def delete_sandbox(sandbox_id: str) -> bool:
    """End a sandbox's processes and remove its folder. If that fails, the folder stays, and RlmBatchError is raised."""
    folder = Path(tempfile.gettempdir()) / sandbox_id
    if not sandbox_id.startswith(FOLDER_PREFIX) or "/" in sandbox_id:
        raise ConfigurationError(f"{sandbox_id!r} is not a local sandbox: their ids begin with {FOLDER_PREFIX}")
    if not is_own_directory(folder):
        return False  # It is missing, or another user's.
    if left := await kill_processes(folder):
        raise RlmBatchError(f"these processes of sandbox {sandbox_id} could not be ended: {left}. Reap again later")
    with suppress(OSError, ValueError, KeyError, TypeError):
        group = read_labels(folder, "group")
        if os.path.basename(group) == folder.name:
            await asyncio.to_thread(remove_group, group)
    if not await asyncio.to_thread(remove_folder, folder):
        raise RlmBatchError(f"the folder {folder} of a sandbox could not be removed in time: reap again in a minute")
    await kill_processes(folder)  # A terminal whose shell was killed above may have started a keeper.
    return True


async def kill_processes(folder: Path) -> str:
    """Kill a sandbox's processes, and return the ids of those that survive; empty if all are dead.

    All processes are stopped first, and then killed. So a driver cannot report that its code crashed. A stopped process
    still counts against the limit on processes, so the others cannot replace it by forking.
    """
    until, stops = time.monotonic() + KILL_SECONDS, 0
    while pids := await asyncio.to_thread(_find_processes, folder):
        if time.monotonic() > until:
            break
        running = [pid for pid, state in pids.items() if state not in "Tt"]
        stops = stops + 1 if running and stops < MAX_STOPS else 0
        if not stops:
            with suppress(FileNotFoundError):
                await asyncio.to_thread(_kill_user, (folder / "work").stat().st_uid)
        for pid in running if stops else pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if not stops:
            await asyncio.sleep(ROUND_SECONDS)
    else:
        return ""
    return ", ".join(map(str, sorted(pids)))


def _kill_user(uid: int) -> None:
    """Kill all processes of a sandbox's own user in one call, so that none can fork meanwhile."""
    if os.geteuid() == 0 and FIRST_UID <= uid < FIRST_UID + (1 << 24):
        command = ["/bin/sh", "-c", "kill -KILL -1"]
        who = {"user": uid, "group": uid, "extra_groups": []}
        subprocess.run(command, cwd="/", env={}, stderr=subprocess.DEVNULL, check=False, **who)


def _find_processes(folder: Path) -> dict[int, str]:
    """Return the ids of a sandbox's processes and the letters of their states.

    The code's processes keep the sandbox's mark wherever they go. A driver forked from a zygote has the mark too. A
    spawned driver, or bubblewrap around it, has the folder in its command line. Most processes also run in the folder.
    """
    pids: dict[int, str] = {}
    work = os.fsencode(folder / "work")
    mark = b" %d " % compute_mark(folder) if FOLDER_PATTERN.fullmatch(folder.name) else None
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                process = Path("/proc", name)
                if (
                    (mark is not None and mark in (process / "limits").read_bytes())
                    or work in (process / "cmdline").read_bytes().split(b"\0")
                    or os.readlink(os.fsencode(process / "cwd")) == work
                ) and (state := read_process(int(name))[2]) != "Z":
                    pids[int(name)] = state
    return pids


def remove_empty_folder(folder: Path) -> bool:
    """Remove a folder without its Python in which code left no files; return whether it is gone. It needs no thread."""
    try:
        for name in ("work", "tmp"):
            os.rmdir(f"{folder}/{name}")
        os.unlink(f"{folder}/{LABELS_FILE}")
        os.rmdir(folder)
    except OSError:
        return not folder.exists()
    return True


def remove_folder(folder: Path) -> bool:
    """Remove a folder with all files of the code, at any depth and in closed directories; return whether it is gone.

    Separate programs remove the files, because a program can be killed after `REMOVAL_SECONDS`, and a thread cannot. If
    the folder stays, this function logs a warning, and the next reap continues.
    """
    end = time.monotonic() + REMOVAL_SECONDS
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{os.defpath}"}
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if folder.exists():
            with suppress(subprocess.TimeoutExpired, OSError):  # This process may have no descriptor left.
                wait = max(0.0, end - time.monotonic())
                words = [*command, "--", str(folder)]
                subprocess.run(words, cwd="/", env=environment, stderr=subprocess.DEVNULL, check=False, timeout=wait)
    if folder.exists():
        log.warning("the folder %s of a sandbox could not be removed: reap again in a minute", folder)
    return not folder.exists()
