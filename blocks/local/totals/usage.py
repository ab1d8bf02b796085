"""What processes and folders hold, as a process of the same user, or of root, can see it."""

import errno
import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....sandbox.wire.process_table import read_process

BLOCK_BYTES = 512  # of `st_blocks`
INODE_BYTES = 512  # that a file takes although nothing is in it, at most
TOO_DEEP_BYTES = 1 << 62  # beyond every limit: what cannot be reached by a path cannot be summed
MEMORY_FILES = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")


@dataclass
class Usage:
    """What some processes hold together, in bytes, and by the process; `tasks` are their processes and threads."""

    tasks: dict[int, int] = field(default_factory=dict[int, int])
    memory: dict[int, int] = field(default_factory=dict[int, int])
    total_memory: int = 0
    deleted_files: int = 0


def measure_processes(pids: Collection[int], shm_bytes: int, enough: int) -> Usage:
    """What these processes hold; `shm_bytes` is what is in their /dev/shm.

    Below `enough` bytes of memory it may be an overestimate: pages that processes share are told apart only where that
    decides something, as the kernel walks all their pages for it.
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
            elif _has_ended(pid):  # what it shared is counted with those that have it still
                anonymous[pid] = shared[pid] = 0
    # The pages of a memory file that is mapped are in both.
    in_files = max(sum(shared.values()), sum(memory_files.values()) + shm_bytes)
    usage.total_memory = sum(anonymous.values()) + in_files
    usage.memory = {pid: anonymous[pid] + max(shared[pid], memory_files.get(pid, 0)) for pid in pids}
    return usage


def _find_living_thread(pid: int) -> int:
    """A thread of a process by which the kernel tells of it: the first one, or if that has ended another.

    /proc has each thread by its own number too, although it lists only the first ones.
    """
    with suppress(OSError, ValueError):
        if _is_zombie(pid):
            return next((tid for tid in map(int, os.listdir(f"/proc/{pid}/task")) if not _is_zombie(tid)), pid)
    return pid


def _is_zombie(thread: int) -> bool:
    with open(f"/proc/{thread}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"


def _has_ended(pid: int) -> bool:
    """Whether all of a process has: one of its threads may have, and others go on."""
    try:
        return read_process(pid)[2] in "ZX"
    except OSError:
        return True


def _read_status(pid: int) -> tuple[int, int, int]:
    """The threads of a process, its bytes of memory of its own, and those of memory that may be shared."""
    found = {"Threads": 0, "RssAnon": 0, "RssShmem": 0, "VmSwap": 0}
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0])
    return found["Threads"], (found["RssAnon"] + found["VmSwap"]) * 1024, found["RssShmem"] * 1024


def _read_shares(pid: int) -> tuple[int, int] | None:
    """As the last two of `_read_status`, with a process's share of pages that it has in common with others."""
    found = {"Pss_Anon": 0, "Pss_Shmem": 0, "SwapPss": 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.split()[0])
    except OSError:  # it has ended, or closed itself to others
        return None
    return (found["Pss_Anon"] + found["SwapPss"]) * 1024, found["Pss_Shmem"] * 1024


def _measure_open_files(threads: dict[int, int]) -> tuple[dict[int, int], int]:
    """Bytes of the files that have no name any more and are held: those in memory, by a process, and on disk.

    `threads` are the processes, and by which of its threads each is looked at.
    """
    memory: dict[int, int] = {}
    disk, seen = 0, set[tuple[int, int]]()
    for pid, thread in threads.items():
        with suppress(OSError):
            for path in (*_list_descriptors(thread), *_list_deleted_maps(thread)):
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


def _list_descriptors(pid: int) -> list[str]:
    return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]


def _list_deleted_maps(pid: int) -> list[str]:
    """What is mapped of files without a name; a process may have closed their descriptors. Only root may look."""
    if os.geteuid() != 0:
        return []
    with open(f"/proc/{pid}/maps", "rb") as file:
        ranges = [line.split()[0].decode() for line in file if line.endswith(b" (deleted)\n")]
    # The one has leading zeros where the other has none.
    return [f"/proc/{pid}/map_files/" + "-".join(f"{int(end, 16):x}" for end in part.split("-")) for part in ranges]


def measure_file_system(pid: int, path: str) -> int:
    """Bytes in use on the file system that a path is on for that process; 0 where it cannot be seen."""
    with suppress(OSError):
        status = os.statvfs(Path("/proc", str(pid), "root", path))
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    return 0


def measure_folders(folders: Iterable[Path]) -> int:
    """Bytes on disk of all that is below these folders, each file once; `TOO_DEEP_BYTES` where a path is too long."""
    total, seen = 0, set[tuple[int, int]]()
    below = [str(folder) for folder in folders]
    while below:
        folder = below.pop()
        try:
            total += os.stat(folder).st_blocks * BLOCK_BYTES + INODE_BYTES  # the names in it take space too
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
            continue  # removed meanwhile, or closed to us
    return total
