"""What a child does to itself before it runs code: limits, another user, Landlock, seccomp."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys

from .processes import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PRCTL_OPTIONS = {
    "PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4, "PR_SET_KEEPCAPS": 8, "PR_SET_SECCOMP": 22, "PR_SET_SECUREBITS": 28,
    "PR_SET_CHILD_SUBREAPER": 36, "PR_SET_NO_NEW_PRIVS": 38, "PR_CAP_AMBIENT": 47,
}  # fmt: skip


_prctl: tuple[Callable[..., int], Callable[[], int]] | None = None
_libc: Any = None


def _find_prctl() -> tuple[Callable[..., int], Callable[[], int]]:
    """The system call, and what reads its error number; both are made once, with their types."""
    global _prctl
    _prctl = _prctl or _make_prctl()
    return _prctl


def _load_libc() -> Any:
    """The C library's functions, which are looked up once."""
    global _libc
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None, use_errno=True)
        for name in ("syscall", "capset"):  # each is made when it is first asked for, which a child would do anew
            getattr(_libc, name)
    return _libc


def _make_prctl() -> tuple[Callable[..., int], Callable[[], int]]:
    """From what ctypes is made of: ctypes itself takes longer to import than the driver."""
    try:
        import _ctypes

        raw: Any = _ctypes
        number, word = (type("Number", (raw._SimpleCData,), {"_type_": kind}) for kind in "iL")
        flags = raw.FUNCFLAG_CDECL | raw.FUNCFLAG_USE_ERRNO
        function: Any = type("Function", (raw.CFuncPtr,), {"_flags_": flags, "_restype_": number})
        call = function(raw.dlsym(raw.dlopen(None, 0), "prctl"))
        call.argtypes = [number] + [word] * 4
        return call, raw.get_errno
    except (ImportError, AttributeError):  # another Python than CPython
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).prctl
        call.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
        return call, ctypes.get_errno


class SeccompFilter:
    """A filter as the kernel takes it, laid out once: what a child does for it then touches few pages of memory.

    `address` is that of its struct sock_fprog.
    """

    OWN_PID = (0x7E57A11D).to_bytes(4, sys.byteorder)  # stands for the id of the process that it confines

    def __init__(self, ctypes: Any, program: bytes) -> None:
        self._program = bytearray(program)
        self._places: list[int] = []  # of that id
        while (place := program.find(self.OWN_PID, self._places[-1] + 1 if self._places else 0)) >= 0:
            self._places.append(place)
        self._start = ctypes.c_char.from_buffer(self._program)  # by which it stays where it is
        length = len(program) // 8 << (0 if sys.byteorder == "little" else 48)
        fields = (length, ctypes.addressof(self._start))
        self._fields = ctypes.c_char_p(b"".join(field.to_bytes(8, sys.byteorder) for field in fields))
        self.address: int = ctypes.cast(self._fields, ctypes.c_void_p).value

    def set_own_pid(self, pid: int) -> None:
        """Puts the id where it has to stand."""
        own = pid.to_bytes(4, sys.byteorder)
        for place in self._places:
            self._program[place : place + 4] = own


class Confinement:
    """The system calls that confine a child. The policy is the host's (``sandbox/confinement/policy.py``).

    Settings: ``limits`` (names of RLIMIT_* to numbers), ``counts_user`` (its NPROC goes beyond what the user had),
    ``uid`` (to become, where the supervisor is root), ``gid`` (of the files that it makes, by default the uid's
    number), ``umask``, ``search`` (keep the capability to reach the interpreter under a closed home), ``landlock``,
    ``seccomp``, and ``mounts``: the path of each, the device and inode that have to be there, and what Landlock is to
    allow.
    """

    CAP_DAC_READ_SEARCH = 2
    SECBIT_NO_SETUID_FIXUP = 1 << 2
    LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same number on every architecture

    def __init__(self, settings: dict[str, Any]) -> None:
        self._prctl_call, self._errno = _find_prctl()
        self._settings = settings
        if settings.get("landlock") or settings.get("seccomp") or settings.get("search"):
            import ctypes

            self._ctypes = ctypes
            self._libc = _load_libc()
        self._limits: list[tuple[int, int]] = [
            (getattr(resource, "RLIMIT_" + name), int(value)) for name, value in settings.get("limits", {}).items()
        ]
        self._ruleset = -1
        self._has_domain = bool(settings.get("landlock"))  # of Landlock, for each child
        self._filter: SeccompFilter | None = None
        if settings.get("landlock"):
            self._ruleset = self._build_ruleset(settings["landlock"])
        for path, device, inode, access in settings.get("mounts", ()):
            self._admit_mount(path, (device, inode), access)
        if settings.get("seccomp"):
            self._filter = SeccompFilter(self._ctypes, bytes.fromhex(settings["seccomp"]))

    @classmethod
    def after_start(cls, settings: dict[str, Any]) -> Confinement:
        """Return the confinement of a process that was confined by these settings, and then started a program."""
        confinement = cls({})
        if settings.get("landlock"):
            confinement._has_domain, confinement._libc = True, _load_libc()
        return confinement

    def _call(self, name: str, result: int) -> int:
        if result < 0:
            number = self._errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return result

    def _prctl(self, name: str, *values: int) -> None:
        self._call("prctl " + name, self._prctl_call(PRCTL_OPTIONS[name], *values, *([0] * (4 - len(values)))))

    def _build_ruleset(self, settings: dict[str, Any]) -> int:
        """A ruleset, made once: each child that enters it gets a domain of its own, as the kernel counts them."""
        struct = b"".join(int(settings[attribute]).to_bytes(8, sys.byteorder) for attribute in settings["attributes"])
        made = self._call(
            "landlock_create_ruleset",
            self._libc.syscall(self.LANDLOCK_CREATE, struct, self._ctypes.c_size_t(len(struct)), 0),
        )
        ruleset = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 10)  # clear of where a child puts what is its own
        os.close(made)
        for path, access in settings["rules"]:
            try:
                path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # not every system has every one of the paths
            self._add_rule(ruleset, path, path_fd, access)
            os.close(path_fd)
        return ruleset

    def _add_rule(self, ruleset: int, path: str, path_fd: int, access: int) -> None:
        rule = int(access).to_bytes(8, sys.byteorder) + path_fd.to_bytes(4, sys.byteorder)
        self._call("landlock_add_rule " + path, self._libc.syscall(self.LANDLOCK_ADD, ruleset, 1, rule, 0))

    def _admit_mount(self, path: str, identity: tuple[int, int], access: int) -> None:
        """Lets children read what is at a path, if it is what the host has judged. Raises OSError.

        Who made it so may have exchanged it meanwhile, or a directory above it, for a link to something else.
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

    def adopt_orphans(self) -> None:
        """Descendants whose parent has died become children of this process, whatever session they moved to."""
        self._prctl("PR_SET_CHILD_SUBREAPER", 1)

    def release_orphans(self) -> None:
        """Ends that: they become children of the nearest process above this one that adopts them."""
        self._prctl("PR_SET_CHILD_SUBREAPER", 0)

    def request_term_on_parent_end(self) -> None:
        """SIGTERM when the parent ends, and not SIGKILL: there is something to take along."""
        self._prctl("PR_SET_PDEATHSIG", signal.SIGTERM)

    def outlive_parent(self) -> None:
        """Takes that back: no signal comes when the parent ends."""
        self._prctl("PR_SET_PDEATHSIG", 0)

    def end_with_parent(self, parent: int) -> None:
        """Has the kernel kill the calling process when its parent ends."""
        self._prctl("PR_SET_PDEATHSIG", signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # it ended just before that call

    def become_supervisor(self) -> None:
        """Makes the calling process a supervisor: told of its parent's end, parent of orphans, closed to others."""
        if os.getpid() != 1:  # the first process of a namespace has bubblewrap's own request, for SIGKILL
            self.request_term_on_parent_end()
        self.adopt_orphans()
        self.close_to_others()

    def close_to_others(self) -> None:
        """Closes the calling process's /proc/PID/fd and /proc/PID/mem to others of its user."""
        self._prctl("PR_SET_DUMPABLE", 0)

    def close_to_forks(self) -> None:
        """The same to forks of the calling process, which a domain of their own holds off where there is Landlock.

        It stays open there: who sums a sandbox's memory has to see which of it the forks share.
        """
        if not self._has_domain:
            self.close_to_others()

    def confine(self, parent: int, *, is_forked_on: bool = False) -> None:
        """Confines the calling process, a child of `parent`, for good. Raises OSError; the code must not run then.

        A filter stays with every fork of the process. So where it `is_forked_on` for executions, the filter knows no
        process by its id, only by the 0 that names whoever calls: each fork could signal it otherwise.
        """
        self._prctl("PR_SET_DUMPABLE", 1)
        try:
            adjust = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(adjust, b"1000")  # where memory runs out, the kernel takes this process and not the supervisor
            os.close(adjust)
        except OSError:
            pass  # no /proc, or not ours to change: the order in which the kernel kills is not a promise
        self.adopt_orphans()
        for limit, value in self._limits:
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # At the soft limit of CPU seconds the signal says what it is about; at the hard one it is SIGKILL.
            more = 1 if limit == resource.RLIMIT_CPU and hard in (resource.RLIM_INFINITY, max(hard, value + 1)) else 0
            resource.setrlimit(limit, (value, value + more))
        if self._settings.get("umask") is not None:
            os.umask(self._settings["umask"])
        if self._settings.get("uid") is not None:
            self._change_user(self._settings["uid"], self._settings.get("gid"))
        self.end_with_parent(parent)
        if self._ruleset >= 0 or self._filter is not None:
            self._prctl("PR_SET_NO_NEW_PRIVS", 1)
        for ruleset in self.rulesets:
            self._enter_domain(ruleset)
        if self._filter is not None:
            self._filter.set_own_pid(0 if is_forked_on else os.getpid())
            self._prctl("PR_SET_SECCOMP", 2, self._filter.address)
        self.close_to_others()  # until it has an execution of its own

    def confine_fork(self, rulesets: list[int]) -> None:
        """Confines a fork of a confined process, which has all of that but a domain of its own. Raises OSError.

        In a domain below the forked process's it can neither signal nor read that, nor any other fork.
        """
        self.adopt_orphans()
        for ruleset in rulesets:
            self._enter_domain(ruleset)

    def limit_cpu_seconds(self, seconds: int) -> None:
        """Limits the calling process, and each that it starts, for good; a lower limit that it has stays."""
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        if hard == resource.RLIM_INFINITY or hard > seconds:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))

    def open_own_proc(self) -> None:
        """Opens the calling process's own /proc/self to the code that it is about to run."""
        self._prctl("PR_SET_DUMPABLE", 1)

    @property
    def rulesets(self) -> list[int]:
        """The descriptor of the ruleset that children enter a domain with; none without Landlock."""
        return [] if self._ruleset < 0 else [self._ruleset]

    def close(self) -> None:
        """Lets go of the ruleset: no other child can be confined."""
        for ruleset in self.rulesets:
            os.close(ruleset)
        self._ruleset = -1

    def _enter_domain(self, ruleset: int) -> None:
        self._call("landlock_restrict_self", self._libc.syscall(self.LANDLOCK_RESTRICT, ruleset, 0))

    def _change_user(self, uid: int, gid: int | None) -> None:
        if self._settings.get("search"):
            self._prctl("PR_SET_KEEPCAPS", 1)
            try:
                # Or access(2), and so `shutil.which`, would look without the capability.
                self._prctl("PR_SET_SECUREBITS", self.SECBIT_NO_SETUID_FIXUP)
            except OSError:
                pass  # a root without CAP_SETPCAP
        gid = uid if gid is None else gid
        os.setgroups([] if gid == uid else [uid])  # the way to its own folder is open to the group of that number
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        if self._settings.get("search"):
            keep = (1 << self.CAP_DAC_READ_SEARCH).to_bytes(4, sys.byteorder)
            header = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4)
            self._call("capset", self._libc.capset(header, keep * 3 + bytes(12)))
            self._prctl("PR_CAP_AMBIENT", 2, self.CAP_DAC_READ_SEARCH)
