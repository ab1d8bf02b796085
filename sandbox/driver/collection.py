"""The collection of matching files that an execution created or changed in the working folder.

Code controls the folder and may still be running. So the collection follows no link on the way to a file, opens only
regular files, and checks again what it has opened. A separate process collects the files. It is confined like the code,
so it can read nothing that the code could not read.
"""

from __future__ import annotations

import errno
import os
import stat

from ..wire.collection import (
    MAX_COLLECTED_DIRECTORIES,
    MAX_COLLECTED_FILES,
    MAX_DEPTH,
    MAX_REFUSALS,
    begin_steps,
    find_path_problem,
    is_literal,
    is_match,
    list_directories,
    parse_pattern,
    take_step,
)
from ..wire.frames import encode_frame
from ..wire.names import CODE_FILE_PREFIX, OWN_FILE_PREFIX
from ..wire.strict_json import dumps
from .child.channel import CHANNEL_OUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..wire.collection import Steps

MAX_ENTRIES = 100_000  # entries of the folder to scan
PIECE_BYTES = 180_000  # bytes of a file per frame; a larger frame would go to the host as a file
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
KINDS = {
    stat.S_IFLNK: "a link, and links are not followed", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a directory: end the pattern with /**",
}  # fmt: skip


class Refused(Exception):
    """A file that is not collected. The message is the reason, as words that follow the file's name."""


class Collection:
    """The files to collect from the calling process's working folder after one execution.

    Create it before the execution starts: it records the files that exist then. `max_bytes` limits their total size.
    """

    def __init__(self, patterns: list[str], max_bytes: int) -> None:
        self._patterns = [parse_pattern(pattern) for pattern in patterns]
        self._max_bytes = max_bytes
        self._is_cut = False  # the folder has more entries than MAX_ENTRIES
        self._before = {path: _describe(status) for path, status in self._find_matches().items()}

    def send(self, token: str) -> None:
        """Send each new or changed file in pieces on a child's channel, and the reason for each refused file."""
        sender = _Sender(token, self._max_bytes)
        matches = self._find_matches()
        for pattern in self._patterns:
            path = "/".join(pattern)
            # A pattern without wildcards names one file, so report it if missing: it may be mistyped.
            if all(map(is_literal, pattern)) and not any(path == at or path.startswith(at + "/") for at in matches):
                sender.refuse(path, "is not there")
        changed = [path for path, status in sorted(matches.items()) if self._before.get(path) != _describe(status)]
        root = os.open(".", DIRECTORY_FLAGS)
        for path in changed:
            try:
                _send_file(root, path, matches[path], sender)
            except Refused as reason:
                sender.refuse(path, str(reason))
            except OSError as error:
                sender.refuse(path, f"could not be read: {error.strerror}")
        if self._is_cut:
            text = f"the working folder has more than {MAX_ENTRIES:,} entries, and the rest was not searched"
            sender.refuse("", text)
        sender.finish()

    def _find_matches(self) -> dict[str, os.stat_result]:
        """Return matching entries by path. Directories match only if a pattern names them or they are too deep."""
        matches: dict[str, os.stat_result] = {}
        self._left = MAX_ENTRIES
        try:
            root = os.open(".", DIRECTORY_FLAGS)
        except OSError:
            return matches
        self._look_into(root, "", begin_steps(self._patterns), matches)
        return matches

    def _look_into(self, fd: int, prefix: str, steps: Steps, matches: dict[str, os.stat_result]) -> None:
        """Add the matches in a directory and below it, and close its descriptor."""
        try:
            wanted = {step[0] for step in steps if step and is_literal(step[0])}
            names = set(wanted)
            if any(step and not is_literal(step[0]) for step in steps):
                names.update(self._list_names(fd))
            for name in sorted(names):
                below = take_step(steps, name)
                if not below or name.startswith((OWN_FILE_PREFIX, CODE_FILE_PREFIX)):
                    continue
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue  # missing, or removed meanwhile
                self._take_entry(fd, prefix, name, status, below, name in wanted, matches)
        except OSError:
            pass  # a directory that the code cannot open
        finally:
            os.close(fd)

    def _take_entry(
        self,
        fd: int,
        prefix: str,
        name: str,
        status: os.stat_result,
        below: Steps,
        is_wanted: bool,
        matches: dict[str, os.stat_result],
    ) -> None:
        path = prefix + name
        if not stat.S_ISDIR(status.st_mode):
            # A link may point to a directory with matches, so report it.
            if is_match(below) or stat.S_ISLNK(status.st_mode):
                matches[path] = status
            return
        if is_match(below) and is_wanted:
            matches[path] = status
        if not any(below):
            return
        if prefix.count("/") >= MAX_DEPTH:
            matches[path] = status
            return
        try:
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=fd)
        except OSError:
            return
        self._look_into(inner, path + "/", below, matches)

    def _list_names(self, fd: int) -> list[str]:
        names: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if self._left <= 0:
                    self._is_cut = True
                    break
                self._left -= 1
                names.append(entry.name)
        return names


class _Sender:
    """A sender of files and refusals, within the limits."""

    def __init__(self, token: str, max_bytes: int) -> None:
        self._token = token
        self._files = self._refusals = 0
        self._directories: set[str] = set()
        self._max_bytes = self.room_bytes = max_bytes

    def begin_file(self, path: str, size: int) -> None:
        """Count a file to send. Raises Refused if it exceeds a limit."""
        if self._files >= MAX_COLLECTED_FILES:
            raise Refused(f"exceeds the {MAX_COLLECTED_FILES:,} files that an execution may collect")
        if size > self.room_bytes:
            raise Refused(
                f"has {size:,} bytes, and only {self.room_bytes:,} of {self._max_bytes:,} are left for "
                "this execution's files (disk_mib, and at most 1 GiB)"
            )
        directories = self._directories.union(list_directories(path))
        if len(directories) > MAX_COLLECTED_DIRECTORIES:
            raise Refused(f"exceeds the {MAX_COLLECTED_DIRECTORIES:,} directories that an execution may collect")
        self._directories = directories
        self._files += 1

    def send_piece(self, path: str, data: bytes, is_last: bool) -> None:
        import binascii

        self.room_bytes -= len(data)
        self._send({"path": path, "data": binascii.b2a_base64(data, newline=False).decode("ascii"), "last": is_last})

    def refuse(self, path: str, reason: str) -> None:
        """Report why a file is not sent; the host discards pieces of the file that were sent before."""
        self._refusals += 1
        if self._refusals <= MAX_REFUSALS:
            self._send({"path": path.encode("utf-8", "backslashreplace").decode("utf-8"), "reason": reason})

    def finish(self) -> None:
        if self._refusals > MAX_REFUSALS:
            self._send({"path": "", "reason": f"{self._refusals - MAX_REFUSALS:,} more files were not collected"})

    def _send(self, fields: dict[str, Any]) -> None:
        body = dumps(fields).encode("utf-8", "replace")
        data = memoryview(encode_frame({"op": "collect", "token": self._token}, body))
        while data:
            data = data[os.write(CHANNEL_OUT, data) :]


def _describe(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change when a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _send_file(root: int, path: str, listed: os.stat_result, sender: _Sender) -> None:
    """Send one file. Raises Refused, or OSError if it cannot be read."""
    kind = KINDS.get(stat.S_IFMT(listed.st_mode))
    if kind is not None:
        is_deep = path.count("/") >= MAX_DEPTH
        raise Refused(f"is more than {MAX_DEPTH} directories deep" if is_deep else f"is {kind}")
    problem = find_path_problem(path)
    if problem:
        raise Refused(problem)
    fd = _open_file(root, path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (listed.st_dev, listed.st_ino):
            raise Refused("was exchanged for something else meanwhile")
        sender.begin_file(path, status.st_size)
        size, piece = 0, os.read(fd, PIECE_BYTES)
        while True:
            size += len(piece)
            following = os.read(fd, PIECE_BYTES) if piece else b""
            if not following:
                break
            if size + len(following) > status.st_size:
                raise Refused("grew while it was read")
            sender.send_piece(path, piece, is_last=False)
            piece = following
        after = os.fstat(fd)
        if size != status.st_size or (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise Refused("changed while it was read")
        sender.send_piece(path, piece, is_last=True)
    finally:
        os.close(fd)


def _open_file(root: int, path: str) -> int:
    """Open a file without following links and return its descriptor. Raises Refused and OSError."""
    *directories, name = path.split("/")
    at = os.dup(root)
    try:
        for directory in directories:
            below = os.open(directory, DIRECTORY_FLAGS, dir_fd=at)
            os.close(at)
            at = below
        return os.open(name, FILE_FLAGS, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise Refused("was exchanged for something else meanwhile") from None
        raise
    finally:
        os.close(at)
