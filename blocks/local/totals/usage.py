"""The memory and disk space of processes and folders, as a process of the same user or of root sees it."""

import errno
import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....sandbox.wire.process_table import read_process

BLOCK_BYTES = 512  # unit of `st_blocks`
INODE_BYTES = 512  # largest disk space of an empty file
TOO_DEEP_BYTES = 1 << 62  # above every limit, for files too deep to be reached by a path
MEMORY_FILES = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")


@dataclass
class Usage:
    """The resources of some processes: bytes in total and by process, and `tasks`, the threads by process."""

    tasks: dict[int, int] = field(default_factory=dict[int, int])
    memory: dict[int, int] = field(default_factory=dict[int, int])
    total_memory: int = 0
    deleted_files: int = 0


def measure_processes(pids: Collection[int], shm_bytes: int, enough: int) -> Usage:
    """Measure what these processes use; `shm_bytes` is the content of their /dev/shm.

    If the total is below `enough` bytes, it may be too high, because it counts shared pages more than once. Above
    `enough`, each process gets its part of the shared pages. This is slow, because the kernel visits every page.
    """
    usage = Usage()
    anonymous, shared = {}, {}
    threads = {pid: _find_living_thread(pid) for pid in pids}
    for pid, thread in threads.items():
        usage.tasks[pid], anonymous[pid], shared[pid] = _read_status(thread)
    memory_files, usage.deleted_files = _measure_open_files(threads)
    if sum(anonymous.values()) + sum(shared.values()) + sum(memory_files.values()) + shm_bytes > enough:
        for pid, thread in threads.items():
            shares = _read_shares(thread)
            if shares is not None:
                anonymous[pid], shared[pid] = shares
            elif _has_ended(pid):  # Other processes account for its shared pages.
                anonymous[pid] = shared[pid] = 0
    # Both sums contain the pages of mapped memory files.
    in_files = max(sum(shared.values()), sum(memory_files.values()) + shm_bytes)
    usage.total_memory = sum(anonymous.values()) + in_files
    usage.memory = {pid: anonymous[pid] + max(shared[pid], memory_files.get(pid, 0)) for pid in pids}
    return usage


def _find_living_thread(pid: int) -> int:
    """Return a thread through which /proc shows a process: the first one, or another if the first has ended.

    /proc has every thread by its id, although it lists only first threads.
    """
    with suppress(OSError, ValueError):
        if _is_zombie(pid):
            return next((tid for tid in map(int, os.listdir(f"/proc/{pid}/task")) if not _is_zombie(tid)), pid)
    return pid


def _is_zombie(thread: int) -> bool:
    with open(f"/proc/{thread}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"


def _has_ended(pid: int) -> bool:
    """Return whether all threads of a process have ended."""
    try:
        return read_process(pid)[2] in "ZX"
    except OSError:
        return True


def _read_status(pid: int) -> tuple[int, int, int]:
    """Return a process's number of threads, its bytes of private memory, and its bytes of shareable memory."""
    found = {"Threads": 0, "RssAnon": 0, "RssShmem": 0, "VmSwap": 0}
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0])
    return found["Threads"], (found["RssAnon"] + found["VmSwap"]) * 1024, found["RssShmem"] * 1024


def _read_shares(pid: int) -> tuple[int, int] | None:
    """Return the bytes of private and shareable memory; None if the kernel does not report them.

    A page that several processes share counts only with this process's part of it.
    """
    found = {"Pss_Anon": 0, "Pss_Shmem": 0, "SwapPss": 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.split()[0])
    except OSError:  # The process ended, or denies access.
        return None
    return (found["Pss_Anon"] + found["SwapPss"]) * 1024, found["Pss_Shmem"] * 1024


def _measure_open_files(threads: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return the bytes of deleted files that processes hold: files in memory by process, and files on disk in total.

    `threads` maps each process to the thread that /proc is read for.
    """
    memory: dict[int, int] = {}
    disk, seen = 0, set[tuple[int, int]]()
    for pid, thread in threads.items():
        with suppress(OSError):
            descriptors = [f"/proc/{thread}/fd/{name}" for name in os.listdir(f"/proc/{thread}/fd")]
            for path in (*descriptors, *_list_deleted_maps(thread)):
                with suppress(OSError):
                    target = os.readlink(path)
                    if not target.endswith(" (deleted)"):
                        continue
                    status = os.stat(path)
                    if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                        continue
                    seen.add((status.st_dev, status.st_ino))
                    size = status.st_blocks * BLOCK_BYTES
                    if target.startswith(MEMORY_FILES):
                        memory[pid] = memory.get(pid, 0) + size
                    else:
                        disk += size
    return memory, disk


def _list_deleted_maps(pid: int) -> list[str]:
    """Return the /proc paths of mapped deleted files, whose descriptors may be closed. Only root may read them."""
    if os.geteuid() != 0:
        return []
    with open(f"/proc/{pid}/maps", "rb") as file:
        ranges = [line.split()[0].decode() for line in file if line.endswith(b" (deleted)\n")]
    # `maps` pads addresses with zeros, `map_files` does not.
    return [f"/proc/{pid}/map_files/" + "-".join(f"{int(end, 16):x}" for end in part.split("-")) for part in ranges]


def measure_file_system(pid: int, path: str) -> int:
    """Return the bytes in use on a path's file system as that process sees it; 0 if unreadable."""
    with suppress(OSError):
        status = os.statvfs(Path("/proc", str(pid), "root", path))
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    return 0


def measure_folders(folders: Iterable[Path]) -> int:
    """Return the bytes on disk below these folders, each file once; `TOO_DEEP_BYTES` if a path is too long."""
    total, seen = 0, set[tuple[int, int]]()
    below = [str(folder) for folder in folders]
    while below:
        folder = below.pop()
        try:
            total += os.stat(folder).st_blocks * BLOCK_BYTES + INODE_BYTES  # The names in a directory take space too.
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            below.append(entry.path)
                            continue
                        status = entry.stat(follow_symlinks=False)
                        if status.st_nlink > 1:
                            if (status.st_dev, status.st_ino) in seen:
                                continue
                            seen.add((status.st_dev, status.st_ino))
                        total += status.st_blocks * BLOCK_BYTES + INODE_BYTES
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return TOO_DEEP_BYTES
            continue  # The folder was removed meanwhile, or is not readable.
    return total
