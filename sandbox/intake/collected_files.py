"""The host's writer of collected files: it writes them below one directory and nowhere else.

The data is untrusted, because code may have sent it. If a path, a size or the number of files violates the patterns or
the limits, the writer ignores all further files, and the execution's result stays valid. It follows no link below the
directory, because code may be able to write there.
"""

from __future__ import annotations

import binascii
import os
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

from ..outcomes.text_escape import escape_text
from ..wire.collection import (
    MAX_COLLECTED_BYTES,
    MAX_COLLECTED_DIRECTORIES,
    MAX_COLLECTED_FILES,
    MAX_REFUSALS,
    find_path_problem,
    list_directories,
    matches,
    parse_pattern,
)
from ..wire.strict_json import loads

MAX_BODY_BYTES = 256 * 1024  # one frame with a piece of a file; the driver sends no larger ones
MAX_UNWRITTEN_BYTES = 16 * 1024 * 1024  # frames that wait for the writer thread
MAX_REASON_CHARACTERS = 500
MAX_NAME_CHARACTERS = 200  # a path in a reason
FOREIGN = "the sandbox sent invalid data of its files, and only the files before it were collected"
LOST = "the sandbox was lost while its files were collected"
INVALID_BODY = b"larger than any body of our drivers"
FOLDER_PREFIX = "rlm-batch-files-"
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CollectedFiles:
    """A writer for the files that a sandbox sends. Call `finish` at the end.

    A thread writes, so that creating 10,000 directories does not block an event loop. A file appears under its name
    once it is complete, and replaces an older file of that name. Sparse files stay sparse.

    Args:
        patterns: Patterns that the files must match.
        folder: Target directory, which the first file creates. Default: a temporary directory.
        disk_mib: The sandbox's disk size in MiB, which also limits the files.

    Attributes:
        max_bytes: Limit on all files together. Holes of sparse files count, too.
        paths: The written files.
        problems: A sentence with the reason for each missing file.
        has_ended: True if further pieces are ignored.
    """

    def __init__(
        self, patterns: list[str], folder: str | os.PathLike[str] | None = None, disk_mib: int | None = None
    ) -> None:
        self.patterns = patterns
        self.max_bytes = MAX_COLLECTED_BYTES
        if disk_mib is not None:
            self.max_bytes = min(self.max_bytes, disk_mib * 1024 * 1024)
        self.paths: list[str] = []
        self.problems: list[str] = []
        self.has_ended = False
        self._is_closed = False  # True if nothing more is written
        self._last_problem = ""  # why the collection ended early
        # A full queue blocks the caller: the disk is slower than the sandbox.
        self._bodies: Queue[bytes | None] = Queue(MAX_UNWRITTEN_BYTES // MAX_BODY_BYTES)
        self._thread: threading.Thread | None = None
        self._patterns = [parse_pattern(pattern) for pattern in patterns]
        self._folder = None if folder is None else Path(folder).absolute()
        self._root: int | None = None  # file descriptor of the folder
        self._known_paths: set[str] = set()
        self._known_directories: set[str] = set()
        self._bytes = 0
        self._path = ""  # path of the incomplete file
        self._file: Any = None  # the incomplete file
        self._partial_name = f".rlm-batch-{uuid.uuid4().hex}.partial"  # its name until it is complete

    def take(self, body: bytes) -> None:
        """Queue a frame's body for the writer: a piece of a file, or the reason why a file is missing."""
        if self.has_ended:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._write_bodies, name="rlm-batch-files", daemon=True)
            thread.start()
            self._thread = thread  # `finish` joins only a thread that has started
        if len(body) > MAX_BODY_BYTES:
            body = INVALID_BODY
        self._bodies.put(body)

    def end(self, problem: str = "") -> None:
        """End the collection and delete an incomplete file. A second call does nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        self._last_problem = problem
        if self._thread is None:
            self._close(problem)
        else:
            self._bodies.put(None)

    def finish(self) -> None:
        """End the collection, and wait until all pieces are written."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _write_bodies(self) -> None:
        while (body := self._bodies.get()) is not None:
            if self._is_closed:
                continue  # The rest is dropped, so that `take` is not blocked.
            try:
                self._process_body(body)
            except (ValueError, RecursionError):
                self._close(FOREIGN)
            except OSError as error:
                self._close(f"{_shorten(self._path)} could not be written to {self._folder}: {error.strerror}")
        self._close(self._last_problem)

    def _close(self, problem: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._drop_file()
        if self._root is not None:
            os.close(self._root)
            self._root = None
        if problem:
            self._add_problem(problem)

    def _process_body(self, body: bytes) -> None:
        """Write a piece of a file, or note why a file is missing. Raises ValueError for an invalid body."""
        match loads(body.decode("utf-8")):
            case {"path": "", "reason": str(reason)}:
                self._add_problem(reason)
            case {"path": str(path), "reason": str(reason)}:
                if path == self._path:
                    self._drop_file()
                self._add_problem(f"{_shorten(path)} {reason}")
            case {"path": str(path), "data": str(data), "last": bool(is_last)}:
                if self._file is None or path != self._path:
                    self._begin_file(path)
                if data:
                    self._write(binascii.a2b_base64(data, strict_mode=True))
                if is_last:
                    self._finish_file()
            case _:
                raise ValueError("no piece of a file")

    def _begin_file(self, path: str) -> None:
        self._drop_file()
        if find_path_problem(path) or path in self._known_paths or not matches(path, self._patterns):
            raise ValueError("a path that our drivers do not send")
        self._known_paths.add(path)
        self._known_directories.update(list_directories(path))
        has_too_many_files = len(self._known_paths) > MAX_COLLECTED_FILES
        if has_too_many_files or len(self._known_directories) > MAX_COLLECTED_DIRECTORIES:
            raise ValueError("more files than our drivers send")
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._partial_name, flags, 0o666, dir_fd=self._open_root()), "wb")

    def _write(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes > self.max_bytes:
            raise ValueError("more than our drivers send")
        is_hole = piece.count(0) == len(piece)
        if is_hole:
            self._file.truncate(self._file.seek(len(piece), os.SEEK_CUR))
        else:
            self._file.write(piece)

    def _finish_file(self) -> None:
        assert self._root is not None
        self._file.close()
        _move_below(self._root, self._partial_name, self._path)
        self._file = None
        self.paths.append(f"{self._folder}/{self._path}")

    def _drop_file(self) -> None:
        """Delete the incomplete file, if there is one."""
        file = self._file
        self._file = None
        if file is not None and self._root is not None:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                os.unlink(self._partial_name, dir_fd=self._root)

    def _open_root(self) -> int:
        if self._root is None:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
            for directory in (self._folder.parent, self._folder):  # Other users cannot read new ones.
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._root

    def _add_problem(self, text: str) -> None:
        if len(self.problems) <= MAX_REFUSALS + 1:
            self.problems.append(escape_text(text[:MAX_REASON_CHARACTERS]))


def _move_below(root: int, name: str, path: str) -> None:
    """Move a file in the directory `root` to a path below it, without following links. Raises OSError."""
    *directories, new_name = path.split("/")
    parent = os.dup(root)
    try:
        for directory in directories:
            with suppress(FileExistsError):
                os.mkdir(directory, dir_fd=parent)
            child = os.open(directory, DIRECTORY_FLAGS, dir_fd=parent)
            os.close(parent)
            parent = child
        os.rename(name, new_name, src_dir_fd=root, dst_dir_fd=parent)
    finally:
        os.close(parent)


def _shorten(path: str) -> str:
    return path if len(path) <= MAX_NAME_CHARACTERS else f"{path[:MAX_NAME_CHARACTERS]}..."
