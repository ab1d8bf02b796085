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
from collections.abc import Sequence
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
Answer = tuple[Instruction, ...]  # the part of the filter for one call

# Landlock's rights (uapi/linux/landlock.h).
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
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
AUDIT_ARCH_AT, CALL_NUMBER_AT, ARGUMENTS_AT = 4, 0, 16  # offsets in struct seccomp_data
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
SOCK_STREAM, SOCK_DGRAM, SOCKET_TYPE = 1, 2, 0xF  # The mask SOCKET_TYPE removes flags such as SOCK_CLOEXEC.
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
        handled = (1 << 13) - 1  # the rights of ABI 1
        if abi >= 2:
            handled |= REFER
        if abi >= 3:
            handled |= TRUNCATE
        if abi >= 5:
            handled |= IOCTL_DEV
        # Newer kernels add attributes to the structure, and a kernel refuses attributes that it does not know.
        attributes: dict[str, int] = {"fs": handled}
        if abi >= 4:
            attributes["net"] = 0 if self.network else 3  # TCP bind and connect
        if abi >= 6:
            attributes["scoped"] = 3  # abstract unix sockets and signals are limited to the domain
        device = (READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV) & handled
        # A readable path that the host lacks is a directory that exists only in the sandbox.
        files = [path for path in self.readable if _is_file(path)]
        directories = [path for path in self.readable if not _is_file(path)]
        rules = [(path, READ & ON_FILES) for path in files]
        rules += [(path, READ) for path in directories]
        rules += [(path, device) for path in DEVICES]
        rules += [(path, handled) for path in self.writable]
        return {**attributes, "attributes": list(attributes), "rules": rules}

    def build_seccomp_filter(self, arch: str) -> str:
        """Return the seccomp filter as hexadecimal BPF, for the driver."""
        column, audit = MACHINES[arch]
        allowed: Answer = (ALLOWED,)
        unknown: Answer = (_refuse(ENOSYS),)
        answers: dict[int, Answer] = dict.fromkeys(range(FIRST_UNKNOWN_CALL), allowed)
        answers |= dict.fromkeys(range(*GAPS[column]), unknown)
        for name, answer in self._build_answers().items():
            number = CALLS[name][column]
            if number is not None:
                answers[number] = answer
        ranges: list[tuple[int, Answer]] = []
        for number, answer in answers.items():
            if not ranges or ranges[-1][1] != answer:
                ranges.append((number, answer))
        ranges.append((FIRST_UNKNOWN_CALL, unknown))
        if arch == "x86_64":
            ranges.append((FIRST_X32_CALL, (_refuse(EPERM),)))
        program: list[Instruction] = [
            (LOAD, 0, 0, AUDIT_ARCH_AT), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, CALL_NUMBER_AT),
        ]  # fmt: skip
        program += build_search(ranges)
        return b"".join(struct.pack("<HBBI", *instruction) for instruction in program).hex()

    def _build_answers(self) -> dict[str, Answer]:
        """Return the answers to refused and inspected calls, by the call's name."""
        eperm = _refuse(EPERM)
        answers: dict[str, Answer] = dict.fromkeys(DENIED_CALLS, (eperm,))
        answers |= dict.fromkeys(ABSENT_CALLS, (_refuse(ENOSYS),))
        if not self.own_mounts:
            answers |= dict.fromkeys(ATTRIBUTE_READS, (_refuse(ENOTSUP),))
            answers |= dict.fromkeys(KERNEL_MEMORY_CALLS, (eperm,))
            # Report success without a change, so that shutil.copy2 works.
            answers |= dict.fromkeys(ATTRIBUTE_CHANGES, (_refuse(0),))
            if not self.own_uid:
                answers |= dict.fromkeys(IGNORED_CALLS, (_refuse(0),))
                answers |= {name: _check_times(*arguments) for name, arguments in TIME_CALLS.items()}
        if not self.network:
            answers |= dict.fromkeys(ADDRESS_CALLS, (eperm,))
        answers["socket"] = self._check_socket()
        answers["socketpair"] = self._check_socketpair()
        answers["ioctl"] = self._check_ioctl()
        answers["open"] = self._check_open(flags=1)
        answers["openat"] = self._check_open(flags=2)
        if self.abi < 3 and not self.own_mounts:
            answers["truncate"] = (eperm,)
        # CLONE_PARENT would make the new process a child of the supervisor.
        answers["clone"] = (_load(0), (JUMP_SET, 0, 1, NEW_NAMESPACES | CLONE_PARENT), eperm, ALLOWED)
        # These commands can send signals to other processes.
        answers["fcntl"] = (*_when(1, (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY), eperm), ALLOWED)
        answers["personality"] = (*_when(0, (0, ANY_PERSONALITY), ALLOWED), eperm)
        answers |= _check_processes()
        if self.abi < 6:
            answers |= dict.fromkeys(("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), _allow_own_process(0))
            answers |= dict.fromkeys(("tkill", "pidfd_send_signal"), (eperm,))
        return answers

    def _check_open(self, flags: int) -> Answer:
        """Return checks of the flags, which are the argument with that index.

        O_TRUNC empties a file even if it is opened for reading. Landlock before ABI 3 does not check truncation. Access
        mode 3 (neither reading nor writing) needs no Landlock right, but its descriptor accepts ioctl.
        """
        refused = [3, O_TRUNC | 3]
        if self.abi < 3 and not self.own_mounts:
            refused.append(O_TRUNC)
        return (*_when(flags, refused, _refuse(EPERM), mask=O_TRUNC | O_ACCMODE), ALLOWED)

    def _check_ioctl(self) -> Answer:
        """Return checks that allow only known ioctl requests.

        Landlock does not govern ioctl requests to files. In some file systems these requests change a file that was
        opened for reading, or create and delete snapshots below a directory that was opened for reading.
        """
        refused = (TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, FIOSETOWN, SIOCSPGRP)
        allowed = (FICLONE, FICLONERANGE, FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_FIEMAP)
        allowed_kinds = (TERMINAL, SOCKET) if self.network else (TERMINAL,)
        return (
            *_when(1, refused, _refuse(EPERM)),
            *_when(1, allowed, ALLOWED),
            *_when(1, allowed_kinds, ALLOWED, mask=0xFF00),
            _refuse(ENOTTY),
        )

    def _check_socket(self) -> Answer:
        """Return checks that allow TCP, UDP, optionally unix sockets, and netlink for the C library's queries."""
        if not self.network:
            return (_refuse(EPERM),)
        unix = _when(0, (AF_UNIX,), ALLOWED) if self.unix_sockets else ()
        tcp_or_udp = _when(2, (0, IPPROTO_TCP, IPPROTO_UDP), ALLOWED)
        internet = _when(1, (SOCK_STREAM, SOCK_DGRAM), *tcp_or_udp, mask=SOCKET_TYPE)
        netlink = _when(2, (0,), ALLOWED)
        return (
            *unix,
            *_when(0, (AF_INET, AF_INET6), *internet),
            *_when(0, (AF_NETLINK,), *netlink),
            _refuse(EPERM),
        )

    def _check_socketpair(self) -> Answer:
        """Return checks that allow only unix sockets.

        A datagram socket of a pair can also send to a path, and so to a server of the host if code sees its files.
        """
        allowed: Answer = (ALLOWED,)
        if not self.own_mounts or not self.unix_sockets:
            allowed = _when(1, (SOCK_STREAM,), ALLOWED, mask=SOCKET_TYPE)
        return (*_when(0, (AF_UNIX,), *allowed), _refuse(EPERM))


def _check_processes() -> dict[str, Answer]:
    """Return checks of calls that change a process: they allow only the caller's own."""
    eperm = _refuse(EPERM)
    answers: dict[str, Answer] = dict.fromkeys(
        ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "migrate_pages", "move_pages"),
        _allow_own_process(0),
    )
    for name, of_user in (("setpriority", PRIO_USER), ("ioprio_set", IOPRIO_USER)):
        answers[name] = (*_when(0, (of_user,), eperm), *_allow_own_process(1))
    # RLIMIT_RSS marks a sandbox's processes (blocks/local/inventory.py), so code may read it but not set it.
    read_mark = _when_null(2, *_allow_own_process(0))
    answers["prlimit64"] = (*_when(1, (RLIMIT_RSS,), *read_mark, eperm), *_allow_own_process(0))
    answers["setrlimit"] = (*_when(0, (RLIMIT_RSS,), eperm), ALLOWED)
    return answers


def _check_times(path: int, times: int) -> Answer:
    """Return checks that report success for changed times, but refuse to set a path's times to now.

    Python's `Path.touch` sets the times to now to test if a file exists, and creates the file only after an error.

    Args:
        path: Index of the path argument. Null means an open file.
        times: Index of the argument with the times. Null means now.
    """
    return (*_when_null(times, *_when_null(path, _refuse(0)), _refuse(EACCES)), _refuse(0))


def _allow_own_process(index: int) -> Answer:
    """Return checks that allow a call only if the argument is the caller's process id, or 0."""
    return (*_when(index, (OWN_PID, 0), ALLOWED), _refuse(EPERM))


def _when(index: int, values: Sequence[int], *block: Instruction, mask: int | None = None) -> Answer:
    """Return instructions that run the block if the argument has one of the values, and otherwise skip it."""
    masking: Answer = () if mask is None else ((MASK, 0, 0, mask),)
    *others, last = values
    # A match skips the later comparisons: as many as there are values after it.
    comparisons = [(JUMP_EQUAL, len(others) - i, 0, value) for i, value in enumerate(others)]
    return (_load(index), *masking, *comparisons, (JUMP_EQUAL, 0, len(block), last), *block)


def _when_null(index: int, *block: Instruction) -> Answer:
    """Return instructions that run the block if all 64 bits of the argument are 0, and otherwise skip it."""
    return (
        _load(index), (JUMP_EQUAL, 0, len(block) + 2, 0), _load(index, upper=True), (JUMP_EQUAL, 0, len(block), 0),
        *block,
    )  # fmt: skip


def _load(index: int, *, upper: bool = False) -> Instruction:
    """Return the instruction that loads the lower or the upper 32 bits of an argument."""
    return (LOAD, 0, 0, ARGUMENTS_AT + 8 * index + 4 * upper)


def _refuse(error: int) -> Instruction:
    """Return the instruction that fails the call with an error number. The number 0 reports success."""
    return (RETURN, 0, 0, ERRNO | error)


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
