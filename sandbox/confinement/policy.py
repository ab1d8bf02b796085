"""The confinement of local sandboxes: Landlock rules and a seccomp filter, which the driver applies to its children.

It supports Linux on x86_64 and aarch64. Sources: Linux's Documentation/userspace-api/landlock.rst and
seccomp_filter.rst. `system_calls` lists every call.

Limitations:
- Memory is limited per process and disk space per file, not in total.
- Below Landlock ABI 6 (Linux 6.12) code cannot signal processes that it starts, and a fork of prepared code cannot
  signal itself by its id.
- Without a mount namespace, chmod and similar calls have no effect but report success, also for a missing file, unless
  the code runs as its own user. Setting a path's times to now is refused. /dev/shm is closed, so multiprocessing's
  locks and pools do not work. Socketpairs are the only sockets.
"""

import ctypes
import os
import platform
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

from .system_calls import (
    ABSENT_CALLS,
    ADDRESS_CALLS,
    ATTRIBUTE_CHANGES,
    ATTRIBUTE_READS,
    CALLS,
    DENIED_CALLS,
    FIRST_UNKNOWN_CALL,
    GAPS,
    IGNORED_CALLS,
    KERNEL_MEMORY_CALLS,
)

Instruction = tuple[int, int, int, int]  # operation, skipped instructions if true, and if false, operand
Answer = tuple[Instruction, ...]  # instructions; every path through them ends with a return

# Landlock's rights (uapi/linux/landlock.h).
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ = EXECUTE | READ_FILE | READ_DIR
LATEST_ABI = 6  # newest ABI whose rights we set; newer kernels accept it, too

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = (  # files that the C library, ssl and Python read; all of /etc would include keys and password hashes
    "/etc/alternatives", "/etc/ca-certificates", "/etc/debian_version", "/etc/fonts", "/etc/group", "/etc/hosts",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/magic", "/etc/mime.types",
    "/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd", "/etc/pki/tls/certs", "/etc/protocols", "/etc/python3",
    "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/timezone",
)  # fmt: skip
KERNEL = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/filesystems", "/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in `system_calls`, AUDIT_ARCH_*
KILL, ERRNO = 0x80000000, 0x00050000  # SECCOMP_RET_*
JUMP, JUMP_GE = 0x05, 0x35
LOAD, JUMP_EQUAL, JUMP_SET, MASK, RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
FIRST_X32_CALL = 0x40000000  # first number of the x32 call table, which would bypass the rules for the main table
ALLOWED: Instruction = (RETURN, 0, 0, 0x7FFF0000)
EPERM, EACCES, ENOTTY, ENOSYS, ENOTSUP = 1, 13, 25, 38, 95
FARTHEST = 255  # instructions that a comparison can skip
NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET, TIME
CLONE_PARENT = 0x8000
# The second byte of an ioctl request is 0x54 for terminals and descriptors, and 0x89 for sockets.
TERMINAL, SOCKET = 0x5400, 0x8900
TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, FIOSETOWN, SIOCSPGRP = 0x5412, 0x541C, 0x541D, 0x5423, 0x8901, 0x8902
FICLONE, FICLONERANGE = 0x40049409, 0x4020940D
FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_FIEMAP = 0x80086601, 0x801C581F, 0xC020660B
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY = 8, 10, 15, 1024, 1026
# Indexes of the path argument and the times argument.
TIME_CALLS = {"utime": (0, 1), "utimes": (0, 1), "futimesat": (1, 2), "utimensat": (1, 2)}
PRIO_USER, IOPRIO_USER = 2, 3
O_TRUNC, O_ACCMODE = 0o1000, 0o3
OWN_PID = 0x7E57A11D  # placeholder in the filter; the driver replaces it by the child's process id
ANY_PERSONALITY = 0xFFFFFFFF  # argument that queries the personality
RLIMIT_RSS = 5
SOCK_STREAM, SOCK_DGRAM = 1, 2
IPPROTO_TCP, IPPROTO_UDP = 6, 17
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16


def probe_landlock_abi() -> int:
    """Return the kernel's Landlock version, or 0. Only the system call reports it reliably."""
    if not hasattr(os, "O_PATH"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(444, None, ctypes.c_size_t(0), 1)))


def find_architecture() -> str | None:
    """Return this machine's architecture, or None if system calls cannot be filtered on it."""
    name = platform.machine()
    return name if name in MACHINES and platform.system() == "Linux" else None


@cache  # every sandbox asks for the same 30 or so system paths
def _is_file(path: str) -> bool:
    return os.path.exists(path) and not os.path.isdir(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The restrictions on the child processes of one sandbox.

    Args:
        readable: Paths that code may read.
        writable: Directories that code may change.
        network: Allow IP and path sockets, because the sandbox has its own network namespace.
        own_mounts: The sandbox sees only its own files, so changing their modes is harmless.
        own_uid: The sandbox runs as a user that owns nothing else.
        abi: Landlock's version.
        unix_sockets: Allow unix sockets other than socketpairs. If code sees a directory of the host, set it to False:
            a server may create a socket there at any time, and a read-only mount does not prevent connecting.
    """

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    network: bool
    own_mounts: bool
    own_uid: bool
    abi: int
    unix_sockets: bool = True

    def build_landlock_rules(self) -> dict[str, Any]:
        """Return the driver's settings for Landlock (sandbox/driver/confinement.py)."""
        abi = min(self.abi, LATEST_ABI)
        handled = (1 << 13) - 1
        handled |= (1 << 13 if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
        # Newer kernels add attributes to the structure, and a kernel refuses attributes that it does not know.
        attributes: dict[str, int] = {"fs": handled}
        if abi >= 4:
            attributes["net"] = 0 if self.network else 3  # TCP bind and connect
        if abi >= 6:
            attributes["scoped"] = 3  # abstract unix sockets and signals are limited to the domain
        device = (READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV) & handled
        # A readable path that the host lacks is a directory that exists only in the sandbox.
        rules = [(path, READ & ON_FILES if _is_file(path) else READ) for path in self.readable]
        rules += [(path, device) for path in DEVICES]
        rules += [(path, handled) for path in self.writable]
        return {**attributes, "attributes": list(attributes), "rules": rules}

    def build_seccomp_filter(self, arch: str) -> str:
        """Return the seccomp filter as hexadecimal BPF, for the driver."""
        column, audit = MACHINES[arch]
        answers = self._build_answers(column)
        unknown: Answer = (_refuse(ENOSYS),)
        ranges: list[tuple[int, Answer]] = []
        for number in range(FIRST_UNKNOWN_CALL):
            answer = answers.get(number, unknown if number in range(*GAPS[column]) else (ALLOWED,))
            if not ranges or ranges[-1][1] != answer:
                ranges.append((number, answer))
        ranges.append((FIRST_UNKNOWN_CALL, unknown))
        if arch == "x86_64":
            ranges.append((FIRST_X32_CALL, (_refuse(EPERM),)))
        program: list[Instruction] = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
        program += build_search(ranges)
        return b"".join(struct.pack("<HBBI", *instruction) for instruction in program).hex()

    def _build_answers(self, column: int) -> dict[int, Answer]:
        """Return the answers to refused and inspected calls, by call number in the given column."""
        answers: dict[int, Answer] = {}
        load, jump_equal, argument, refuse, allow = LOAD, JUMP_EQUAL, _locate_argument, _refuse, ALLOWED

        def on(name: str, *instructions: Instruction) -> None:
            number = CALLS[name][column]
            if number is not None:
                answers[number] = instructions

        for name in DENIED_CALLS:
            on(name, refuse(EPERM))
        for name in ABSENT_CALLS:
            on(name, refuse(ENOSYS))
        if not self.own_mounts:
            # Report success without a change, so that shutil.copy2 works.
            for name in ATTRIBUTE_CHANGES if self.own_uid else {**ATTRIBUTE_CHANGES, **IGNORED_CALLS}:
                on(name, *(_build_time_checks(*TIME_CALLS[name]) if name in TIME_CALLS else [refuse(0)]))
            for name in ATTRIBUTE_READS:
                on(name, refuse(ENOTSUP))
            for name in KERNEL_MEMORY_CALLS:
                on(name, refuse(EPERM))
        # CLONE_PARENT would make the new process a child of the supervisor.
        on("clone", (load, 0, 0, argument(0)), (JUMP_SET, 0, 1, NEW_NAMESPACES | CLONE_PARENT), refuse(EPERM), allow)
        on("ioctl", *_build_ioctl_checks(self.network))
        commands = (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY)  # these can send signals to other processes
        wrong = [(jump_equal, len(commands) - i, 0, command) for i, command in enumerate(commands)]
        on("fcntl", (load, 0, 0, argument(1)), *wrong, allow, refuse(EPERM))
        own = [(jump_equal, 2, 0, OWN_PID), (jump_equal, 1, 0, 0)]
        # RLIMIT_RSS marks a sandbox's processes (blocks/local/inventory.py), so code may read it but not set it.
        given = [(load, 0, 0, argument(2)), (jump_equal, 0, 2, 0), (load, 0, 0, argument(2) + 4), (jump_equal, 1, 0, 0)]
        marked = [(load, 0, 0, argument(1)), (jump_equal, 0, 5, RLIMIT_RSS), *given, refuse(EPERM)]
        on("prlimit64", *marked, (load, 0, 0, argument(0)), *own, refuse(EPERM), allow)
        on("setrlimit", (load, 0, 0, argument(0)), (jump_equal, 0, 1, RLIMIT_RSS), refuse(EPERM), allow)
        asked = [(load, 0, 0, argument(0)), (jump_equal, 2, 0, 0), (jump_equal, 1, 0, ANY_PERSONALITY)]
        on("personality", *asked, refuse(EPERM), allow)
        for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr",
                     "migrate_pages", "move_pages"):  # fmt: skip
            on(name, (load, 0, 0, argument(0)), *own, refuse(EPERM), allow)
        for name, everyone in (("setpriority", PRIO_USER), ("ioprio_set", IOPRIO_USER)):
            whose = [(load, 0, 0, argument(0)), (jump_equal, 3, 0, everyone), (load, 0, 0, argument(1))]
            on(name, *whose, *own, refuse(EPERM), allow)
        on("socket", *(_build_socket_checks(self.unix_sockets) if self.network else [refuse(EPERM)]))
        for name in () if self.network else ADDRESS_CALLS:
            on(name, refuse(EPERM))
        # A datagram socketpair can also send to a socket path, and so to a server of the host if code sees its files.
        is_safe = self.own_mounts and self.unix_sockets
        unix = [(load, 0, 0, argument(0)), (jump_equal, 0, 1 if is_safe else 4, AF_UNIX)]
        stream = [(load, 0, 0, argument(1)), (MASK, 0, 0, 0xF), (jump_equal, 0, 1, SOCK_STREAM)]
        on("socketpair", *unix, *([] if is_safe else stream), allow, refuse(EPERM))
        if self.abi < 6:
            for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
                on(name, (load, 0, 0, argument(0)), *own, refuse(EPERM), allow)
            for name in ("tkill", "pidfd_send_signal"):
                on(name, refuse(EPERM))
        if self.abi < 3 and not self.own_mounts:
            on("truncate", refuse(EPERM))
        for name, flags in (("open", 1), ("openat", 2)):
            on(name, *self._build_open_checks(flags))
        return answers

    def _build_open_checks(self, flags: int) -> list[Instruction]:
        """Return checks of the flags in that argument.

        O_TRUNC empties a file even if it is opened for reading. Landlock before ABI 3 does not check truncation. Access
        mode 3 (neither reading nor writing) needs no Landlock right, but its descriptor accepts ioctl.
        """
        first = O_TRUNC if self.abi < 3 and not self.own_mounts else 3
        return [
            (LOAD, 0, 0, _locate_argument(flags)), (MASK, 0, 0, O_TRUNC | O_ACCMODE), (JUMP_EQUAL, 3, 0, first),
            (JUMP_EQUAL, 2, 0, 3), (JUMP_EQUAL, 1, 0, O_TRUNC | 3), ALLOWED, _refuse(EPERM),
        ]  # fmt: skip


def _locate_argument(index: int) -> int:
    return 16 + 8 * index


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


def _build_time_checks(path: int, times: int) -> list[Instruction]:
    """Return checks that report success for changed times, but refuse to set a path's times to now.

    Python's `Path.touch` sets the times to now to test if a file exists, and creates the file only after an error.
    """
    path_at, times_at = _locate_argument(path), _locate_argument(times)
    return [
        (LOAD, 0, 0, times_at), (JUMP_EQUAL, 0, 7, 0), (LOAD, 0, 0, times_at + 4), (JUMP_EQUAL, 0, 5, 0),
        (LOAD, 0, 0, path_at), (JUMP_EQUAL, 0, 2, 0), (LOAD, 0, 0, path_at + 4), (JUMP_EQUAL, 1, 0, 0),
        _refuse(EACCES), _refuse(0),
    ]  # fmt: skip


def _build_ioctl_checks(network: bool) -> list[Instruction]:
    """Return checks that allow only known ioctl requests.

    Landlock does not govern ioctl requests to files. In some file systems these requests change a file that was opened
    for reading, or create and delete snapshots below a directory that was opened for reading.
    """
    wrong = (TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, FIOSETOWN, SIOCSPGRP)
    known = (FICLONE, FICLONERANGE, FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_FIEMAP)
    checks = [*wrong, *known, None, TERMINAL, *((SOCKET,) if network else ())]
    instructions = [
        (MASK, 0, 0, 0xFF00) if value is None else (JUMP_EQUAL, len(checks) - i + (i < len(wrong)), 0, value)
        for i, value in enumerate(checks)
    ]
    return [(LOAD, 0, 0, _locate_argument(1)), *instructions, _refuse(ENOTTY), ALLOWED, _refuse(EPERM)]


def _build_socket_checks(unix_sockets: bool) -> list[Instruction]:
    """Return checks that allow TCP, UDP, optionally unix sockets, and netlink for the C library's address queries."""
    protocol = (LOAD, 0, 0, _locate_argument(2))
    return [
        (LOAD, 0, 0, _locate_argument(0)),
        (JUMP_EQUAL, 13 if unix_sockets else 12, 0, AF_UNIX), (JUMP_EQUAL, 2, 0, AF_INET), (JUMP_EQUAL, 1, 0, AF_INET6),
        (JUMP_EQUAL, 7, 9, AF_NETLINK),
        (LOAD, 0, 0, _locate_argument(1)), (MASK, 0, 0, 0xF), (JUMP_EQUAL, 1, 0, SOCK_STREAM),
        (JUMP_EQUAL, 0, 5, SOCK_DGRAM),
        protocol, (JUMP_EQUAL, 4, 0, IPPROTO_TCP), (JUMP_EQUAL, 3, 0, IPPROTO_UDP),
        protocol, (JUMP_EQUAL, 1, 0, 0),
        _refuse(EPERM), ALLOWED,
    ]  # fmt: skip


def build_search(ranges: list[tuple[int, Answer]]) -> list[Instruction]:
    """Return a program that executes the answer of the range that contains the number in the accumulator.

    The program is a binary search, because each execution has a new filter. The kernel runs a new filter once for every
    call number (seccomp_cache_prepare_bitmap in kernel/seccomp.c). This takes 0.1 ms; a linear search takes 0.2 ms.

    `ranges` are pairs of a first number and an answer, in ascending order. A range ends where the next one begins.
    """
    if len(ranges) == 1:
        return list(ranges[0][1])
    middle = len(ranges) // 2
    lower, upper = build_search(ranges[:middle]), build_search(ranges[middle:])
    first = ranges[middle][0]
    if len(lower) <= FARTHEST:
        return [(JUMP_GE, len(lower), 0, first), *lower, *upper]
    return [(JUMP_GE, 0, 1, first), (JUMP, 0, 0, len(lower)), *lower, *upper]
