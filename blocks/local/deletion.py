"""How a local sandbox is deleted: its processes are ended, and its folder goes with whatever the code has left."""

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ...sandbox.errors import ConfigurationError, RlmBatchError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.wire.process_table import read_process
from ...sandbox.wire.python_directory import remove_python_directory
from .inventory import (
    FOLDER_PATTERN,
    FOLDER_PREFIX,
    LABELS_FILE,
    USERS_FILE,
    compute_mark,
    is_own_directory,
    read_groups,
)
from .totals.cgroups import remove_groups

FIRST_UID = 0x5A000000  # of the users that code runs as where the host is root: far from those that systems hand out
END_GRACE_SECONDS = 5.0  # for the driver to end what runs, before it is ended itself
DRIVER_GRACE_SECONDS = 12.0  # for another host's driver, which gives what it ends ten itself
KILL_SECONDS = 10.0  # for those that fork meanwhile, and leave few processors to us
MAX_STOPS = 20  # in a row, before what cannot be stopped is killed as it is
ROUND_SECONDS = 0.05
MAX_NAMES = 10  # in a sentence
REMOVAL_SECONDS = 60.0  # for a folder: a repository of half a million files takes less

log = logging.getLogger("rlm_batch.local")


async def delete_sandbox(sandbox_id: str) -> None:
    """Ends a sandbox's processes and removes its folder; one that has gone is no error.

    Raises ConfigurationError, and RlmBatchError where processes go on, or the folder could not be removed in time: it
    stays then, to be found again.
    """
    folder = Path(tempfile.gettempdir()) / sandbox_id
    if not sandbox_id.startswith(FOLDER_PREFIX) or "/" in sandbox_id:
        raise ConfigurationError(f"{sandbox_id!r} is no id of a local sandbox: they begin with {FOLDER_PREFIX}")
    if not is_own_directory(folder):
        return  # it has gone, or somebody else has put something there
    pids = await asyncio.to_thread(_find_processes, folder)
    # The topmost end what is below them. A driver that saw its code end by our signal would report a crash.
    topmost = [pid for pid in pids if not _count_ancestors(pid, pids)]
    has_driver = any(map(_may_be_driver, topmost))
    for pid in topmost:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + (DRIVER_GRACE_SECONDS if has_driver else 0.0)
    while time.monotonic() < until:
        if not await asyncio.to_thread(_find_processes, folder):
            break
        await asyncio.sleep(ROUND_SECONDS)
    if left := await kill_processes(folder):
        raise RlmBatchError(
            f"these processes of sandbox {sandbox_id} could not be ended: {left} -- reap again when they can be"
        )
    await asyncio.to_thread(remove_groups, read_groups(folder))
    if not await asyncio.to_thread(remove_folder, folder):
        raise RlmBatchError(describe_rest(folder))


async def kill_processes(folder: Path) -> str:
    """Kills a sandbox's processes; those that are left after a while, by name.

    Those that are stopped keep their places below the limit on processes, so that the others find none to fork into:
    they are stopped until none runs, and then all are killed.
    """
    until, stops = time.monotonic() + KILL_SECONDS, 0
    while pids := await asyncio.to_thread(_find_processes, folder):
        if time.monotonic() > until:
            break
        with suppress(FileNotFoundError):
            await asyncio.to_thread(_kill_user, (folder / "work").stat().st_uid)
        running = [pid for pid, state in pids.items() if state not in "Tt"]
        stops = stops + 1 if running and stops < MAX_STOPS else 0
        for pid in running if stops else pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if not stops:
            await asyncio.sleep(ROUND_SECONDS)
    else:
        return ""
    names = [f"{pid} ({_read_name(pid)})" for pid in sorted(pids)[:MAX_NAMES]]
    return ", ".join(names) + (f" and {len(pids) - MAX_NAMES} more" if len(pids) > MAX_NAMES else "")


def _read_name(pid: int) -> str:
    """A process's name, which the code may have chosen; a question mark where it has ended."""
    with suppress(OSError):
        return escape_text(Path(f"/proc/{pid}/comm").read_text(errors="replace").strip())
    return "?"


def _kill_user(uid: int) -> None:
    """Kills every process of a user that is a sandbox's own: all at once, so that none can fork meanwhile."""
    if os.geteuid() == 0 and FIRST_UID <= uid < FIRST_UID + (1 << 24):
        command = ["/bin/sh", "-c", "kill -KILL -1"]
        who = {"user": uid, "group": uid, "extra_groups": []}
        subprocess.run(command, cwd="/", env={}, stderr=subprocess.DEVNULL, check=False, **who)


def _may_be_driver(pid: int) -> bool:
    """Whether no filter of system calls is on a process, as on the driver and on bubblewrap, and on none's code."""
    with suppress(OSError):
        return b"\nSeccomp:\t0" in Path(f"/proc/{pid}/status").read_bytes()
    return False


def _find_processes(folder: Path) -> dict[int, str]:
    """The ids of a sandbox's processes, those that went elsewhere included, and the letters of their states.

    The code's have its mark, and so has a driver that was forked from a zygote. One that is a program of its own, or
    bubblewrap around it, has the sandbox's folder in its command line. Most have the folder as their directory.
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


def _count_ancestors(pid: int, pids: Collection[int]) -> int:
    """How many of these processes are above one, also by way of others, which no user may look into."""
    count = 0
    with suppress(OSError):  # it ended meanwhile
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            count += pid in pids
    return count


def remove_empty_folder(folder: Path) -> bool:
    """Removes the folder of a sandbox whose code has left no files, the common case, without a thread."""
    try:
        for name in ("work", "tmp"):
            (folder / name).rmdir()
        remove_python_directory(str(folder / "python"), [USERS_FILE])
        (folder / LABELS_FILE).unlink()
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def remove_folder(folder: Path) -> bool:
    """Removes a folder with whatever the code has left: trees of any depth, directories closed to their own user.

    Programs of their own do it, which hold nothing of this process's, and are ended after `REMOVAL_SECONDS`. Whether
    the folder has gone; if not, the log says so, and the next reap goes on with it.
    """
    end = time.monotonic() + REMOVAL_SECONDS
    # A relative directory of PATH would be one below the working directory, where code may have put a program.
    directories = [*os.environ.get("PATH", "").split(":"), *os.defpath.split(":")]
    environment = {**os.environ, "PATH": ":".join(filter(os.path.isabs, directories))}
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if folder.exists():
            with suppress(subprocess.TimeoutExpired, OSError):  # This process may open no more files.
                wait = max(0.0, end - time.monotonic())
                words = [*command, "--", str(folder)]
                subprocess.run(words, env=environment, stderr=subprocess.DEVNULL, check=False, timeout=wait)
    if folder.exists():
        log.warning("%s", describe_rest(folder))
        return False
    return True


def describe_rest(folder: Path) -> str:
    """That a folder could not be removed in that time, and what to do about it."""
    return (
        f"the folder {folder} of a sandbox could not be removed within {REMOVAL_SECONDS:g} s: rlm-batch reap goes on "
        "with it a minute after its host has let go of it, or remove it by hand"
    )
