"""The deletion of a local sandbox: its processes, and its folder with all files of the code."""

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
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
    read_record,
)

FIRST_UID = 0x5A000000  # first id of the users that run code for a root host; far from assigned ids
END_GRACE_SECONDS = 5.0  # time for the driver to end the code, before the driver is signalled
KILL_SECONDS = 10.0  # time to kill processes that keep forking and leave little processor time
MAX_STOPS = 20  # rounds of SIGSTOP before SIGKILL, even if some processes still run
STOPPED_STATES = "Tt"  # letters in /proc
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
    survivors = await kill_processes(folder)
    if survivors:
        raise RlmBatchError(
            f"these processes of sandbox {sandbox_id} could not be ended: {survivors}. Reap again later"
        )
    with suppress(OSError, ValueError, KeyError, TypeError):
        group = read_record(folder)["group"]
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
    deadline = time.monotonic() + KILL_SECONDS
    stop_rounds = 0
    while True:
        states = await asyncio.to_thread(_find_processes, folder)
        if not states or time.monotonic() > deadline:
            return ", ".join(str(pid) for pid in sorted(states))
        running = [pid for pid, state in states.items() if state not in STOPPED_STATES]
        if running and stop_rounds < MAX_STOPS:
            stop_rounds += 1
            _send_signal(running, signal.SIGSTOP)
            continue
        stop_rounds = 0
        with suppress(FileNotFoundError):
            await asyncio.to_thread(_kill_user, (folder / "work").stat().st_uid)
        _send_signal(states, signal.SIGKILL)
        await asyncio.sleep(ROUND_SECONDS)


def _send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _kill_user(uid: int) -> None:
    """Kill all processes of a sandbox's own user in one call, so that none can fork meanwhile."""
    if os.geteuid() == 0 and FIRST_UID <= uid < FIRST_UID + (1 << 24):
        subprocess.run(
            ["/bin/sh", "-c", "kill -KILL -1"],
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
            env={},
            stderr=subprocess.DEVNULL,
            check=False,
        )


def _find_processes(folder: Path) -> dict[int, str]:
    """Return the states of a sandbox's processes by their ids, without those that have ended (zombies)."""
    states: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):  # The process has ended, or is another user's.
                if _is_of_sandbox(Path("/proc", name), folder):
                    _, _, state = read_process(int(name))
                    if state != "Z":
                        states[int(name)] = state
    return states


def _is_of_sandbox(process: Path, folder: Path) -> bool:
    """Return whether a process, given by its directory in /proc, belongs to the sandbox in this folder."""
    # The code's processes keep the sandbox's mark wherever they go. A driver forked from a zygote has the mark too.
    if FOLDER_PATTERN.fullmatch(folder.name) and b" %d " % compute_mark(folder) in (process / "limits").read_bytes():
        return True
    work = os.fsencode(folder / "work")
    # A spawned driver, or bubblewrap around it, has the folder in its command line.
    if work in (process / "cmdline").read_bytes().split(b"\0"):
        return True
    return os.readlink(os.fsencode(process / "cwd")) == work


def remove_empty_folder(folder: Path) -> bool:
    """Remove a folder in which code left no files, after its Python. Return whether the folder is gone.

    This is fast enough for the event loop.
    """
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
    deadline = time.monotonic() + REMOVAL_SECONDS
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{os.defpath}"}
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if folder.exists():
            with suppress(subprocess.TimeoutExpired, OSError):  # This process may have no descriptor left.
                subprocess.run(
                    [*command, "--", str(folder)],
                    cwd="/",
                    env=environment,
                    stderr=subprocess.DEVNULL,
                    check=False,
                    timeout=max(0.0, deadline - time.monotonic()),
                )
    if folder.exists():
        log.warning("the folder %s of a sandbox could not be removed: reap again in a minute", folder)
    return not folder.exists()
