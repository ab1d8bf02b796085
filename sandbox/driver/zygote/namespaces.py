"""Namespaces of a sandbox, for a process that a zygote in bubblewrap forked for it.

The process begins with the zygote's capabilities in the zygote's user namespace. Entering its own user namespace, the
last step, drops them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from ctypes import c_ulong, get_errno

from ...wire.python_directory import write_python_directory
from ..confinement import LIBC, set_capabilities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MNT_DETACH = 2
SIOCSIFFLAGS, IFF_UP, IFNAME_BYTES, IFREQ_BYTES = 0x8914, 1, 16, 40
SUPERVISOR_CAPABILITIES = (1 << 5) | (1 << 6) | (1 << 7)  # CAP_KILL, CAP_SETGID, CAP_SETUID: to switch code's user
BYTES_PER_INODE = 4096  # memory that a file counts for at least


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError with the function's name and its texts."""
    if getattr(LIBC, name)(*arguments) < 0:
        number = get_errno()
        words = [name, *(argument.decode() for argument in arguments if isinstance(argument, bytes))]
        raise OSError(number, f"{' '.join(words)}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _call("mount", *words[:3], c_ulong(flags), words[3])


def fork_into_pid_namespace(own_namespace: int) -> int:
    """Fork a child that is the first process of a new process namespace. `own_namespace` is that of the caller."""
    pid = -1
    _call("unshare", CLONE_NEWPID)
    try:
        pid = os.fork()
    finally:
        is_child = pid == 0
        if not is_child:  # The caller must return to its own namespace before it can make another one.
            _call("setns", own_namespace, CLONE_NEWPID)
    return pid


def enter_namespaces() -> None:
    """Put the calling process into new namespaces of all other kinds. Raises OSError.

    It must be the first process of a new process namespace.
    """
    _call("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    # Start the loopback interface: struct ifreq has the interface's name and flags.
    request = b"lo".ljust(IFNAME_BYTES, b"\0") + bytes([IFF_UP, 0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request.ljust(IFREQ_BYTES, b"\0"))


def fill_python_mount(python_directory: dict[str, Any]) -> None:
    """Write the Python of all sandboxes on the zygote's tmpfs at /python, and make it read-only. Raises OSError."""
    write_python_directory("/python", **python_directory)
    _mount("none", "/python", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def take_folder(folders: str, request: dict[str, Any]) -> None:
    """Mount the sandbox's own folder for the calling process, and hide the other sandboxes' folders. Raises OSError.

    `folders` is the directory with the folders of all sandboxes. The request has ``folder`` (the sandbox's name in it),
    ``covered`` (mounts that the folder's mounts would hide), ``shm_bytes`` and ``disk_bytes`` (the size of a file
    system in memory that replaces the folder, or 0). /proc/self must be open to the process.
    """
    covered = [(os.open(path, os.O_PATH | os.O_CLOEXEC), path) for path in request["covered"]]
    folder, disk_bytes = f"{folders}/{request['folder']}", request["disk_bytes"]
    if disk_bytes:
        inodes = max(disk_bytes // BYTES_PER_INODE, 16)
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={disk_bytes},nr_inodes={inodes}")
    for name, target in (("work", "/sandbox"), ("tmp", "/tmp")):
        if disk_bytes:
            os.mkdir(f"{folder}/{name}")
            os.chmod(f"{folder}/{name}", 0o755)
        _mount(f"{folder}/{name}", target, None, MS_BIND)
    for fd, path in covered:
        _mount_again(fd, path)
        os.close(fd)
    _call("umount2", os.fsencode(folders), MNT_DETACH)
    _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={request['shm_bytes']}")


def _mount_again(fd: int, path: str) -> None:
    """Mount a covered mount again at its path, which is below /sandbox or /tmp. `fd` has it open."""
    names = path.split("/")
    for count in range(3, len(names)):  # the path's parent directories below /sandbox or /tmp
        parent = "/".join(names[:count])
        os.makedirs(parent, mode=0o755, exist_ok=True)
        _mount(parent, parent, None, MS_BIND)  # a mount point cannot be renamed
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(path, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    _mount(f"/proc/self/fd/{fd}", path, None, MS_BIND | MS_REC)


def enter_user_namespace(user: tuple[int, int] | None) -> None:
    """Put the calling process into a new user namespace with these ids, and drop its capabilities. Raises OSError.

    In the new namespace the process limit counts only this sandbox's processes. A process of root passes None: it stays
    in its namespace, and keeps the capabilities to switch the code's user. /proc/self must be open to the process.
    """
    if user is None:
        set_capabilities(SUPERVISOR_CAPABILITIES)
        return
    _call("unshare", CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user[0]} 0 1"), ("gid_map", f"{user[1]} 0 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    set_capabilities(0)


def join_user_namespace(fd: int) -> None:
    """Put the calling process into the user namespace that `fd` has open. It loses all capabilities. Raises OSError."""
    _call("setns", fd, CLONE_NEWUSER)
    set_capabilities(0)
