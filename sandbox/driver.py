"""The driver: the one program that runs inside a sandbox and executes code there.

It is a supervisor, a single-threaded loop that keeps the wire to the host and runs each execution in a child process.
Standard library only, Python 3.9 or newer, the same file for every provider. The host imports it too, for the framing
and for the rules of strict JSON, so that both ends of the wire share one text.

Frames. A frame is one line of JSON, its header. A header with ``body: n`` is followed by a line of exactly n bytes,
itself JSON, which the supervisor hands on unread; with ``file: path`` in its place the body is what that file holds,
and whoever takes the frame removes the file. Every frame has ``op``, an ``id`` (the execution's; 0 for the sandbox)
and, on the host's wire, ``n``, a number that grows by one: a frame that comes again is dropped.

    host to driver   start (first, body: the settings), execute (timeout, context, body: code, variables, names),
                     reply (call, body), cancel, forget (context), beat, stop
    driver to host   ready, output (stream, text, dropped), call (call, name, body), files (body: what was written on
                     the volume), end (status, body), beat

Modules that ``signal``, ``json`` and ``collections`` are made of are taken directly where that saves start-up time:
importing ``enum`` and ``re`` would cost more than everything else that happens before the first answer.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import select
import stat
import sys
import time
from codecs import getincrementaldecoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn
else:
    try:
        import _signal as signal
    except ImportError:  # another Python than CPython
        import signal

HEADER_LIMIT = 64 * 1024  # bytes; headers hold ids and short names only
SUBMIT_LIMIT = 1024 * 1024  # bytes of UTF-8 that one SUBMIT may hand back
CALL_LIMIT = 16 * 1024 * 1024  # bytes of one call's arguments
OUTCOME_LIMIT = SUBMIT_LIMIT + 256 * 1024  # an error's traceback, or the fields and what stands around them
TRACEBACK_LIMIT = 20_000  # characters
SOURCES = 100  # executions of a context whose lines a traceback can show
FILE_ABOVE = 256 * 1024  # bytes of a body that goes to the host as a file, where the settings name a place for it
BACKLOG_LIMIT = 8 * 1024 * 1024  # bytes waiting for the host, above which no more is read from children
INTERRUPT_GRACE = 1.0  # seconds that an interrupted execution has to unwind before it is killed
COMMIT_LIMIT = 120.0  # seconds for the command that commits the volume
COMPLAINT_LIMIT = 2000  # characters of what it said before it failed
LONGEST_WAIT = 3600.0  # seconds in one system call, whose own limit is some 24 days
SUBMIT_GRACE = 5.0  # seconds for `finally` blocks after SUBMIT; the result stands already
IDLE = 1.0  # seconds without anything to do after which more executions are taken to be coming
READ_SIZE = 64 * 1024  # bytes that are read at a time; a larger buffer would be mapped anew for each read
CONTEXT_PIPE = 1024 * 1024  # bytes of pipe to a context, the most that an ordinary user may ask for
CHANNEL_IN, CHANNEL_OUT = 3, 4  # where a child finds its own channel
RESERVE = 4 * 1024 * 1024  # bytes of address space, not touched, that are let go when there is an error to be described
CODE_NAME = "<code>"
VOLUME_NAMES = ("VOLUME", "save_to_volume", "load_from_volume", "list_volume")  # that code finds, asked for or not
FILES_LIMIT = 1000  # names of files on the volume that one execution reports
OUR_FILES = ".rlm-batch"  # how the names of what we put on a volume begin; lists leave it out
INHERIT_EXIT = 70  # a child that could not even report why it failed (EX_SOFTWARE)


# ---------------------------------------------------------------------------------------------------------------- JSON


LARGEST = 10**4300  # the first integer that Python does not read from text unless it is told to


class NotJson(Exception):
    """A value that strict JSON cannot hold; the message names its place and the remedy."""


def _constant(name: str) -> NoReturn:
    raise ValueError(name + " is not JSON")


try:
    from _json import encode_basestring, make_encoder, make_scanner  # type: ignore[attr-defined]

    class _Reading:
        strict = True
        object_hook = object_pairs_hook = array_hook = None
        parse_float = float
        parse_int = int
        parse_constant = staticmethod(_constant)
        memo: dict[str, str] = {}  # noqa: RUF012 - the scanner's own protocol

    # Any: the scanner takes whatever has these attributes, and its stub asks for a scanner.
    _reading: Any = _Reading()
    _refused: Any = None  # no default: a value that is not JSON is a TypeError
    _scan: Any = make_scanner(_reading)
    _encode: Any = make_encoder(None, _refused, encode_basestring, None, ":", ",", False, False, False)

    def loads(text: str) -> Any:
        """The value of a compact JSON text. Raises ValueError or RecursionError."""
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            raise ValueError("not JSON") from None
        if end != len(text):
            raise ValueError("more than one JSON value")
        return value

    def dumps(value: Any) -> str:
        """Compact JSON, not escaped to ASCII. Raises ValueError, TypeError or RecursionError."""
        return "".join(_encode(value, 0))

except ImportError:  # another Python than CPython
    import json as _slow

    def loads(text: str) -> Any:
        return _slow.loads(text, parse_constant=_constant)

    def dumps(value: Any) -> str:
        return _slow.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _fits(value: Any) -> bool:
    """Whether a value is certainly JSON; quick, and silent about why not."""
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return -LARGEST < value < LARGEST
    if kind is float:
        return value - value == 0  # neither infinite nor NaN
    if kind is list or kind is tuple:
        return all(map(_fits, value))
    return kind is dict and all(type(key) is str for key in value) and all(map(_fits, value.values()))


def _check(value: Any, place: str) -> None:
    """Raises NotJson for what is no JSON at or below a value, which `place` names."""
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    if kind.__module__.partition(".")[0] == "numpy":
        raise NotJson(f"{place} is numpy's {kind.__name__}: hand over {place}.item() or {place}.tolist()")
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        raise NotJson(f"{place} is an integer of more than 4,300 digits: hand over a string of it")
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise NotJson(f"{place} is {value!r}, which JSON cannot hold: hand over None or a string in its place")
    elif isinstance(value, (list, tuple)):
        items: Any = value  # type: ignore[reportUnknownVariableType]
        for index, item in enumerate(items):
            _check(item, f"{place}[{index}]")
    elif isinstance(value, dict):
        pairs: Any = value  # type: ignore[reportUnknownVariableType]
        for key, item in pairs.items():
            if not isinstance(key, str):
                raise NotJson(f"{place} has the key {key!r}, which is no string: use str({key!r})")
            _check(item, f"{place}[{key!r}]")
    elif isinstance(value, (bytes, bytearray)):
        raise NotJson(f"{place} is bytes: decode it to text, or save it to the volume and hand over its path")
    elif isinstance(value, (set, frozenset)):
        raise NotJson(f"{place} is a {kind.__name__}: hand over sorted({place}) or list({place})")
    else:
        raise NotJson(f"{place} is a {kind.__qualname__}, which is not JSON: hand over numbers, text, lists and dicts")


def strict_json(fields: dict[str, Any]) -> bytes:
    """The fields as compact UTF-8 JSON; tuples become lists. Raises NotJson, which names the field and the remedy."""
    for name, value in fields.items():
        try:
            if not _fits(value):
                _check(value, name)
        except RecursionError:
            raise NotJson(f"{name} contains itself, or is nested too deeply") from None
    try:
        return dumps(fields).encode("utf-8")
    except (ValueError, RecursionError):
        pass
    for name, value in fields.items():  # which of them it was
        try:
            dumps({name: value}).encode("utf-8")
        except UnicodeEncodeError:
            raise NotJson(f"{name} has text with a lone surrogate, which is not UTF-8: replace or drop it") from None
        except (ValueError, RecursionError) as error:
            raise NotJson(f"{name}: {error}") from None
    raise NotJson("the fields together are nested too deeply")


# -------------------------------------------------------------------------------------------------------------- frames


class BadFrame(Exception):
    """Bytes on a channel that are no frame."""


def encode(header: dict[str, Any], body: bytes | None = None) -> bytes:
    """A frame's bytes."""
    if body is None:
        return dumps(header).encode("utf-8", "replace") + b"\n"
    header["body"] = len(body)
    return b"".join((dumps(header).encode("utf-8", "replace"), b"\n", body, b"\n"))


class Frames:
    """Cuts a stream of bytes into frames: pairs of a header and a body, which is None where there is none."""

    def __init__(self, body_limit: int | None = None) -> None:
        self._body_limit = body_limit
        self._rest: list[bytes] = []  # of a frame that is not complete yet
        self._have = 0  # bytes in it
        self._want = 0  # bytes that it takes at least

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes | None]]:
        """The frames that these bytes complete. Raises BadFrame; the stream is lost after that."""
        if self._rest:
            self._rest.append(data)
            self._have += len(data)
            if self._have < self._want:
                return []
            data = b"".join(self._rest)
            self._rest = []
        found: list[tuple[dict[str, Any], bytes | None]] = []
        begin, size = 0, len(data)
        while begin < size:
            end = data.find(b"\n", begin)
            if end < 0:
                if size - begin > HEADER_LIMIT:
                    raise BadFrame("a header longer than any of ours")
                self._keep(data[begin:], 0)
                break
            header = self._parse(data[begin:end])
            body = None
            if "body" in header:
                stop = end + 1 + header["body"]
                if stop >= size:
                    self._keep(data[begin:], stop + 1 - begin)
                    break
                if data[stop] != 10:
                    raise BadFrame("a body that is longer than its header says")
                body = data[end + 1 : stop]
                end = stop
            found.append((header, body))
            begin = end + 1
        return found

    def _keep(self, rest: bytes, want: int) -> None:
        self._rest, self._have, self._want = [rest], len(rest), want

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            header: Any = loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            raise BadFrame(f"a line that is no frame: {line[:80]!r}") from None
        if not isinstance(header, dict):
            raise BadFrame(f"a line that is no frame: {line[:80]!r}")
        frame: dict[str, Any] = header  # type: ignore[reportUnknownVariableType]
        size = frame.get("body", 0)
        if type(size) is not int or size < 0 or (self._body_limit is not None and size > self._body_limit):
            raise BadFrame(f"a body of {size!r} bytes")
        return frame


# --------------------------------------------------------------------------------------------------------- confinement


def prctl() -> tuple[Callable[..., int], Callable[[], int]]:
    """The system call, and what reads its error number.

    From what ctypes is made of: ctypes itself takes longer to import than the driver.
    """
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


class Confinement:
    """What a child does to itself before it runs code. The policy is the host's; here are only the system calls.

    Settings: ``limits`` (names of RLIMIT_* to numbers), ``uid`` (to become, where the supervisor is root), ``gid``
    (of the files that it makes, by default the uid's number), ``umask``, ``search`` (keep the capability to reach the
    interpreter under a closed home), ``landlock`` and ``seccomp``.
    """

    PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
    PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
    CAP_DAC_READ_SEARCH = 2
    OWN_PID = (0x7E57A11D).to_bytes(4, sys.byteorder)  # stands in a filter for the id of the process that it confines
    LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same number on every architecture

    def __init__(self, settings: dict[str, Any]) -> None:
        self._prctl_call, self._errno = prctl()
        if settings.get("landlock") or settings.get("seccomp") or settings.get("search"):
            import ctypes

            self._ctypes = ctypes
            self._libc = ctypes.CDLL(None, use_errno=True)
        self._limits: list[tuple[int, int]] = [
            (getattr(resource, "RLIMIT_" + name), int(value)) for name, value in settings.get("limits", {}).items()
        ]
        self._uid: int | None = settings.get("uid")
        self._gid: int | None = settings.get("gid")
        self._umask: int | None = settings.get("umask")
        self._search = bool(settings.get("search"))
        self._ruleset = -1
        self._filter: Any = None
        if settings.get("landlock"):
            self._ruleset = self._landlock(settings["landlock"])
        if settings.get("seccomp"):
            self._compile(bytes.fromhex(settings["seccomp"]))

    def _call(self, what: str, result: int) -> int:
        if result < 0:
            number = self._errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return result

    def _prctl(self, what: str, option: int, *values: int) -> None:
        self._call("prctl " + what, self._prctl_call(option, *values, *([0] * (4 - len(values)))))

    def _compile(self, program: bytes) -> None:
        """Lays the filter out in memory, and notes where the confined process's own id has to stand."""
        self._program = self._ctypes.create_string_buffer(program, len(program))
        self._own = [at for at in range(4, len(program), 8) if program[at : at + 4] == self.OWN_PID]
        length = len(program) // 8 << (0 if sys.byteorder == "little" else 48)
        pair = (length, self._ctypes.addressof(self._program))  # struct sock_fprog
        self._filter = self._ctypes.create_string_buffer(b"".join(n.to_bytes(8, sys.byteorder) for n in pair), 16)

    def _landlock(self, settings: dict[str, Any]) -> int:
        """A ruleset, made once: each child that enters it gets a domain of its own, as the kernel counts them."""
        struct = b"".join(int(settings[name]).to_bytes(8, sys.byteorder) for name in settings["attributes"])
        ruleset = self._call(
            "landlock_create_ruleset",
            self._libc.syscall(self.LANDLOCK_CREATE, struct, self._ctypes.c_size_t(len(struct)), 0),
        )
        for path, access in settings["rules"]:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # not every system has every one of the paths
            rule = int(access).to_bytes(8, sys.byteorder) + beneath.to_bytes(4, sys.byteorder)
            self._call("landlock_add_rule " + path, self._libc.syscall(self.LANDLOCK_ADD, ruleset, 1, rule, 0))
            os.close(beneath)
        return ruleset

    def adopt_orphans(self) -> None:
        """Descendants whose parent has died become children of this process, whatever session they moved to."""
        self._prctl("PR_SET_CHILD_SUBREAPER", self.PR_SET_CHILD_SUBREAPER, 1)

    def warn_of_death(self) -> None:
        """SIGTERM when the parent ends, and not SIGKILL: there is something to take along."""
        self._prctl("PR_SET_PDEATHSIG", self.PR_SET_PDEATHSIG, signal.SIGTERM)

    def supervise(self) -> None:
        """Makes the calling process a supervisor: told of its parent's end, parent of orphans, closed to others."""
        self.warn_of_death()
        self.adopt_orphans()
        self._prctl("PR_SET_DUMPABLE", self.PR_SET_DUMPABLE, 0)  # /proc/PID/fd and /proc/PID/mem are closed to others

    def enter(self, parent: int) -> None:
        """Confines the calling process, a child of `parent`, for good. Raises OSError; the code must not run then."""
        self._prctl("PR_SET_DUMPABLE", self.PR_SET_DUMPABLE, 1)
        try:
            with open("/proc/self/oom_score_adj", "w") as adjust:
                adjust.write("1000")  # where memory runs out, the kernel takes this process and not the supervisor
        except OSError:
            pass  # no /proc, or not ours to change: the order in which the kernel kills is not a promise
        self.adopt_orphans()
        for limit, value in self._limits:
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # At the soft limit of CPU seconds the signal says what it is about; at the hard one it is SIGKILL.
            more = 1 if limit == resource.RLIMIT_CPU and hard in (resource.RLIM_INFINITY, max(hard, value + 1)) else 0
            resource.setrlimit(limit, (value, value + more))
        if self._umask is not None:
            os.umask(self._umask)
        if self._uid is not None:
            self._become(self._uid)
        self._prctl("PR_SET_PDEATHSIG", self.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # it ended just before that call
        if self._ruleset >= 0 or self._filter is not None:
            self._prctl("PR_SET_NO_NEW_PRIVS", self.PR_SET_NO_NEW_PRIVS, 1)
        if self._ruleset >= 0:
            self._call("landlock_restrict_self", self._libc.syscall(self.LANDLOCK_RESTRICT, self._ruleset, 0))
        if self._filter is not None:
            for at in self._own:
                self._program[at : at + 4] = os.getpid().to_bytes(4, sys.byteorder)
            self._prctl("PR_SET_SECCOMP", self.PR_SET_SECCOMP, 2, self._ctypes.addressof(self._filter))
        self._prctl("PR_SET_DUMPABLE", self.PR_SET_DUMPABLE, 0)  # closed to other executions until it has its own

    def unveil(self) -> None:
        """Opens the calling process's own /proc/self to the code that it is about to run."""
        self._prctl("PR_SET_DUMPABLE", self.PR_SET_DUMPABLE, 1)

    def _become(self, uid: int) -> None:
        if self._search:
            self._prctl("PR_SET_KEEPCAPS", self.PR_SET_KEEPCAPS, 1)
        gid = uid if self._gid is None else self._gid
        os.setgroups([] if gid == uid else [uid])  # the way to its own folder is open to the group of that number
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        if self._search:
            keep = 1 << self.CAP_DAC_READ_SEARCH
            header = (0x20080522).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
            sets = b"".join(keep.to_bytes(4, sys.byteorder) for _ in range(3)) + bytes(12)
            self._call("capset", self._libc.capset(header, sets))
            self._prctl("PR_CAP_AMBIENT", self.PR_CAP_AMBIENT, 2, self.CAP_DAC_READ_SEARCH)


# --------------------------------------------------------------------------------------------- inside a child: the code


class Submitted(SystemExit):
    """Ends an execution whose value has been recorded. A SystemExit, which threads and event loops let pass quietly."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class Interrupted(KeyboardInterrupt):
    """Ends an execution that has outlived its timeout or was cancelled."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class SubmitError(ValueError):
    """SUBMIT was given something that cannot be handed back."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class VolumeError(OSError):
    """A path that leaves the volume, a file that is not there or could not be written, or no volume at all."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class ToolError(RuntimeError):
    """A function of the host failed; the message begins with the type of its error."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class Waiter:
    """A thread that waits for one frame: a reply, or the next execution."""

    __slots__ = ("duty", "event", "frame", "waiting")

    def __init__(self) -> None:
        import _thread

        self.event = _thread.allocate_lock()
        self.event.acquire()
        self.frame: tuple[dict[str, Any], bytes | None] | None = None
        self.waiting = False
        self.duty = False  # this thread reads the channel for all that wait

    def wake(self) -> None:
        if self.event.locked():
            self.event.release()


class Volume:
    """The volume as the code knows it. `root` is where it is mounted, None where nobody asked for one.

    Files are written as the least of the file systems below it can: once, from the first byte to the last, and closed.
    Where a file can be renamed it gets its name when it is complete; elsewhere (S3 behind FUSE) what was begun is
    removed again when it cannot be completed.
    """

    def __init__(
        self, root: str | None, shared: bool, shield: Callable[[], None], unshield: Callable[[], None]
    ) -> None:
        self.root = root
        self._shared = shared  # by users who have a group in common: the next execution is another one
        self._real: str | None = None
        self._shield, self._unshield = shield, unshield
        self._renames: bool | None = None  # None: not tried yet
        self._written: dict[str, None] = {}
        if root is not None and hasattr(sys, "addaudithook"):
            sys.addaudithook(self._watch)

    def begin(self) -> None:
        """Another execution: what it writes is noted from here on."""
        self._written = {}

    def written(self) -> list[str]:
        """The files on the volume that Python code of this process has opened for writing and that are there now.

        What other processes have written is not among them, nor what native code has opened by itself.
        """
        assert self.root is not None
        found: list[str] = []
        for path in list(self._written):  # a thread that the code has left may still write
            place = os.path.join(self.root, path)
            try:
                entry = os.lstat(place)
                if not stat.S_ISREG(entry.st_mode):
                    continue  # tempfile opens the directory that it makes a file in
                found.append(path)
                if self._shared and entry.st_mode & 0o060 != 0o060:
                    os.chmod(place, stat.S_IMODE(entry.st_mode) | 0o060)  # tempfile makes files for their user alone
            except OSError:
                continue  # it has gone, or is another's
        return found

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's own word, before it happens, on every file that is opened, renamed or removed."""
        try:
            if event == "open":
                if arguments[2] & os.O_ACCMODE != os.O_RDONLY:
                    self._note(arguments[0])
            elif event == "os.rename":
                self._forget(arguments[0])
                self._note(arguments[1])
            elif event == "os.remove":
                self._forget(arguments[0])
        except Exception:
            pass  # what it raises the code would get: for want of a working directory, or of arguments, say

    def _note(self, path: Any) -> None:
        inside = self._inside(path)
        if inside is not None and len(self._written) < FILES_LIMIT:
            self._written[inside] = None

    def _forget(self, path: Any) -> None:
        if self._written:
            self._written.pop(self._inside(path) or "", None)

    def _inside(self, path: Any) -> str | None:
        """The path in the volume of a file there; None for files elsewhere, our own, and what is no path."""
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return None
        path = os.path.abspath(path)
        for root in (self.root, self._real):
            if root is not None and path.startswith(root + "/"):
                found = path[len(root) + 1 :]
                return None if found.rpartition("/")[2].startswith(OUR_FILES) else found
        return None

    def names(self) -> dict[str, Any]:
        """What the code finds."""

        def save_to_volume(path: str | os.PathLike[str], data: str | bytes) -> str:
            """Saves text (as UTF-8) or bytes as the file of that path, and returns the path in the volume.

            Directories on the way are made, and a file that was there is replaced. Nothing is left of a file that
            could not be written whole. Raises VolumeError, and TypeError for data of another type.
            """
            return self._save(path, data)

        def load_from_volume(path: str | os.PathLike[str], *, binary: bool | None = None) -> str | bytes:
            """What was saved as that path: text if it is UTF-8, else bytes.

            A file does not say which of the two it was: with `binary=True` it is always bytes, with `binary=False`
            always text, and a VolumeError where it is not UTF-8. Raises VolumeError.
            """
            return self._load(path, binary)

        def list_volume(path: str | os.PathLike[str] = "") -> list[str]:
            """The paths in the volume of every file at or below that path, sorted; none of ours. Raises VolumeError."""
            return self._list(path)

        found: dict[str, Any] = {"VOLUME": self.root, "VolumeError": VolumeError}
        for function in (save_to_volume, load_from_volume, list_volume):
            function.__qualname__ = function.__name__
            found[function.__name__] = function
        return found

    def _place(self, path: str | os.PathLike[str], what: str) -> tuple[str, str]:
        """A path in the volume, and where that is once links are followed. Raises VolumeError where it leads out."""
        if self.root is None:
            raise VolumeError(
                f"{what} needs a volume, and this sandbox has none: ask for one with volume_name, "
                "as in volume_name='results'"
            )
        text = os.fspath(path)
        if not isinstance(text, str):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{what}: a path is text, not {type(text).__name__}")
        inside = text
        if text.startswith("/"):
            inside = os.path.normpath(text)
            if inside != self.root and not inside.startswith(self.root + "/"):
                raise VolumeError(f"{text!r} is not on the volume, which is at {self.root}: paths are relative to it")
            inside = inside[len(self.root) + 1 :]
        names = [name for name in inside.split("/") if name not in ("", ".")]
        if ".." in names or ".." in text.split("/"):
            raise VolumeError(f"{text!r} leaves the volume: name a path in it, without '..'")
        if "\0" in text:
            raise VolumeError(f"{text!r} is no path: it has a null character")
        if self._real is None:
            if not os.path.isdir(self.root):
                raise VolumeError(f"the volume is not there: nothing is mounted at {self.root}")
            self._real = os.path.realpath(self.root)
        inside = "/".join(names)
        try:
            real = os.path.realpath(os.path.join(self._real, inside))
        except OSError as error:
            raise self._error(error, inside, what) from None
        if real != self._real and not real.startswith(self._real + "/"):
            raise VolumeError(f"{inside!r} is a symbolic link that leaves the volume: name the file itself")
        return inside, real

    @staticmethod
    def _error(error: OSError, path: str, what: str) -> VolumeError:
        number = error.errno
        if what != "save_to_volume" and number in (errno.ENOENT, errno.ENOTDIR):
            return VolumeError(f"there is no {path!r} on the volume: list_volume() says what there is")
        if what == "save_to_volume" and number in (errno.EEXIST, errno.ENOTDIR):
            return VolumeError(f"{path!r} could not be saved: one of the directories on its way is a file")
        if number in (errno.ENOSPC, errno.EDQUOT):
            return VolumeError(
                f"the volume is full: {path!r} was not saved, and nothing of it is left; make room on it"
            )
        if number == errno.EFBIG:
            return VolumeError(
                f"{path!r} was not saved, and nothing of it is left: it is larger than one file of this sandbox may "
                "be; cut it into several, or allow more"
            )
        how = {"save_to_volume": "saved", "load_from_volume": "read"}.get(what, "listed")
        return VolumeError(f"{path!r} could not be {how}: {error.strerror or error}")

    # -- saving

    def _save(self, path: str | os.PathLike[str], data: str | bytes) -> str:
        inside, real = self._place(path, "save_to_volume")
        if isinstance(data, str):
            try:
                data = data.encode("utf-8")
            except UnicodeEncodeError as error:
                raise VolumeError(f"{inside!r} was not saved: its text is not UTF-8 ({error.reason})") from None
        elif not isinstance(data, (bytes, bytearray, memoryview)):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"save_to_volume takes text or bytes, not {type(data).__name__}: json.dumps makes text of most values"
            )
        try:
            if real == self._real or os.path.isdir(real):
                raise VolumeError(f"{inside!r} is a directory of the volume: name a file")
            folder = os.path.dirname(real)
            os.makedirs(folder, exist_ok=True)
            if self._can_rename(folder):
                partial = self._partial(folder)
                self._write(partial, os.O_EXCL, data, then=real)
            else:
                self._write(real, os.O_TRUNC, data, then=None)
        except VolumeError:
            raise
        except OSError as error:
            raise self._error(error, inside, "save_to_volume") from None
        return inside

    @staticmethod
    def _partial(folder: str) -> str:
        return os.path.join(folder, f"{OUR_FILES}-{os.urandom(8).hex()}.partial")

    def _can_rename(self, folder: str) -> bool:
        """Whether files can be renamed here, found out by renaming an empty one."""
        if self._renames is None:
            before, after = self._partial(folder), self._partial(folder)
            self._write(before, os.O_EXCL, b"", then=None)
            try:
                os.rename(before, after)
                before = after
                self._renames = True
            except OSError:
                self._renames = False
            finally:
                os.unlink(before)
        return self._renames

    def _write(self, path: str, flag: int, data: Any, then: str | None) -> None:
        """Writes a file in one go, and renames it if `then` says so; removes it again if either fails."""
        file = -1
        try:
            self._shield()
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag, 0o666)
            finally:
                self._unshield()
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(file, rest) :]
            open_file, file = file, -2
            os.close(open_file)  # where what is full, or gone, may be told only now
            if then is not None:
                os.rename(path, then)
        except BaseException:
            if file >= 0:
                os.close(file)
            if file != -1:
                try:
                    os.unlink(path)
                except OSError:
                    pass
            raise

    # -- loading and listing

    def _load(self, path: str | os.PathLike[str], binary: bool | None) -> str | bytes:
        inside, real = self._place(path, "load_from_volume")
        try:
            # Not to wait for the other end, where it is a pipe that some code has made.
            with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    kind = "a directory" if stat.S_ISDIR(mode) else "no file"
                    raise VolumeError(f"{inside!r} is {kind}: list_volume() says what there is")
                data = file.read()
        except VolumeError:
            raise
        except OSError as error:
            raise self._error(error, inside, "load_from_volume") from None
        if binary:
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if binary is None:
                return data
            raise VolumeError(f"{inside!r} is not UTF-8 ({error.reason}): load it with binary=True") from None

    def _list(self, path: str | os.PathLike[str]) -> list[str]:
        inside, real = self._place(path, "list_volume")
        found: list[str] = []
        folders = [(inside, real)]
        try:
            if not stat.S_ISDIR(os.stat(real).st_mode):
                return [inside]
            while folders:
                within, folder = folders.pop()
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.name.startswith(OUR_FILES):
                            continue
                        name = f"{within}/{entry.name}" if within else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append((name, entry.path))
                        else:
                            found.append(name)
        except OSError as error:
            raise self._error(error, inside, "list_volume") from None
        return sorted(found)


class Child:
    """The inside of a forked child: runs code, and speaks with the supervisor over a channel of its own.

    No thread of ours runs beside the code. Of the threads that wait for a reply one reads the channel for all of them,
    and hands that duty on when it has its own.
    """

    NEXT = -1  # the waiter that stands for the next execution of a context

    def __init__(self, settings: dict[str, Any]) -> None:
        import _thread

        self._pid = os.getpid()
        self._main = _thread.get_ident()
        self._get_ident = _thread.get_ident
        self._lock = _thread.allocate_lock()  # over waiters, calls and the reader's duty; held for a few instructions
        self._sending = _thread.allocate_lock()
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(CHANNEL_IN, select.POLLIN)
        self._waiters: dict[int, Waiter] = {}
        self._reading = False
        self._calls = 0
        self._token = ""
        self._submitted = False
        self._running = False
        self._shielded = 0
        self._pending = False
        self._module = type(sys)("__main__")
        self._module.__dict__["__builtins__"] = __builtins__
        self._stateless = self._compiled = False
        self._sources = 0
        self._name = CODE_NAME
        self._source = ""
        self._shown: dict[str, str] = {}
        self._reserve: bytes | None = None
        shared = settings["confinement"].get("umask") is not None
        self._names: dict[bool, dict[str, Any]] = {}
        self._volume = Volume(settings["volume"], shared, self._shield, self._unshield)
        sys.modules["__main__"] = self._module
        sys.argv = [CODE_NAME]
        # Last: what an execution leaves there does not stand for a module of the library.
        sys.path.append(settings["cwd"])
        signal.signal(signal.SIGINT, self._on_interrupt)
        # New ones: the supervisor's know what its descriptors were, a file perhaps, and these are pipes.
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        for name, fd in (("stdout", 1), ("stderr", 2)):
            how = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
            stream: Any = open(fd, "w", **how)  # type: ignore[call-overload]  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        import builtins

        for name in ("exit", "quit"):  # the names that `site` would have made; model-written code uses them
            if not hasattr(builtins, name):
                setattr(builtins, name, sys.exit)

    # -- interrupts: raised between two instructions of the code, never inside the channel's own

    def _on_interrupt(self, _number: int, _frame: object) -> None:
        if not self._running:
            return
        if self._shielded:
            self._pending = True
        else:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        self._pending = False
        if self._submitted:
            raise Submitted
        raise Interrupted

    def _shield(self) -> None:
        if self._get_ident() == self._main:
            self._shielded += 1

    def _unshield(self) -> None:
        if self._get_ident() == self._main:
            self._shielded -= 1
            if self._pending and not self._shielded:
                self._raise_interrupt()

    # -- the channel

    def _send(self, header: dict[str, Any], body: bytes | None = None) -> None:
        data = memoryview(encode(header, body))
        with self._sending:
            while data:
                data = data[os.write(CHANNEL_OUT, data) :]

    def _wait(self, number: int, waiter: Waiter) -> tuple[dict[str, Any], bytes | None]:
        """Blocks until the waiter's frame is there, reading for every other waiter meanwhile if nobody does."""
        try:
            self._shield()
            try:
                with self._lock:
                    waiter.waiting = True
                    if not self._reading:
                        self._reading = waiter.duty = True
            finally:
                self._unshield()
            while waiter.frame is None:
                if not waiter.duty:
                    waiter.event.acquire()
                    continue
                if self._running:
                    self._poll.poll()  # where an interrupt may raise; reading must not be torn by one
                self._shield()
                try:
                    self._read()
                finally:
                    self._unshield()
            return waiter.frame
        finally:
            self._shield()
            try:
                with self._lock:
                    self._waiters.pop(number, None)
                    if waiter.duty:
                        heir = next((w for w in self._waiters.values() if w.waiting and w.frame is None), None)
                        self._reading = heir is not None
                        if heir is not None:
                            heir.duty = True
                            heir.wake()
            finally:
                self._unshield()

    def _read(self) -> None:
        data = os.read(CHANNEL_IN, READ_SIZE)
        if not data:
            os._exit(0)  # the supervisor is gone
        for header, body in self._frames.feed(data):
            number = self.NEXT if header["op"] == "execute" else header["call"]
            with self._lock:
                waiter = self._waiters.get(number)
                if waiter is not None and (number == self.NEXT or header["token"] == self._token):
                    waiter.frame = (header, body)
                    waiter.wake()

    def _own_process(self, name: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{name} works in the code's own process only: hand the value back to it first")

    # -- what the code finds

    def _call_host(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._own_process(name)
        try:
            body = strict_json({"args": list(args), "kwargs": kwargs})
        except NotJson as error:
            raise TypeError(f"{name}: {error}") from None
        if len(body) > CALL_LIMIT:
            raise ValueError(f"{name} was given {len(body):,} bytes, more than {CALL_LIMIT:,}: pass a path instead")
        waiter = Waiter()
        self._shield()
        try:
            with self._lock:
                self._calls += 1
                number = self._calls
                self._waiters[number] = waiter
            self._send({"op": "call", "token": self._token, "call": number, "name": name}, body)
        finally:
            self._unshield()
        _, answer = self._wait(number, waiter)
        reply = loads((answer or b"{}").decode("utf-8"))
        if "error" in reply:
            raise self._host_error(reply["error"])
        return reply["value"]

    @staticmethod
    def _host_error(error: dict[str, str]) -> BaseException:
        import builtins

        kind: Any = getattr(builtins, error["type"], None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            try:
                return kind(error["message"])
            except TypeError:
                pass  # a type that wants more than a message
        return ToolError(f"{error['type']}: {error['message']}")

    def _tool(self, name: str) -> Callable[..., Any]:
        def tool(*args: Any, **kwargs: Any) -> Any:
            return self._call_host(name, args, kwargs)

        tool.__name__ = tool.__qualname__ = name
        return tool

    def _submit(
        self, token: str, values: tuple[Any, ...], fields: dict[str, Any], expected: list[dict[str, str]] | None
    ) -> None:
        self._own_process("SUBMIT")
        if token != self._token:
            raise Submitted  # from a thread that an earlier execution left behind
        if expected is None:
            if len(values) > 1:
                raise SubmitError(f"SUBMIT takes one positional value, or fields by name; it was given {len(values)}")
            if values:
                if "output" in fields:
                    raise SubmitError("SUBMIT was given 'output' twice, by position and by name")
                fields = {"output": values[0], **fields}
        else:
            fields = self._match(values, fields, expected)
        try:
            body = strict_json(fields)
        except NotJson as error:
            raise SubmitError(str(error)) from None
        if len(body) > SUBMIT_LIMIT:
            raise SubmitError(
                f"SUBMIT was given {len(body):,} bytes of JSON, more than the {SUBMIT_LIMIT:,} that it takes: "
                "save the data to the volume with save_to_volume and submit its path"
            )
        self._shield()
        try:
            with self._lock:
                first, self._submitted = not self._submitted, True
            if first:
                self._send({"op": "submit", "token": self._token}, body)
        finally:
            self._unshield()
        if self._get_ident() != self._main:
            signal.pthread_kill(self._main, signal.SIGINT)
            raise SystemExit  # which is how a thread ends without a word
        raise Submitted

    @staticmethod
    def _match(values: tuple[Any, ...], fields: dict[str, Any], expected: list[dict[str, str]]) -> dict[str, Any]:
        names = [field["name"] for field in expected]
        wanted = "SUBMIT takes " + ", ".join(names)
        if len(values) > len(names):
            raise SubmitError(f"{wanted}; it was given {len(values)} positional values")
        matched = dict(zip(names, values))
        for name, value in fields.items():
            if name not in names:
                raise SubmitError(f"{wanted}; there is no field {name!r}")
            if name in matched:
                raise SubmitError(f"SUBMIT was given {name!r} twice, by position and by name")
            matched[name] = value
        missing = [name for name in names if name not in matched]
        if missing:
            raise SubmitError(f"{wanted}; missing: {', '.join(missing)}")
        kinds: dict[str, Any] = {
            "str": str, "int": int, "float": (int, float), "bool": bool, "list": (list, tuple), "dict": dict,
        }  # fmt: skip
        for field in expected:
            value, kind = matched[field["name"]], field.get("type", "")
            wrong_bool = isinstance(value, bool) and kind in ("int", "float")
            if kind in kinds and (wrong_bool or not isinstance(value, kinds[kind])):
                raise SubmitError(f"the field {field['name']!r} must be {kind}, not {type(value).__name__}")
        return {name: matched[name] for name in names}

    # -- running

    def run(self, token: str, body: bytes) -> None:
        """One execution, from its body to its end frame. Never raises."""
        self._token, self._submitted, self._pending = token, False, False
        self._source, self._compiled = "", False
        self._sources += 1
        self._name = CODE_NAME if self._sources == 1 else f"<code {self._sources}>"
        if self._reserve is None:
            try:
                self._reserve = bytes(RESERVE)  # and no bytearray, which would be filled, page after page
            except MemoryError:
                pass
        outcome: dict[str, Any] | None = None
        try:
            try:
                self._running = True
                self._execute(body)
            finally:
                self._running = False
        except Submitted:
            pass
        except SystemExit as error:
            if error.code is not None and error.code != 0:
                outcome = self._describe(error)
        except BaseException as error:
            self._reserve = None
            outcome = self._describe(error)
        if os.getpid() != self._pid:
            # A process that the code forked has come to the end of the code: not the end of the execution.
            if outcome is not None:
                os.write(2, outcome["traceback"].encode("utf-8", "replace"))
            self._flush()
            os._exit(0 if outcome is None else outcome["exit_code"] or 1)
        self._flush()
        self._report_files()
        status = "finished" if outcome is None or self._submitted else "error"
        self._send({"op": "end", "token": token, "status": status}, dumps(outcome).encode("utf-8", "replace"))

    def _report_files(self) -> None:
        if self._volume.root is not None:
            files = self._volume.written()
            if files:
                self._send({"op": "files", "token": self._token}, dumps(files).encode("utf-8", "replace"))

    def _execute(self, body: bytes) -> None:
        self._volume.begin()
        request = loads(body.decode("utf-8"))
        namespace = self._module.__dict__
        token, expected = self._token, request["output_fields"]

        def submit(*values: Any, **fields: Any) -> None:
            """Ends the execution and hands the fields back."""
            self._submit(token, values, fields, expected)

        submit.__name__ = submit.__qualname__ = "SUBMIT"
        namespace.update(self._provided(request["queries"]))
        for name in request["names"]:
            namespace[name] = self._tool(name)
        namespace["SUBMIT"] = submit
        namespace.update(request["variables"])
        for name, path in request.get("files", {}).items():
            namespace[name] = self._from_file(path)
        self._source = request["code"]
        self._shown[self._name] = self._source
        if len(self._shown) > SOURCES:
            del self._shown[next(iter(self._shown))]
        code = compile(self._source, self._name, "exec", dont_inherit=True)
        self._compiled = True
        gc.enable()
        exec(code, namespace)
        if self._stateless and os.getpid() == self._pid:
            self._end_as_a_script()

    def _provided(self, asks: bool) -> dict[str, Any]:
        """The names that every execution finds, made once; `asks` if there is a model behind the queries."""
        if asks not in self._names:
            queries = Queries(self._call_host if asks else None)
            self._names[asks] = {**self._volume.names(), **queries.names()}
        return self._names[asks]

    @staticmethod
    def _from_file(path: str) -> Any:
        """The value of a variable that was too large for a frame; the file is not the code's and goes."""
        with open(path, "rb") as file:
            value = loads(file.read().decode("utf-8"))
        try:
            os.unlink(path)
        except OSError:
            pass
        return value

    @staticmethod
    def _end_as_a_script() -> None:
        """Waits for the threads that the code started, and runs what it registered for its exit."""
        threading: Any = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        import atexit

        atexit._run_exitfuncs()  # type: ignore[reportPrivateUsage]

    def _flush(self) -> None:
        for stream in {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}:
            try:
                if stream is not None:
                    stream.flush()
            except BaseException:  # the code may have put anything there, or closed it
                pass

    def _describe(self, error: BaseException) -> dict[str, Any]:
        kind = "code"
        line = self._line(error)  # before the traceback is trimmed
        if isinstance(error, MemoryError):
            kind = "memory"
            self._release(error)
        elif isinstance(error, SubmitError):
            kind = "submit"
        elif isinstance(error, VolumeError):
            kind = "volume"
        elif isinstance(error, Interrupted):
            kind = "interrupted"
        elif isinstance(error, SystemExit):
            kind = "exit"
        elif not self._compiled and isinstance(error, (SyntaxError, ValueError, RecursionError, OverflowError)):
            kind = "syntax"
        try:
            message = str(error)
        except BaseException:
            message = "(its message could not be read)"
        try:
            text = self._traceback(error)
        except BaseException as failure:
            text = f"(the traceback could not be made: {type(failure).__name__})"
        code: Any = error.code if isinstance(error, SystemExit) else None
        return {
            "kind": kind,
            "type": type(error).__qualname__,
            "message": message[:TRACEBACK_LIMIT],
            "traceback": text,
            "exit_code": code if type(code) is int and abs(code) < 1 << 31 else None,
            "line": line,
        }

    def _release(self, error: BaseException) -> None:
        """Lets go of what filled the memory, so that there is some to report with."""
        if self._stateless:
            self._module.__dict__.clear()
        trace = error.__traceback__
        while trace is not None:
            try:
                trace.tb_frame.clear()
            except RuntimeError:
                pass  # a frame that is still running: the driver's own
            trace = trace.tb_next

    def _line(self, error: BaseException) -> int | None:
        """The line of the code that failed: the innermost that is the code's own."""
        if isinstance(error, SyntaxError) and not self._compiled:
            return error.lineno
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._name:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def _traceback(self, error: BaseException) -> str:
        import linecache
        import traceback

        for name, source in self._shown.items():
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        trace = error.__traceback__
        mine = Child.run.__code__.co_filename
        while trace is not None and trace.tb_frame.f_code.co_filename == mine:
            trace = trace.tb_next
        kept = trace
        last: Any = None
        while trace is not None:  # and the driver's frames at the other end: SUBMIT's, a tool's, the interrupt's
            if trace.tb_frame.f_code.co_filename == mine:
                break
            last, trace = trace, trace.tb_next
        if last is not None:
            last.tb_next = None
        text = "".join(traceback.format_exception(type(error), error, kept))
        if len(text) > TRACEBACK_LIMIT:
            half = TRACEBACK_LIMIT // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
        return text

    def serve(self, confinement: Confinement) -> NoReturn:
        """Waits for an execution. The process ends with a stateless one; a context's others follow on its globals."""
        waiter = self._waiters[self.NEXT] = Waiter()
        header, body = self._wait(self.NEXT, waiter)
        confinement.unveil()
        self._stateless = header["once"]
        while True:
            waiter = self._waiters[self.NEXT] = Waiter()  # before the end of this one is known to anyone
            self.run(header["token"], body or b"{}")
            if self._stateless:
                self._end()
            header, body = self._wait(self.NEXT, waiter)

    def _end(self) -> NoReturn:
        """Ends the process as a script's would."""
        try:
            self._module.__dict__.clear()  # closes, and so writes out, the files that the code left open
        finally:
            os._exit(0)


# ------------------------------------------------------------------------------------------ inside a child: queries


CONTEXT_INLINE = 32 * 1024  # characters of a query's context that go by the wire; a longer one goes by a file
PREVIEW = 1000  # characters of a context that a model is shown


class QueryError(RuntimeError):
    """No model answered. Of a batch: `results` and `errors` are the answers and the errors by index."""

    __module__ = "builtins"  # tracebacks name it as the code knows it

    def __init__(
        self, message: str, results: dict[int, str] | None = None, errors: dict[int, Exception] | None = None
    ) -> None:
        super().__init__(message)
        self.results = {} if results is None else results
        self.errors = {} if errors is None else errors


class BudgetExceeded(QueryError):
    """The query would take more calls, tokens or money than there are left."""

    __module__ = "builtins"


class DepthExceeded(QueryError):
    """A recursive query below the greatest depth."""

    __module__ = "builtins"


class DeadlineExceeded(QueryError):
    """The time for queries is over."""

    __module__ = "builtins"


QUERY_ERRORS = {kind.__name__: kind for kind in (QueryError, BudgetExceeded, DepthExceeded, DeadlineExceeded)}
QUERIES = ("llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched")


class Queries:
    """The functions by which code asks its host, which asks a model; `call` calls the host's function of a name."""

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None) -> None:
        self._call = call

    def names(self) -> dict[str, Any]:
        """What the code finds."""
        found: dict[str, Any] = dict(QUERY_ERRORS)
        for name in QUERIES:
            function = getattr(self, "_" + name)

            def query(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            query.__name__ = query.__qualname__ = name
            query.__doc__ = function.__doc__
            found[name] = query
        return found

    def _llm_query(self, prompt: str) -> str:
        """A model's answer to the prompt."""
        return self._one("llm_query", prompt, {})

    def _rlm_query(self, prompt: str, *, context: str = "") -> str:
        """The answer of a recursive language model, which has Python of its own and finds the text as `context`."""
        with Context("rlm_query", context) as given:
            return self._one("rlm_query", prompt, {"context": given})

    def _llm_query_batched(
        self, prompts: list[str], *, concurrency: int | None = None, on_error: str = "raise"
    ) -> list[Any]:
        """The answers to the prompts, in their order."""
        return self._many("llm_query_batched", prompts, concurrency, on_error, {})

    def _rlm_query_batched(
        self, prompts: list[str], *, concurrency: int | None = None, on_error: str = "raise", context: str = ""
    ) -> list[Any]:
        """The answers of recursive language models to the prompts, in their order."""
        with Context("rlm_query_batched", context) as given:
            return self._many("rlm_query_batched", prompts, concurrency, on_error, {"context": given})

    def _one(self, name: str, prompt: str, more: dict[str, Any]) -> str:
        if not isinstance(prompt, str):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: the prompt is a {type(prompt).__name__}: it is a text")
        found = self._ask(name, [prompt], {"concurrency": None, **more})[0]
        if isinstance(found, Exception):
            raise found
        return found

    def _many(
        self, name: str, prompts: list[str], concurrency: int | None, on_error: str, more: dict[str, Any]
    ) -> list[Any]:
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):  # type: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name}: concurrency is {concurrency!r}: it is 1 or more, or None for the host's own")
        if on_error not in ("raise", "return"):
            raise ValueError(f"{name}: on_error is {on_error!r}: it is 'raise' or 'return'")
        if isinstance(prompts, str):
            raise TypeError(f"{name}: prompts is one text: it is a list of texts")
        prompts = list(prompts)
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):  # type: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name}: prompts[{index}] is a {type(prompt).__name__}: it is a text")
        if not prompts:
            return []
        found = self._ask(name, prompts, {"concurrency": concurrency, **more})
        errors = {index: answer for index, answer in enumerate(found) if isinstance(answer, Exception)}
        if errors and on_error == "raise":
            results = {index: answer for index, answer in enumerate(found) if index not in errors}
            kinds = {type(error) for error in errors.values()}
            first = min(errors)
            raise (kinds.pop() if len(kinds) == 1 else QueryError)(
                f"{len(errors)} of {len(found)} queries failed, first number {first}: {errors[first]} -- the answers "
                "are in this error's .results, the errors in its .errors, by index; on_error='return' returns both",
                results,
                errors,
            )
        return found

    def _ask(self, name: str, prompts: list[str], more: dict[str, Any]) -> list[Any]:
        """Answers, and errors that have not been raised."""
        if self._call is None:
            raise QueryError(f"{name} has no model to ask: pass language_model= where the code is run")
        return [
            QUERY_ERRORS[reply["error"]](reply["message"]) if "error" in reply else reply["answer"]
            for reply in self._call(name, (prompts,), more)
        ]


class Context:
    """A query's context as the host is told of it: the text, or the file in this sandbox that it has been put in.

    A long text need not leave the sandbox: the model's Python that reads it runs here too.
    """

    def __init__(self, name: str, text: str) -> None:
        if not isinstance(text, str):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: context is a {type(text).__name__}: it is a text")
        self._text = text
        self._path = ""

    def __enter__(self) -> dict[str, Any]:
        if len(self._text) <= CONTEXT_INLINE:
            return {"text": self._text}
        import tempfile

        fd, self._path = tempfile.mkstemp(prefix="context-", suffix=".txt")
        with open(fd, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(self._text)
        preview = self._text[:PREVIEW].encode("utf-8", "replace").decode("utf-8")
        return {"path": self._path, "length": len(self._text), "preview": preview}

    def __exit__(self, *_: object) -> None:
        if self._path:
            try:
                os.unlink(self._path)
            except OSError:
                pass  # the code may have removed it


# ------------------------------------------------------------------------------------------------------- the supervisor


class Stream:
    """One of an execution's output streams: its first half goes out as it comes, its last half is kept."""

    def __init__(self, cap: int) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._head = cap // 2
        self._cap = cap - cap // 2
        self._tail = ""
        self.dropped = 0  # characters

    def feed(self, data: bytes, final: bool = False) -> str:
        """What may be sent now."""
        text = self._decoder.decode(data, final)
        now = text[: self._head]
        self._head -= len(now)
        self._tail += text[len(now) :]
        if len(self._tail) > 2 * self._cap:
            self._trim()
        return now

    def finish(self) -> tuple[str, str]:
        """What the decoder still held that belongs to the first half, and the last half."""
        now = self.feed(b"", final=True)
        self._trim()
        return now, self._tail

    def _trim(self) -> None:
        over = len(self._tail) - self._cap
        if over > 0:
            self.dropped += over
            self._tail = self._tail[over:]


class Execution:
    """One execution under way."""

    def __init__(self, number: int, timeout: float | None, cap: int, secret: str) -> None:
        self.id = number
        self.token = f"{secret}.{number}"
        self.timeout = timeout
        self.deadline: float | None = None
        self.begin()
        self.kill_at: float | None = None
        self.interrupt_again = False
        self.cause = ""  # why we ended it: timeout, cancelled, channel
        self.submitted: bytes | None = None
        self.status = ""  # what the child said last
        self.outcome: bytes | None = None
        self.files: bytes | None = None  # that it wrote on the volume
        self.cap = cap
        self.streams: dict[str, Stream] = {}  # of those that it has written to

    def begin(self) -> None:
        """Starts its clock."""
        self.started = time.monotonic()
        self.deadline = None if self.timeout is None else self.started + self.timeout


class Process:
    """A child, seen from the supervisor."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.context: str | None = None
        self.execution: Execution | None = None
        self.waiting: list[tuple[Execution, bytes]] = []
        self.reads = self.writes = -1  # our ends of its channel
        self.outputs: dict[str, int] = {}
        self.unconfined: bytes | None = None  # why it could not be confined, if so
        self.frames = Frames(CALL_LIMIT)
        self.backlog = bytearray()
        self.broken = ""  # what was wrong with what it wrote to its channel


class Commit:
    """The command that commits the volume after an execution, and the end that waits for it."""

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header, self.body = header, body
        self.errors = -1  # our end of its standard error
        self.deadline = time.monotonic() + COMMIT_LIMIT
        self.late = False


def widen(fd: int, size: int) -> None:
    """Asks for a pipe of that many bytes, so that what is large takes few turns of the loop."""
    try:
        fcntl.fcntl(fd, 1031, size)  # F_SETPIPE_SZ, which has a name from Python 3.10 on
    except OSError:
        pass  # a smaller pipe is slower, not wrong


class Supervisor:
    """The loop that keeps the wire and the children."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._outputs: set[int] = set()  # descriptors of the children's output
        self._frames = Frames()
        self._backlog = bytearray()
        self._sent = 0
        self._heard = -1
        self._processes: dict[int, Process] = {}
        self._commits: dict[int, Commit] = {}
        self._contexts: dict[str, Process] = {}
        self._spare: Process | None = None  # confined and waiting, for the next execution
        self._lost: dict[str, str] = {}
        self._confinement: Confinement | None = None
        self._settings: dict[str, Any] = {}
        self._cap = 0
        self._beat: float | None = None
        self._silence = 0.0
        self._expires: float | None = None
        self._last_sent = self._last_heard = time.monotonic()
        self._paused = False
        self._warm = False
        self._executions = 0
        self._secret = os.urandom(12).hex()
        self._memory_kills = 0
        self._done = False

    def run(self, first: bytes = b"") -> None:
        """Serves until the host says stop, closes the wire or falls silent. `first` came before the wire was there."""
        wake_reads, wake_writes = os.pipe()
        for fd in (wake_reads, wake_writes, self._reads, self._writes):
            os.set_blocking(fd, False)
        gc.disable()  # a collection touches every page that a child would otherwise share
        signal.set_wakeup_fd(wake_writes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.signal(signal.SIGTERM, self._on_term)
        self._wake = (wake_reads, wake_writes)
        self._watch(wake_reads, self._on_signal)
        self._watch(self._reads, self._on_wire)
        try:
            self._take_frames(first)
            while not self._done:
                events = self._poll.poll(self._until_next())
                if len(events) > 1:
                    # What a context has written before it said that it is done is ready with that, and goes first.
                    events.sort(key=lambda event: event[0] not in self._outputs)
                for fd, _event in events:
                    handler = self._handlers.get(fd)
                    if handler is not None:
                        handler()
                self._tick()
                if not events and not self._warm and not self._processes:
                    self._warm_up()
        finally:
            self._end_everything()

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _warm_up(self) -> None:
        """Imports, while nothing else is to be done, what most code and every traceback needs; children inherit it.

        Where a sandbox runs one execution it would cost as much as the rest of the driver's life.
        """
        self._warm = True
        for name in ("json", "signal", "traceback", "linecache"):
            __import__(name)
        gc.collect()
        gc.freeze()

    # -- time

    def _until_next(self) -> float | None:
        """Seconds until something is due."""
        moments: list[float] = []
        if not self._warm and not self._processes and self._settings:
            moments.append(time.monotonic() + IDLE)
        if self._beat is not None:
            moments += [self._last_sent + self._beat, self._last_heard + self._silence]
        if self._expires is not None:
            moments.append(self._expires)
        for process in self._processes.values():
            execution = process.execution
            if execution is not None:
                due = execution.kill_at if execution.kill_at is not None else execution.deadline
                if due is not None:
                    moments.append(due)
        moments += [commit.deadline for commit in self._commits.values()]
        if not moments:
            return None
        return min(max(0.0, min(moments) - time.monotonic()), LONGEST_WAIT)

    def _tick(self) -> None:
        if self._beat is None and self._expires is None and not self._processes and not self._commits:
            return
        now = time.monotonic()
        if self._beat is not None:
            if now >= self._last_heard + self._silence:
                self._done = True  # the host is gone, and the sandbox must become idle for its provider to end it
            elif now >= self._last_sent + self._beat:
                self._send({"op": "beat", "id": 0})
        if self._expires is not None and now >= self._expires:
            self._done = True
        for process in list(self._processes.values()):
            execution = process.execution
            if execution is None:
                continue
            if execution.kill_at is not None:
                if now >= execution.kill_at:
                    execution.kill_at = now + INTERRUPT_GRACE
                    if execution.interrupt_again:
                        execution.interrupt_again = False
                        self._signal(process.pid, signal.SIGINT)
                    else:
                        self._kill(process)
            elif execution.deadline is not None and now >= execution.deadline:
                self._stop(process, execution, "timeout")
        for pid, commit in self._commits.items():
            if now >= commit.deadline:
                commit.late, commit.deadline = True, now + INTERRUPT_GRACE
                self._signal(pid, signal.SIGKILL)

    def _stop(self, process: Process, execution: Execution, cause: str) -> None:
        """Interrupts an execution, so that it can say where it was and a context keeps its state; then kills it."""
        if execution.submitted is None:
            execution.cause = execution.cause or cause
        execution.deadline = None
        if cause == "cancelled" and process.context is None:
            self._kill(process)
            execution.kill_at = time.monotonic() + INTERRUPT_GRACE
            return
        self._signal(process.pid, signal.SIGINT)
        execution.kill_at = time.monotonic() + INTERRUPT_GRACE
        # Python drops what is raised in a finalizer, and the state is worth a second try.
        execution.interrupt_again = process.context is not None

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    def _kill(self, process: Process) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # a child is the leader of a session of its own
        except (ProcessLookupError, PermissionError):
            pass
        self._signal(process.pid, signal.SIGKILL)

    # -- the wire

    def _send(self, header: dict[str, Any], body: bytes | None = None) -> None:
        self._sent += 1
        header["n"] = self._sent
        self._last_sent = time.monotonic()
        if body is not None:
            if len(body) < 2:
                body += b" "  # a wire that marks lines may hold one back that is shorter than its marks
            elif len(body) > FILE_ABOVE and self._settings.get("files"):
                body = self._put_in_file(header, body)
        self._backlog += encode(header, body)
        self._flush_wire()

    def _put_in_file(self, header: dict[str, Any], body: bytes) -> bytes | None:
        """Leaves the body in a file that the header names; returns what has to go on the wire nonetheless."""
        path = f"{self._settings['files']}/out.{self._secret}.{self._sent}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                view = memoryview(body)
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
        except OSError:
            return body  # a full disk: slower, not wrong
        header["file"] = path
        return None

    @staticmethod
    def _take_from_file(path: str) -> bytes:
        with open(path, "rb") as file:
            body = file.read()
        os.unlink(path)
        return body

    def _say(self, execution: Execution, stream: str, text: str, dropped: int = 0) -> None:
        """Hands on what the code has written; `dropped` characters before it are not."""
        header = {"op": "output", "id": execution.id, "stream": stream, "dropped": dropped}
        self._send(header, dumps(text).encode("utf-8", "replace"))

    def _flush_wire(self) -> None:
        if self._backlog and self._write(self._writes, self._backlog) is None:
            self._done = True
            return
        watched = self._writes in self._handlers
        if self._backlog and not watched:
            self._handlers[self._writes] = self._flush_wire
            self._poll.register(self._writes, select.EPOLLOUT)
        elif not self._backlog and watched:
            self._unwatch(self._writes)
        if not self._paused and len(self._backlog) > BACKLOG_LIMIT:
            self._paused = True
            for process in self._processes.values():
                self._unwatch(process.reads)
        elif self._paused and not self._backlog:
            self._paused = False
            for process in self._processes.values():
                self._watch(process.reads, lambda process=process: self._on_channel(process))

    @staticmethod
    def _write(fd: int, backlog: bytearray) -> int | None:
        """Writes what the other side takes; None if it is gone."""
        done = 0
        view = memoryview(backlog)
        try:
            while done < len(view):
                done += os.write(fd, view[done:])
        except BlockingIOError:
            pass
        except OSError:
            return None
        finally:
            view.release()
            del backlog[:done]
        return done

    def _on_wire(self) -> None:
        try:
            data = os.read(self._reads, READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            self._done = True
            return
        self._last_heard = time.monotonic()
        self._take_frames(data)

    def _take_frames(self, data: bytes) -> None:
        for header, body in self._frames.feed(data):
            if header["n"] <= self._heard:
                continue
            self._heard = header["n"]
            if "file" in header:
                body = self._take_from_file(header["file"])
            getattr(self, "_op_" + header["op"])(header, body)

    def _op_start(self, _header: dict[str, Any], body: bytes) -> None:
        settings = self._settings = loads(body.decode("utf-8"))
        self._cap = settings["output_cap"]
        self._beat = settings["heartbeat"]
        self._silence = settings["silence"]
        if settings["lifetime"] is not None:
            self._expires = time.monotonic() + settings["lifetime"]
        settings["cwd"] = os.path.abspath(settings["cwd"])
        os.chdir(settings["cwd"])
        self._confinement = Confinement(settings["confinement"])
        self._confinement.supervise()
        os.environ.update(settings["environment"])  # here once, and inherited
        sys.path += settings["path"]
        self._memory_kills = self._count_memory_kills()
        self._send({"op": "ready", "id": 0, "pid": os.getpid(), "python": sys.version.split()[0]})
        # The first compilation of a process makes a hundred types, a millisecond that each child would take.
        compile("0", CODE_NAME, "exec")

    def _op_beat(self, _header: dict[str, Any], _body: bytes | None) -> None:
        pass  # any frame counts as a sign of life

    def _op_stop(self, _header: dict[str, Any], _body: bytes | None) -> None:
        self._done = True

    def _op_execute(self, header: dict[str, Any], body: bytes) -> None:
        self._executions += 1
        if self._executions == 2 and not self._warm:
            self._warm_up()  # a sandbox that is used twice is likely to be used a hundred times
        execution = Execution(header["id"], header["timeout"], self._cap, self._secret)
        context: str | None = header["context"]
        if context in self._lost:
            self._refuse(execution, "lost", self._lost[context])
            return
        process = self._contexts.get(context) if context is not None else None
        if process is not None and process.execution is not None:
            process.waiting.append((execution, body))  # the last was cancelled, and is about to end
            return
        if process is None:
            process, self._spare = self._spare, None
        try:
            if process is None:
                process = self._fork()
        except OSError as error:
            self._refuse(execution, "setup", f"no process could be made for the code: {error.strerror}")
            return
        if context is not None:
            process.context = context
            self._contexts[context] = process
        self._begin(process, execution, body)
        if context is None and self._executions > 1 and self._spare is None:
            # While this one runs: the making of its process is half of what a short execution takes.
            try:
                self._spare = self._fork()
            except OSError:
                pass  # the next execution says so, if it is still the case

    def _begin(self, process: Process, execution: Execution, body: bytes) -> None:
        """Hands an execution to a child that is free."""
        execution.begin()
        process.execution = execution
        if process.unconfined is not None:
            execution.status, execution.outcome = "unconfined", process.unconfined
        if len(body) > READ_SIZE:
            widen(process.writes, CONTEXT_PIPE)
        header = {"op": "execute", "token": execution.token, "once": process.context is None}
        self._tell(process, encode(header, body))

    def _refuse(self, execution: Execution, status: str, message: str) -> None:
        body = dumps({"message": message}).encode("utf-8")
        self._send({"op": "end", "id": execution.id, "status": status, "seconds": 0.0}, body)

    def _op_reply(self, header: dict[str, Any], body: bytes) -> None:
        process = self._process_of(header["id"])
        if process is not None and process.execution is not None:
            self._tell(process, encode({"op": "reply", "token": process.execution.token, "call": header["call"]}, body))

    def _op_cancel(self, header: dict[str, Any], _body: bytes | None) -> None:
        process = self._process_of(header["id"])
        if process is not None and process.execution is not None:
            self._stop(process, process.execution, "cancelled")
            return
        for process in self._processes.values():
            for waiting in process.waiting:
                if waiting[0].id == header["id"]:
                    process.waiting.remove(waiting)
                    self._refuse(waiting[0], "cancelled", "")
                    return

    def _op_forget(self, header: dict[str, Any], _body: bytes | None) -> None:
        process = self._contexts.pop(header["context"], None)
        self._lost.pop(header["context"], None)
        if process is not None:
            if process.execution is not None:
                process.execution.cause = process.execution.cause or "cancelled"
            self._kill(process)

    def _process_of(self, number: int) -> Process | None:
        for process in self._processes.values():
            if process.execution is not None and process.execution.id == number:
                return process
        return None

    # -- children

    def _fork(self) -> Process:
        """A child that is confined and waits for an execution. Raises OSError."""
        pipes: list[int] = []
        try:
            for _ in range(4):
                pipes += os.pipe()
            supervisor = os.getpid()
            pid = os.fork()
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        in_reads, in_writes, out_reads, out_writes, stdout_reads, stdout_writes, stderr_reads, stderr_writes = pipes
        if pid == 0:
            try:
                confinement = self._become_child(supervisor, (in_reads, out_writes, stdout_writes, stderr_writes))
                Child(self._settings).serve(confinement)
            except BaseException as error:
                os.write(2, f"the driver failed: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
            finally:
                os._exit(INHERIT_EXIT)
        for fd in (in_reads, out_writes, stdout_writes, stderr_writes):
            os.close(fd)
        for fd in (in_writes, out_reads, stdout_reads, stderr_reads):
            os.set_blocking(fd, False)
        process = Process(pid)
        process.reads, process.writes = out_reads, in_writes
        process.outputs = {"stdout": stdout_reads, "stderr": stderr_reads}
        self._processes[pid] = process
        self._outputs.update((stdout_reads, stderr_reads))
        self._watch(stdout_reads, lambda: self._drain(process, "stdout"))
        self._watch(stderr_reads, lambda: self._drain(process, "stderr"))
        if not self._paused:
            self._watch(out_reads, lambda: self._on_channel(process))
        return process

    def _become_child(self, supervisor: int, ends: tuple[int, int, int, int]) -> Confinement:
        """Leaves everything of the supervisor's behind. Ends the process if the confinement cannot be had."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        mine = self._descriptors()
        for fd in mine:
            os.close(fd)  # first, so that there are some left for what follows
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, CHANNEL_OUT + 1) for fd in ends]  # clear of where they go
        os.dup2(high[0], CHANNEL_IN, inheritable=False)
        os.dup2(high[1], CHANNEL_OUT, inheritable=False)
        os.dup2(high[2], 1)
        os.dup2(high[3], 2)
        assert self._confinement is not None
        try:
            self._confinement.enter(supervisor)
        except OSError as error:
            message = dumps({"message": f"the confinement could not be had: {error.strerror or error}"}).encode()
            os.write(CHANNEL_OUT, encode({"op": "end", "status": "setup"}, message))
            os._exit(0)
        os.closerange(CHANNEL_OUT + 1, max(*high, *mine, *ends) + 1)
        return self._confinement

    def _descriptors(self) -> list[int]:
        mine = [self._reads, self._writes, self._poll.fileno(), *self._wake]
        for process in self._processes.values():
            mine += [process.reads, process.writes, *process.outputs.values()]
        return mine + [commit.errors for commit in self._commits.values()]

    def _tell(self, process: Process, data: bytes) -> None:
        process.backlog += data
        self._flush_channel(process)

    def _flush_channel(self, process: Process) -> None:
        if self._write(process.writes, process.backlog) is None:
            process.backlog.clear()  # it is dead or dying: the kernel will say so
        watched = process.writes in self._handlers
        if process.backlog and not watched:
            self._handlers[process.writes] = lambda: self._flush_channel(process)
            self._poll.register(process.writes, select.EPOLLOUT)
        elif not process.backlog and watched:
            self._unwatch(process.writes)

    def _drain(self, process: Process, stream: str) -> None:
        """Reads what is in an output pipe. What comes between two executions of a context belongs to neither.

        Never more at a time than a pipe holds: who writes without end shall not keep the others waiting.
        """
        for _ in range(16):
            try:
                data = os.read(process.outputs[stream], READ_SIZE)
            except BlockingIOError:
                return
            if not data:
                self._unwatch(process.outputs[stream])
                return
            if process.execution is not None:
                streams = process.execution.streams
                if stream not in streams:
                    streams[stream] = Stream(process.execution.cap)
                text = streams[stream].feed(data)
                if text:
                    self._say(process.execution, stream, text)
            if len(data) < READ_SIZE:
                return

    def _on_channel(self, process: Process) -> None:
        try:
            data = os.read(process.reads, READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            self._unwatch(process.reads)  # not an end: the kernel tells when the child has ended
            return
        self._take(process, data)

    def _take(self, process: Process, data: bytes) -> None:
        if process.broken:
            return
        try:
            for header, body in process.frames.feed(data):
                self._from_child(process, header, body)
        except BadFrame as error:
            process.broken = str(error)
            if process.execution is not None and process.execution.submitted is None:
                process.execution.cause = process.execution.cause or "channel"
            self._kill(process)

    def _from_child(self, process: Process, header: dict[str, Any], body: bytes | None) -> None:
        op, execution = header.get("op"), process.execution
        if body is None or b"\n" in body or op not in ("submit", "call", "files", "end"):
            raise BadFrame(f"a frame of kind {op!r} that is none of a child's")
        if op != "call" and len(body) > (SUBMIT_LIMIT if op == "submit" else OUTCOME_LIMIT):
            raise BadFrame(f"an outcome of {len(body):,} bytes")
        if op == "end" and header.get("status") == "setup":
            # The child's own word, and it may be the code that speaks: nothing is tried again because of it.
            process.unconfined = body
            if execution is not None and not execution.status:
                execution.status, execution.outcome = "unconfined", body
            return
        if execution is None or header.get("token") != execution.token:
            return  # from a thread that an earlier execution left behind
        if op == "call":
            number, name = header.get("call"), header.get("name")
            if type(number) is not int or type(name) is not str:
                raise BadFrame("a call without a number or a name")
            self._send({"op": "call", "id": execution.id, "call": number, "name": name}, body)
        elif op == "submit":
            if execution.submitted is None and not execution.cause:
                execution.submitted = body
                execution.deadline = None
                execution.kill_at = time.monotonic() + SUBMIT_GRACE
        elif op == "files":
            execution.files = body
        else:
            status = header.get("status")
            if status not in ("finished", "error"):
                raise BadFrame(f"an end with the status {status!r}")
            if not execution.status:
                execution.status, execution.outcome = str(status), body
            if process.context is not None:
                self._finish(process, execution)

    # -- ends

    def _on_child(self, _number: int, _frame: object) -> None:
        pass  # the wake-up descriptor says it to the loop

    def _on_term(self, _number: int, _frame: object) -> None:
        self._done = True

    @staticmethod
    def _count_memory_kills() -> int:
        """How often this kernel has killed for want of memory; 0 where it does not say."""
        try:
            with open("/proc/vmstat") as file:
                return int(file.read().partition("oom_kill ")[2].partition("\n")[0])
        except (OSError, ValueError):
            return 0

    def _on_signal(self) -> None:
        try:
            while os.read(self._wake[0], 4096):
                pass
        except BlockingIOError:
            pass
        reaped = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            reaped = True
            process = self._processes.pop(pid, None)
            if process is not None:
                self._on_death(process, status)
            elif pid in self._commits:
                self._on_commit(self._commits.pop(pid), status)
        if reaped:
            self._sweep()

    def _on_death(self, process: Process, status: int) -> None:
        """The kernel says that a child has ended: with it, its execution."""
        try:
            while data := os.read(process.reads, READ_SIZE):
                self._take(process, data)
        except BlockingIOError:
            pass
        for stream in process.outputs:
            self._drain(process, stream)
        execution = process.execution
        if process is self._spare:
            self._spare = None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if process.context is not None and self._contexts.get(process.context) is process:
            del self._contexts[process.context]
            how = f"was killed by signal {number}" if number else f"exited with status {code}"
            self._lost[process.context] = f"the process that held the state {how}"
        if execution is not None:
            self._finish(process, execution, code, number)
        for waiting, _body in process.waiting:
            self._refuse(waiting, "lost", self._lost.get(process.context or "", "its context was forgotten"))
        self._outputs.difference_update(process.outputs.values())
        for fd in (process.reads, process.writes, *process.outputs.values()):
            self._unwatch(fd)
            os.close(fd)

    def _finish(
        self, process: Process, execution: Execution, code: int | None = None, number: int | None = None
    ) -> None:
        """Sends an execution's end. `code` and `number` are the child's exit status and signal where it has ended."""
        process.execution = None
        dropped: dict[str, int] = {}
        for name, stream in execution.streams.items():
            now, tail = stream.finish()
            if now:
                self._say(execution, name, now)
            if stream.dropped:
                dropped[name] = stream.dropped
            if tail:
                self._say(execution, name, tail, stream.dropped)
        if execution.files is not None:
            self._send({"op": "files", "id": execution.id}, execution.files)
        header: dict[str, Any] = {
            "op": "end", "id": execution.id, "seconds": time.monotonic() - execution.started, "dropped": dropped,
        }  # fmt: skip
        body = execution.outcome or b"null"
        if execution.submitted is not None:
            header["status"], body = "submitted", execution.submitted
        elif execution.cause:
            header["status"] = execution.cause
            if execution.cause == "channel":
                body = dumps({"message": process.broken}).encode("utf-8", "replace")
        elif execution.status:
            header["status"] = execution.status
        else:
            header["status"], header["exit_code"], header["signal"] = "crashed", code, number
            if number == signal.SIGKILL:
                kills, self._memory_kills = self._memory_kills, self._count_memory_kills()
                header["out_of_memory"] = self._memory_kills > kills
        ended = code is not None or number is not None
        if process.context is not None and ended:
            header["state_lost"] = True
        if self._settings["commit"]:
            self._commit(header, body)
        else:
            self._send(header, body)
        if process.waiting and not ended:
            self._begin(process, *process.waiting.pop(0))

    def _commit(self, header: dict[str, Any], body: bytes) -> None:
        """Starts the command that commits the volume; the end is sent when it has ended."""
        command: list[str] = self._settings["commit"]
        commit, writes = Commit(header, body), -1
        try:
            commit.errors, writes = os.pipe()
            os.set_blocking(commit.errors, False)
            actions = [(os.POSIX_SPAWN_DUP2, writes, 2)]
            self._commits[os.posix_spawnp(command[0], command, os.environ, file_actions=actions)] = commit
        except OSError as error:
            self._end_commit(commit, f"{command[0]} could not be started: {error.strerror}")
        if writes >= 0:
            os.close(writes)

    def _on_commit(self, commit: Commit, status: int) -> None:
        said = b""
        try:
            said = os.read(commit.errors, READ_SIZE)
        except BlockingIOError:
            pass
        complaint = said.decode("utf-8", "replace").strip()[-COMPLAINT_LIMIT:]
        if commit.late:
            complaint = f"{self._settings['commit'][0]} did not end within {COMMIT_LIMIT:.0f} s"
        self._end_commit(commit, (complaint or f"it ended with status {status}") if status else "")

    def _end_commit(self, commit: Commit, complaint: str) -> None:
        """Sends an execution's end. One that has failed says why it did, whatever became of its files."""
        if commit.errors >= 0:
            os.close(commit.errors)
        header, body = commit.header, commit.body
        if complaint and header["status"] in ("submitted", "finished"):
            header["status"], body = "commit", dumps({"message": complaint}).encode("utf-8", "replace")
        self._send(header, body)

    def _sweep(self) -> None:
        """Kills what an ended execution left running.

        A child adopts its own orphans while it lives, so a child of ours that we did not fork is one whose execution
        has ended. Bounded, because code may fork as fast as we kill: each death brings us back here.
        """
        for _ in range(50):
            strangers = [pid for pid in children() if pid not in self._processes and pid not in self._commits]
            if not strangers:
                return
            for pid in strangers:
                self._signal(pid, signal.SIGKILL)
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass

    def _end_everything(self) -> None:
        self._expires = self._beat = None
        for process in self._processes.values():
            self._kill(process)
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            self._processes, self._commits = {}, {}
            self._sweep()
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                time.sleep(0.005)


def children() -> list[int]:
    """The ids of this process's children, adopted ones among them."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        pass
    found: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == me:
                        found.append(int(name))
            except OSError:
                continue  # it ended meanwhile
    return found


def keep_watch() -> None:
    """Forks. The child returns, as the supervisor; the parent stays, and ends what that leaves behind if it is killed.

    For sandboxes that have no process namespace, where what code has moved to a session of its own would live on.
    """
    confinement = Confinement({})
    confinement.warn_of_death()
    confinement.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        return
    ended: list[int] = []

    def end(_number: int, _frame: object) -> None:
        """Comes once for each thread of the host that this process was handed on to when they ended."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    signal.signal(signal.SIGTERM, end)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)  # the wire is the supervisor's: its end has to be seen
    while pid not in ended:
        ended.append(os.waitpid(-1, 0)[0])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its id may be another's from now on
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            break
    os._exit(0)


def take_wire() -> tuple[int, int]:
    """The wire, moved from descriptors 0 and 1 to private ones; what reads or writes there later finds /dev/null."""
    reads = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    writes = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if null > 2:
        os.close(null)
    return reads, writes


def main(watched: bool = False, first: str = "") -> None:
    """Runs the driver on descriptors 0 and 1; `watched` by a process that outlives it, `first` frames given at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the host's terminal is the host's to handle
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if watched:
        keep_watch()
    try:
        Supervisor(*take_wire()).run(first.encode("utf-8"))
    except BrokenPipeError:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
