"""The confinement of local sandboxes: Landlock rules and a seccomp filter, which the driver applies to its children.

Sources: Linux's Documentation/userspace-api/landlock.rst and seccomp_filter.rst, and the kernel's system call tables.
Linux on x86_64 and aarch64.

What this does not hold: memory is limited per process and not in sum, and disk per file and not in sum. Below ABI 6 of
Landlock (Linux 6.12) code cannot signal the processes that it starts itself. Where there is no mount namespace, chmod
and its relatives do nothing but say that they did, unless the code runs as a user of its own; /dev/shm is closed, so
that multiprocessing's locks and pools do not work; and there are no sockets but socketpairs.
"""

import ctypes
import os
import platform
import struct
from dataclasses import dataclass
from typing import Any

# Landlock's rights (uapi/linux/landlock.h) and the ABI that each came with.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ = EXECUTE | READ_FILE | READ_DIR
LATEST_ABI = 6  # of those whose rights we set; a newer kernel serves it as well

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = (  # what the C library, ssl and Python read; not all of /etc, for it has keys and password hashes
    "/etc/alternatives", "/etc/ca-certificates", "/etc/debian_version", "/etc/fonts", "/etc/group", "/etc/hosts",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/magic", "/etc/mime.types",
    "/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd", "/etc/pki/tls/certs", "/etc/protocols", "/etc/python3",
    "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/timezone",
)  # fmt: skip
KERNEL = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/filesystems", "/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# name: number on x86_64, number on aarch64 (None: there is none)
CALLS: dict[str, tuple[int | None, int | None]] = {
    # Other processes, and the kernel itself
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # Namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # Changes of mode, owner, times and attributes, which Landlock does not govern
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    # Attributes that are read, and changes that are watched for, which it does not govern either
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "inotify_add_watch": (254, 27),
    # What stays in the kernel, and is shared with the host where there is no namespace for it
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # (also by an id that was not asked for: ids of the host's are small numbers)
    "shmctl": (31, 195), "shmdt": (67, 197), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_unlink": (241, 181),
    # Looked at more closely below
    "socket": (41, 198), "clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "truncate": (76, 45), "open": (2, None), "openat": (257, 56),
    "openat2": (437, 437), "fcntl": (72, 25), "socketpair": (53, 199), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
NAMES = list(CALLS)
DENIED_CALLS = NAMES[: NAMES.index("chmod")]
IGNORED_CALLS = NAMES[NAMES.index("chmod") : NAMES.index("setxattr")]
ATTRIBUTE_CHANGES = NAMES[NAMES.index("setxattr") : NAMES.index("getxattr")]
ATTRIBUTE_READS = NAMES[NAMES.index("getxattr") : NAMES.index("shmget")]
KERNEL_MEMORY_CALLS = NAMES[NAMES.index("shmget") : NAMES.index("socket")]
FIRST_UNKNOWN_CALL = 463  # that this list does not name; from 424 on they are the same everywhere

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_*
EPERM, ENOSYS, ENOTSUP = 1, 38, 95
NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET, TIME
TIOCSTI, FIOSETOWN, SIOCSPGRP = 0x5412, 0x8901, 0x8902
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY = 8, 10, 15, 1024, 1026
PRIO_USER, IOPRIO_USER = 2, 3
O_TRUNC, O_ACCMODE = 0o1000, 0o3
OWN_PID = 0x7E57A11D  # stands in the filter for the child's own process id, which the driver fills in
SOCK_STREAM = 1
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16


def probe_landlock_abi() -> int:
    """The version of Landlock that this kernel offers; 0 if none. Asked by the system call, for the lists can lie."""
    if not hasattr(os, "O_PATH"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(444, None, ctypes.c_size_t(0), 1)))


def find_architecture() -> str | None:
    """This machine's architecture if there is a filter for it."""
    name = platform.machine()
    return name if name in MACHINES and platform.system() == "Linux" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one sandbox's children are held to.

    `readable` are directories that may be read, `writable` those that may be changed. `network` leaves IP and path
    sockets, for a sandbox that has a network namespace of its own. `own_mounts` says that it sees its own files only,
    so that changing a mode can do no harm; `own_uid` that it runs as a user that owns nothing else. `abi` is
    Landlock's version.
    """

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    network: bool
    own_mounts: bool
    own_uid: bool
    abi: int

    def build_landlock_rules(self) -> dict[str, Any]:
        """The driver's settings for Landlock (sandbox/driver/confinement.py)."""
        abi = min(self.abi, LATEST_ABI)
        handled = (1 << 13) - 1
        handled |= (1 << 13 if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
        # Each attribute that a kernel knows lengthens the structure; it refuses a longer one than it knows.
        attributes: dict[str, int] = {"fs": handled}
        if abi >= 4:
            attributes["net"] = 0 if self.network else 3  # binding and connecting TCP
        if abi >= 6:
            attributes["scoped"] = 3  # abstract unix sockets and signals stay in the domain
        device = (READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV) & handled
        # What the host does not have is a directory that the sandbox alone has.
        files = {path for path in self.readable if os.path.exists(path) and not os.path.isdir(path)}
        rules = [(path, READ & ON_FILES if path in files else READ) for path in self.readable]
        rules += [(path, device) for path in DEVICES]
        rules += [(path, handled) for path in self.writable]
        return {**attributes, "attributes": list(attributes), "rules": rules}

    def build_seccomp_filter(self, arch: str) -> str:
        """The seccomp filter as hexadecimal BPF, for the driver."""
        column, audit = MACHINES[arch]
        program: list[tuple[int, int, int, int]] = []
        load, jump_equal, jump_ge, jump_set, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06

        def argument(index: int) -> int:
            return 16 + 8 * index  # the low half, on the little-endian machines that we serve

        def add(*instructions: tuple[int, int, int, int]) -> None:
            program.extend(instructions)

        def on(name: str, *instructions: tuple[int, int, int, int]) -> None:
            number = CALLS[name][column]
            if number is not None:  # the call's number is in the accumulator when this begins, and again after it
                add((jump_equal, 0, len(instructions), number), *instructions)

        def refuse(error: int) -> tuple[int, int, int, int]:
            return (give, 0, 0, ERRNO | error)

        allow = (give, 0, 0, ALLOW)
        add((load, 0, 0, 4), (jump_equal, 1, 0, audit), (give, 0, 0, KILL), (load, 0, 0, 0))
        if arch == "x86_64":
            add((jump_ge, 0, 1, 0x40000000), refuse(EPERM))  # the x32 numbers, which would go around the rest
        for name in DENIED_CALLS:
            on(name, refuse(EPERM))
        add((jump_ge, 0, 1, FIRST_UNKNOWN_CALL), refuse(ENOSYS))
        if not self.own_mounts:
            # Done, says the kernel: so shutil.copy2 works, and nothing has changed.
            for name in [*ATTRIBUTE_CHANGES, *([] if self.own_uid else IGNORED_CALLS)]:
                on(name, refuse(0))
            for name in ATTRIBUTE_READS:
                on(name, refuse(ENOTSUP))
            for name in KERNEL_MEMORY_CALLS:
                on(name, refuse(EPERM))
        on("clone3", refuse(ENOSYS))  # its flags are in memory, where no filter sees them; the C library falls back
        on("clone", (load, 0, 0, argument(0)), (jump_set, 0, 1, NEW_NAMESPACES), refuse(EPERM), allow)
        requests = (TIOCSTI, FIOSETOWN, SIOCSPGRP)
        wrong = [(jump_equal, len(requests) - i, 0, request) for i, request in enumerate(requests)]
        on("ioctl", (load, 0, 0, argument(1)), *wrong, allow, refuse(EPERM))
        commands = (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY)  # signals to whoever is named the owner
        wrong = [(jump_equal, len(commands) - i, 0, command) for i, command in enumerate(commands)]
        on("fcntl", (load, 0, 0, argument(1)), *wrong, allow, refuse(EPERM))
        own = [(jump_equal, 2, 0, OWN_PID), (jump_equal, 1, 0, 0)]
        for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr",
                     "migrate_pages", "move_pages"):  # fmt: skip
            on(name, (load, 0, 0, argument(0)), *own, refuse(EPERM), allow)
        for name, everyone in (("setpriority", PRIO_USER), ("ioprio_set", IOPRIO_USER)):
            whose = [(load, 0, 0, argument(0)), (jump_equal, 3, 0, everyone), (load, 0, 0, argument(1))]
            on(name, *whose, *own, refuse(EPERM), allow)
        families = (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK) if self.network else ()
        checks = [(jump_equal, len(families) - i, 0, family) for i, family in enumerate(families)]
        on("socket", (load, 0, 0, argument(0)), *checks, refuse(EPERM), *([allow] if families else []))
        # A pair of datagram sockets can also send to a path: to a server of the host's, where its files are seen.
        unix = [(load, 0, 0, argument(0)), (jump_equal, 0, 1 if self.own_mounts else 4, AF_UNIX)]
        stream = [(load, 0, 0, argument(1)), (mask, 0, 0, 0xF), (jump_equal, 0, 1, SOCK_STREAM)]
        on("socketpair", *unix, *([] if self.own_mounts else stream), allow, refuse(EPERM))
        if self.abi < 6:
            for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
                on(name, (load, 0, 0, argument(0)), *own, refuse(EPERM), allow)
            for name in ("tkill", "pidfd_send_signal"):
                on(name, refuse(EPERM))
        if self.abi < 3 and not self.own_mounts:
            on("truncate", refuse(EPERM))
        on("openat2", refuse(ENOSYS))  # its flags are in memory
        for name, flags in (("open", 1), ("openat", 2)):
            # Opening for reading with O_TRUNC empties a file, of which Landlock saw nothing before its ABI 3. Opening
            # for neither reading nor writing is no access to it at all, and gives what ioctl works on.
            first = (jump_equal, 3, 0, O_TRUNC if self.abi < 3 and not self.own_mounts else 3)
            check = [(mask, 0, 0, O_TRUNC | O_ACCMODE), first, (jump_equal, 2, 0, 3), (jump_equal, 1, 0, O_TRUNC | 3)]
            on(name, (load, 0, 0, argument(flags)), *check, allow, refuse(EPERM))
        add(allow)
        return b"".join(struct.pack("<HBBI", *instruction) for instruction in program).hex()
