"""The collection of matching files that an execution created or changed in the working folder.

Code controls the folder and may still be running. So the collection follows no link, and sends a file only if it is the
one that was listed. A separate process collects the files. It is confined like the code, so it can read nothing that
the code could not read.
"""

from __future__ import annotations

import os
import stat

from ..wire.collection import (
    COLLECT_TIMEOUT_SECONDS,
    MAX_COLLECTED_DIRECTORIES,
    MAX_COLLECTED_FILES,
    MAX_DEPTH,
    MAX_REFUSALS,
    begin_steps,
    find_path_problem,
    is_literal,
    list_directories,
    parse_pattern,
    take_step,
)
from ..wire.frames import encode_frame
from ..wire.names import CODE_FILE_PREFIX, OWN_FILE_PREFIX
from ..wire.strict_json import dumps, loads
from .child.channel import CHANNEL_OUT
from .processes import describe_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..wire.collection import Steps
    from .child_process import ChildProcess, Execution

MAX_ENTRIES = 100_000  # entries of the folder to scan
PIECE_BYTES = 180_000  # bytes of a file per frame; a larger frame would go to the host as a file
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
KINDS = {
    stat.S_IFLNK: "a link, and links are not followed", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: f"more than {MAX_DEPTH} directories deep",
}  # fmt: skip
COLLECTOR_FRAMES = ("collect", "end")


class Refused(Exception):
    """An error for a file that is not collected. The message follows the file's name: "changed while it was read"."""


class Collection:
    """The files to collect from the calling process's working folder after one execution: new and changed ones.

    Create this object before the execution starts. `max_bytes` limits the total size of the collected files.
    """

    def __init__(self, patterns: list[str], max_bytes: int) -> None:
        self._patterns = [parse_pattern(pattern) for pattern in patterns]
        self._max_bytes = self._room_bytes = max_bytes
        self._token = ""
        self._files = self._refusals = 0
        self._directories: set[str] = set()
        self._is_cut = False  # the folder has more entries than MAX_ENTRIES
        self._before = {path: _describe(status) for path, status in self._find_matches().items()}

    def send(self, token: str) -> None:
        """Send each new or changed file in pieces on a child's channel, and the reason for each refused file."""
        self._token = token
        matches = self._find_matches()
        for pattern in self._patterns:
            if all(map(is_literal, pattern)):
                self._refuse_missing("/".join(pattern), matches)
        for path, listed in sorted(matches.items()):
            if self._before.get(path) == _describe(listed):
                continue
            try:
                self._send_file(path, listed)
            except Refused as reason:
                self._refuse(path, str(reason))
            except OSError as error:
                self._refuse(path, f"could not be read: {error.strerror}")
        if self._is_cut:
            self._refuse("", f"the working folder has more than {MAX_ENTRIES:,} entries, and the rest was not searched")
        if self._refusals > MAX_REFUSALS:
            self._send({"path": "", "reason": f"{self._refusals - MAX_REFUSALS:,} more files were not collected"})

    def _refuse_missing(self, path: str, matches: dict[str, os.stat_result]) -> None:
        """Report the path of a pattern without wildcards if nothing matches: the pattern may be mistyped."""
        for match in matches:
            if path == match or path.startswith(match + "/"):
                return
        if os.path.isdir(path):
            self._refuse(path, "is a directory: end the pattern with /**")
        else:
            self._refuse(path, "is not there")

    def _find_matches(self) -> dict[str, os.stat_result]:
        """Return the states of matching files by path, and of links and too deep directories, which are refused."""
        matches: dict[str, os.stat_result] = {}
        steps = {".": begin_steps(self._patterns)}  # keys: directories; values: the rests of the patterns
        entries = 0
        for folder, directories, files, fd in os.fwalk("."):
            names = [*directories, *files]
            directories.clear()  # `fwalk` enters only the directories that are added again
            entries += len(names)
            if entries > MAX_ENTRIES:
                self._is_cut = True
                break
            for name in names:
                steps_below = take_step(steps[folder], name)
                if not steps_below or name.startswith((OWN_FILE_PREFIX, CODE_FILE_PREFIX)):
                    continue
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile
                path = os.path.join(folder, name)
                if _is_match(path, status, steps_below):
                    matches[path.removeprefix("./")] = status
                elif stat.S_ISDIR(status.st_mode) and any(steps_below):
                    directories.append(name)
                    steps[path] = steps_below
        return matches

    def _send_file(self, path: str, listed: os.stat_result) -> None:
        """Send a file. Raises Refused if it may not be sent or is no longer the listed one, and OSError."""
        kind = KINDS.get(stat.S_IFMT(listed.st_mode))
        if kind is not None:
            raise Refused(f"is {kind}")
        problem = find_path_problem(path)
        if problem:
            raise Refused(problem)
        fd = os.open(path, FILE_FLAGS)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (listed.st_dev, listed.st_ino):
                raise Refused("was exchanged for something else meanwhile")
            self._count_file(path, status.st_size)
            unread = status.st_size
            piece = os.read(fd, PIECE_BYTES)
            while piece and unread > len(piece):
                self._send_piece(path, piece, is_last=False)
                unread -= len(piece)
                piece = os.read(fd, PIECE_BYTES)
            if unread != len(piece) or _describe(os.fstat(fd)) != _describe(status):
                raise Refused("changed while it was read")
            self._send_piece(path, piece, is_last=True)
        finally:
            os.close(fd)

    def _count_file(self, path: str, size: int) -> None:
        """Count a file against the limits of an execution. Raises Refused if it exceeds one."""
        if self._files >= MAX_COLLECTED_FILES:
            raise Refused(f"exceeds the {MAX_COLLECTED_FILES:,} files that an execution may collect")
        if size > self._room_bytes:
            raise Refused(
                f"has {size:,} bytes, and only {self._room_bytes:,} of {self._max_bytes:,} are left for "
                "this execution's files (disk_mib, and at most 1 GiB)"
            )
        directories = self._directories.union(list_directories(path))
        if len(directories) > MAX_COLLECTED_DIRECTORIES:
            raise Refused(f"exceeds the {MAX_COLLECTED_DIRECTORIES:,} directories that an execution may collect")
        self._directories = directories
        self._files += 1

    def _send_piece(self, path: str, data: bytes, is_last: bool) -> None:
        import binascii

        self._room_bytes -= len(data)
        self._send({"path": path, "data": binascii.b2a_base64(data, newline=False).decode("ascii"), "last": is_last})

    def _refuse(self, path: str, reason: str) -> None:
        """Report why a file is not sent; the host discards pieces of the file that were sent before."""
        self._refusals += 1
        if self._refusals <= MAX_REFUSALS:
            self._send({"path": path.encode("utf-8", "backslashreplace").decode("utf-8"), "reason": reason})

    def _send(self, fields: dict[str, Any]) -> None:
        body = dumps(fields).encode("utf-8", "replace")
        data = memoryview(encode_frame({"op": "collect", "token": self._token}, body))
        while data:
            data = data[os.write(CHANNEL_OUT, data) :]


def _is_match(path: str, status: os.stat_result, steps: Steps) -> bool:
    """Return whether to report an entry of a folder: a matching file, or a link or deep folder that may hide some.

    `steps` are the rests of the patterns after this path. An empty rest means a match.
    """
    if stat.S_ISDIR(status.st_mode):
        is_too_deep = path.count("/") > MAX_DEPTH
        may_have_matches = any(steps)
        return is_too_deep and may_have_matches
    return () in steps or stat.S_ISLNK(status.st_mode)


def _describe(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def encode_collected(number: int, reason: str) -> tuple[dict[str, Any], bytes]:
    """Return the frame that ends an execution's files. `reason` says why some are missing; it is empty if none is."""
    return {"op": "collected", "id": number}, dumps(reason).encode("utf-8", "replace")


def encode_collector_end(
    process: ChildProcess, sending: Execution, exit_code: int | None, signal_number: int | None
) -> tuple[dict[str, Any], bytes]:
    """Return the frame that ends an execution's files, for a collecting child with this exit code or signal."""
    reason = ""
    if process.unconfined is not None:
        reason = loads(process.unconfined.decode("utf-8"))["message"]
    elif sending.end_cause == "timeout":
        reason = f"it took more than {COLLECT_TIMEOUT_SECONDS:g} s"
    elif exit_code != 0:
        reason = f"the process that reads them {describe_end(exit_code, signal_number)}"
    return encode_collected(sending.id, reason)
