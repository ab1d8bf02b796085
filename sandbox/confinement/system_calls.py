"""The system calls that the filter refuses or inspects, with the reasons.

The list was reviewed against the tables of Linux 6.18 (arch/x86/entry/syscalls/syscall_64.tbl, scripts/syscall.tbl) up
to `FIRST_UNKNOWN_CALL`. The filter reports that later numbers, and numbers in the tables' gaps, do not exist. All other
calls are allowed: tests/sandbox/confinement/allowed_calls.txt has the reasons, and a test compares both with the
kernel's table. Each call has its number on x86_64 and on aarch64, or None if it does not exist there. A sandbox
"without a namespace" sees the host's files (landlock).
"""

Numbers = dict[str, tuple[int | None, int | None]]

FIRST_UNKNOWN_CALL = 463  # numbers from 424 on are the same on all architectures
GAPS = ((337, 424), (295, 424))  # unused numbers (first, end) by architecture

# ------------------------------------------------------------------------------------------------- refused everywhere

DENIED_CALLS: Numbers = {
    # Other processes: their memory, their descriptors, their state
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "get_robust_list": (274, 100),
    # Programs in the kernel, its counters, and calls that bypass every other filter
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # Keys, which belong to the user, not to the sandbox
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # The kernel itself: its code, its log, its clock, its name, its ports, its accounting
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None), "lookup_dcookie": (212, 18), "lsm_set_self_attr": (460, 460),
    # Old or rare calls with a history of bugs, for example for 16-bit segments and program formats of 1992
    "modify_ldt": (154, None), "uselib": (134, None), "sysfs": (139, None), "ustat": (136, None),
    "nfsservctl": (180, 42),
    # Contexts of asynchronous I/O, which are limited for the whole machine; memory that none of our limits counts
    "io_setup": (206, 0), "memfd_secret": (447, 447),
    # Kernel memory without an owning process: none of our limits counts it, and it stays after the code has ended
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    # Access to files without their path, and notification about all accesses
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # Namespaces and mounts, including access to the host's by name or number
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "statmount": (457, 457), "listmount": (458, 458),
}  # fmt: skip

# Filters cannot see arguments in memory. These calls report that they do not exist, so callers use an older call.
ABSENT_CALLS: Numbers = {"clone3": (435, 435), "openat2": (437, 437)}

# --------------------------------------------------------------------------------------------- without a namespace

# Changes of mode, owner and times, which Landlock does not govern. They have no effect but report success.
IGNORED_CALLS: Numbers = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
# Changes of extended attributes. They have no effect but report success, even if the sandbox runs as its own user.
ATTRIBUTE_CHANGES: Numbers = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# Reads of extended attributes and watches for changes, which Landlock does not govern either. They fail with ENOTSUP.
ATTRIBUTE_READS: Numbers = {
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "inotify_add_watch": (254, 27),
}  # fmt: skip
# Kernel objects that are shared with the host by name and by id. The host's ids are small numbers, easy to guess.
KERNEL_MEMORY_CALLS: Numbers = {
    "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
}  # fmt: skip
# Code can create only socketpairs, but it could still bind a socket of a pair to an abstract name of the host.
ADDRESS_CALLS: Numbers = {
    "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "connect": (42, 203),
}  # fmt: skip

# ------------------------------------------------------------------------------------------ inspected by policy.py

INSPECTED_CALLS: Numbers = {
    # Files: truncation below Landlock ABI 3, descriptors for neither reading nor writing, ioctl requests, signal owners
    "open": (2, None), "openat": (257, 56), "truncate": (76, 45), "ioctl": (16, 29), "fcntl": (72, 25),
    # New processes: namespaces, and children of the supervisor
    "clone": (56, 220),
    # Calls with a process id: only the caller's own. Signal calls are unrestricted if Landlock scopes signals.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "prlimit64": (302, 261), "setrlimit": (160, 164),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Sockets: families and protocols
    "socket": (41, 198), "socketpair": (53, 199),
    # Memory layout of programs: code may read it, but not make it easier to attack
    "personality": (135, 92),
}  # fmt: skip

CALLS: Numbers = {
    **DENIED_CALLS, **ABSENT_CALLS, **IGNORED_CALLS, **ATTRIBUTE_CHANGES, **ATTRIBUTE_READS, **KERNEL_MEMORY_CALLS,
    **ADDRESS_CALLS, **INSPECTED_CALLS,
}  # fmt: skip
