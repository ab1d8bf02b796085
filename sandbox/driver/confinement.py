"""Confinement that a child applies to itself before it runs code: limits, another user, Landlock, seccomp."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys
from ctypes import CDLL, addressof, c_char, c_char_p, c_int, c_size_t, c_ulong, c_void_p, cast, get_errno

from .processes import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRCTL_OPTIONS = {
    "PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4, "PR_SET_KEEPCAPS": 8, "PR_SET_SECCOMP": 22, "PR_SET_SECUREBITS": 28,
    "PR_SET_CHILD_SUBREAPER": 36, "PR_SET_NO_NEW_PRIVS": 38, "PR_CAP_AMBIENT": 47,
}  # fmt: skip

CAPABILITY_VERSION = 0x20080522
LIBC: Any = CDLL(None, use_errno=True)
# Looking the functions up here spares each fork the lookup.
LIBC.prctl.argtypes = [c_int, *[c_ulong] * 4]
LIBC.syscall.restype = LIBC.capset.restype = c_int


def set_capabilities(capabilities: int) -> None:
    """Set the effective, permitted and inheritable capabilities of the calling process. Raises OSError."""
    header = CAPABILITY_VERSION.to_bytes(4, sys.byteorder) + bytes(4)
    if LIBC.capset(header, capabilities.to_bytes(4, sys.byteorder) * 3 + bytes(12)) < 0:
        number = get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


class SeccompFilter:
    """A seccomp filter in the kernel's layout, built once so that a child that applies it touches few pages."""

    OWN_PID = (0x7E57A11D).to_bytes(4, sys.byteorder)  # placeholder for the id of the confined process
    INSTRUCTION_BYTES = 8

    def __init__(self, program: bytes) -> None:
        self.program = bytearray(program)
        self.pid_offsets: list[int] = []  # offsets of OWN_PID, which `confine` replaces
        offset = program.find(self.OWN_PID)
        while offset >= 0:
            self.pid_offsets.append(offset)
            offset = program.find(self.OWN_PID, offset + 1)
        self._start = c_char.from_buffer(self.program)  # a reference that keeps the buffer at its address
        # struct sock_fprog: a 16-bit number of instructions, padded to 8 bytes, and the program's address.
        count = (len(program) // self.INSTRUCTION_BYTES).to_bytes(2, sys.byteorder) + bytes(6)
        self._struct = c_char_p(count + addressof(self._start).to_bytes(8, sys.byteorder))
        self.address = cast(self._struct, c_void_p).value or 0


class Confinement:
    """The system calls that confine a child. The host decides the policy (``sandbox/confinement/policy.py``).

    Settings:
        ``limits``: names of RLIMIT_* to numbers.
        ``counts_user``: the NPROC limit counts the user's other processes.
        ``uid``: user id of the code; set only if the supervisor is root.
        ``gid``: group id of the files that code makes; by default the number of the uid.
        ``umask``: umask of the code.
        ``search``: keep the capability CAP_DAC_READ_SEARCH, because Python is in a home that the uid may not enter.
        ``landlock``, ``seccomp``: ruleset and filter.
        ``mounts``: each mount's path, expected device and inode, and the access that Landlock allows.
    """

    CAP_DAC_READ_SEARCH = 2
    SECBIT_NO_SETUID_FIXUP = 1 << 2
    LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # system call numbers on every architecture

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._limits: list[tuple[int, int]] = [
            (getattr(resource, "RLIMIT_" + name), int(value)) for name, value in settings.get("limits", {}).items()
        ]
        self._ruleset = -1
        self.has_domain = bool(settings.get("landlock"))  # each child enters a Landlock domain
        self._filter: SeccompFilter | None = None
        self._is_built = False
        if settings.get("mounts"):  # Building checks the mounts, which must happen before the sandbox is ready.
            self.build()

    def build(self) -> None:
        """Build the ruleset and the filter, once for all children of this process. Raises OSError."""
        # Building opens 40 files. A supervisor whose only child was forked ahead, and builds its own, never needs it.
        if self._is_built:
            return
        self._is_built = True
        settings = self._settings
        if settings.get("landlock"):
            self._ruleset = self._build_ruleset(settings["landlock"])
        for path, device, inode, access in settings.get("mounts", ()):
            self._admit_mount(path, (device, inode), access)
        if settings.get("seccomp"):
            self._filter = SeccompFilter(bytes.fromhex(settings["seccomp"]))

    def _call(self, name: str, result: int) -> int:
        """Return the result of a call, or raise OSError if it is negative."""
        if result < 0:
            number = get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return result

    def _prctl(self, name: str, *values: int) -> None:
        self._call("prctl " + name, LIBC.prctl(PRCTL_OPTIONS[name], *values, *([0] * (4 - len(values)))))

    def _build_ruleset(self, settings: dict[str, Any]) -> int:
        """Return the descriptor of a new ruleset. Each child that enters it gets a separate domain in the kernel."""
        struct = b"".join(int(settings[attribute]).to_bytes(8, sys.byteorder) for attribute in settings["attributes"])
        made = self._call(
            "landlock_create_ruleset",
            LIBC.syscall(self.LANDLOCK_CREATE, struct, c_size_t(len(struct)), 0),
        )
        ruleset = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 10)  # above a child's fixed descriptors
        os.close(made)
        for path, access in settings["rules"]:
            try:
                path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # paths that this system lacks
            self._add_rule(ruleset, path, path_fd, access)
            os.close(path_fd)
        return ruleset

    def _add_rule(self, ruleset: int, path: str, path_fd: int, access: int) -> None:
        rule = int(access).to_bytes(8, sys.byteorder) + path_fd.to_bytes(4, sys.byteorder)
        self._call("landlock_add_rule " + path, LIBC.syscall(self.LANDLOCK_ADD, ruleset, 1, rule, 0))

    def _admit_mount(self, path: str, identity: tuple[int, int], access: int) -> None:
        """Allow the access to a mount if it still has the identity that the host checked. Raises OSError.

        Its owner may meanwhile have replaced the mount, or a directory above it, with a link to something else.
        """
        path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            status = os.fstat(path_fd)
            if (status.st_dev, status.st_ino) != identity:
                raise OSError(errno.ESTALE, "what is mounted was exchanged for something else meanwhile", path)
            if self._ruleset >= 0:
                self._add_rule(self._ruleset, path, path_fd, access)
        finally:
            os.close(path_fd)

    def adopt_orphans(self, *, adopts: bool = True) -> None:
        """Adopt descendants whose parent dies, in whatever session they are, or no longer adopt them."""
        self._prctl("PR_SET_CHILD_SUBREAPER", adopts)

    def signal_at_parent_end(self, number: int = signal.SIGTERM) -> None:
        """Request a signal when the parent ends, or none with 0. After SIGTERM a process can still kill others."""
        self._prctl("PR_SET_PDEATHSIG", number)

    def end_with_parent(self, parent: int) -> None:
        """Request that the kernel kill the calling process when its parent ends."""
        self.signal_at_parent_end(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # the parent ended just before `prctl`

    def become_supervisor(self) -> None:
        """Let the calling process adopt orphans and get a signal when its parent ends, and close it to others."""
        if os.getpid() != 1:  # bubblewrap already requests SIGKILL for the first process of a namespace
            self.signal_at_parent_end()
        self.adopt_orphans()
        self.close_to_others()

    def close_to_others(self) -> None:
        """Close the calling process's /proc/PID/fd and /proc/PID/mem to other processes of its user."""
        self._prctl("PR_SET_DUMPABLE", 0)

    def confine(self, parent: int, *, has_forks: bool = False) -> None:
        """Confine the calling process, a child of `parent`, for good. No code may run in it after an OSError.

        The filter lets a process signal only itself. If each execution is a fork of this process (`has_forks`), the
        forks inherit the filter, so it accepts only the id 0, which names the caller: with this process's id, each fork
        could signal this process.
        """
        self.build()
        self._prctl("PR_SET_DUMPABLE", 1)
        try:
            adjust = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(adjust, b"1000")  # If memory runs out, the kernel kills this process and not the supervisor.
            os.close(adjust)
        except OSError:
            pass  # /proc is missing or not writable; the kernel may then kill another process first
        self.adopt_orphans()
        for limit, value in self._limits:
            self.lower_limit(limit, value)
        if self._settings.get("umask") is not None:
            os.umask(self._settings["umask"])
        if self._settings.get("uid") is not None:
            self._change_user(self._settings["uid"], self._settings.get("gid"))
        self.end_with_parent(parent)
        if self._ruleset >= 0 or self._filter is not None:
            self._prctl("PR_SET_NO_NEW_PRIVS", 1)
        for ruleset in self.rulesets:
            self.enter_domain(ruleset)
        if self._filter is not None:
            pid = 0 if has_forks else os.getpid()
            for offset in self._filter.pid_offsets:
                self._filter.program[offset : offset + 4] = pid.to_bytes(4, sys.byteorder)
            self._prctl("PR_SET_SECCOMP", 2, self._filter.address)
        self.close_to_others()  # An execution opens /proc/self again.

    @staticmethod
    def lower_limit(limit: int, value: int) -> None:
        """Set a limit of the calling process to the value, or to its present hard limit if that is lower."""
        hard = resource.getrlimit(limit)[1]
        # The kernel sends SIGXCPU, which names the cause, at the soft limit, and SIGKILL at the hard one.
        gap = 1 if limit == resource.RLIMIT_CPU else 0
        if hard == resource.RLIM_INFINITY or hard > value + gap:
            hard = value + gap
        resource.setrlimit(limit, (hard - gap, hard))

    def open_own_proc(self) -> None:
        """Open the calling process's own /proc/self to the code that it will run."""
        self._prctl("PR_SET_DUMPABLE", 1)

    @property
    def rulesets(self) -> list[int]:
        """Return the ruleset's descriptor in a list, which is empty without Landlock."""
        return [] if self._ruleset < 0 else [self._ruleset]

    def close(self) -> None:
        """Close the ruleset: no other child can be confined after this."""
        for ruleset in self.rulesets:
            os.close(ruleset)
        self._ruleset = -1

    def enter_domain(self, ruleset: int) -> None:
        """Put the calling process into a new Landlock domain, inside its present one. Raises OSError."""
        self._call("landlock_restrict_self", LIBC.syscall(self.LANDLOCK_RESTRICT, ruleset, 0))

    def _change_user(self, uid: int, gid: int | None) -> None:
        if self._settings.get("search"):
            self._prctl("PR_SET_KEEPCAPS", 1)
            try:
                # Otherwise access(2), which `shutil.which` uses, would check without the capability.
                self._prctl("PR_SET_SECUREBITS", self.SECBIT_NO_SETUID_FIXUP)
            except OSError:
                pass  # root without CAP_SETPCAP
        own_group = uid  # The group with the uid's number can enter its folder.
        gid = own_group if gid is None else gid
        other_groups = [] if gid == own_group else [own_group]
        os.setgroups(other_groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        if self._settings.get("search"):
            set_capabilities(1 << self.CAP_DAC_READ_SEARCH)
            self._prctl("PR_CAP_AMBIENT", 2, self.CAP_DAC_READ_SEARCH)
