"""The host's writer of collected files: it writes them below one directory and nowhere else.

The data is untrusted: code may have sent it. If a path, a size or the number of files violates the patterns or the
limits, the writer ignores the rest, and the execution's result stays valid. It follows no link below the directory,
because code may be able to write there.
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
FOLDER_PREFIX = "rlm-batch-files-"
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CollectedFiles:
    """A writer for the files that a sandbox sends. The first file creates `folder`, by default a temporary folder.

    A thread writes, so that creating 10,000 directories does not block an event loop; after `end`, call `finish`. A
    file appears under its name once it is complete, and replaces an older file of that name. Sparse files stay sparse.
    `paths` lists the written files; `problems` has a sentence with the reason for each missing file. `max_bytes` limits
    all files together, also by the sandbox's disk size. Holes of sparse files count, too.
    """

    def __init__(
        self, patterns: list[str], folder: str | os.PathLike[str] | None = None, disk_mib: int | None = None
    ) -> None:
        self.patterns = patterns
        self.max_bytes = MAX_COLLECTED_BYTES if disk_mib is None else min(MAX_COLLECTED_BYTES, disk_mib << 20)
        self.paths: list[str] = []
        self.problems: list[str] = []
        self.has_ended = False
        self._is_closed = False  # nothing more is written
        self._problem = ""
        # A full queue blocks the caller: the disk is slower than the sandbox.
        self._bodies: Queue[bytes | None] = Queue(MAX_UNWRITTEN_BYTES // MAX_BODY_BYTES)
        self._thread: threading.Thread | None = None
        self._steps = [parse_pattern(pattern) for pattern in patterns]
        self._folder = None if folder is None else Path(folder).absolute()
        self._root: int | None = None  # file descriptor of the folder
        self._taken: set[str] = set()
        self._directories: set[str] = set()
        self._bytes = 0
        self._path = ""  # path of the incomplete file
        self._file: Any = None
        self._partial = f".rlm-batch-{uuid.uuid4().hex}.partial"

    def take(self, body: bytes) -> None:
        """Write a piece of a file, or note why a file is missing."""
        if self.has_ended:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._write_bodies, name="rlm-batch-files", daemon=True)
            thread.start()
            self._thread = thread  # `finish` joins only a thread that has started
        self._bodies.put(body if len(body) <= MAX_BODY_BYTES else b"a piece that is larger than ours")

    def end(self, problem: str = "") -> None:
        """End the collection and delete an incomplete file. A second call does nothing."""
        if not self.has_ended:
            self.has_ended, self._problem = True, problem
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
                continue
            try:
                self._take(body)
            except (ValueError, RecursionError):
                self._close(FOREIGN)
            except OSError as error:
                self._close(f"{_quote(self._path)} could not be written to {self._folder}: {error.strerror}")
        self._close(self._problem)

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

    def _take(self, body: bytes) -> None:
        match loads(body.decode("utf-8")):
            case {"path": str(path), "reason": str(reason)}:
                if path == self._path:
                    self._drop_file()
                self._add_problem(f"{_quote(path)} {reason}" if path else reason)
            case {"path": str(path), "data": str(data), "last": bool(is_last)}:
                self._write(path, binascii.a2b_base64(data, strict_mode=True) if data else b"")
                if is_last:
                    self._finish_file()
            case _:
                raise ValueError("no piece of a file")

    def _write(self, path: str, piece: bytes) -> None:
        if self._file is None or path != self._path:
            self._file = self._begin_file(path)
        self._bytes += len(piece)
        if self._bytes > self.max_bytes:
            raise ValueError("more than our drivers send")
        if piece.count(0) == len(piece):
            self._file.truncate(self._file.seek(len(piece), os.SEEK_CUR))
        else:
            self._file.write(piece)

    def _begin_file(self, path: str) -> Any:
        self._drop_file()
        is_expected = not find_path_problem(path) and matches(path, self._steps) and path not in self._taken
        self._taken.add(path)
        self._directories.update(list_directories(path))
        is_too_much = len(self._taken) > MAX_COLLECTED_FILES or len(self._directories) > MAX_COLLECTED_DIRECTORIES
        if not is_expected or is_too_much:
            raise ValueError("a path that our drivers do not send")
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return open(os.open(self._partial, flags, 0o666, dir_fd=self._open_root()), "wb")

    def _finish_file(self) -> None:
        file, self._file = self._file, None
        assert self._root is not None
        try:
            file.close()
            _move_below(self._root, self._partial, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(self._partial, dir_fd=self._root)
            raise
        self.paths.append(f"{self._folder}/{self._path}")

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None and self._root is not None:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                os.unlink(self._partial, dir_fd=self._root)

    def _open_root(self) -> int:
        if self._root is None:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
            self._folder.mkdir(parents=True, exist_ok=True)
            self._root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._root

    def _add_problem(self, text: str) -> None:
        if len(self.problems) <= MAX_REFUSALS + 1:
            self.problems.append(escape_text(text[:MAX_REASON_CHARACTERS]))


def _move_below(root: int, name: str, path: str) -> None:
    """Move a file in the directory `root` to a path below it, without following links. Raises OSError."""
    *directories, last = path.split("/")
    at = os.dup(root)
    try:
        for directory in directories:
            with suppress(FileExistsError):
                os.mkdir(directory, dir_fd=at)
            below = os.open(directory, DIRECTORY_FLAGS, dir_fd=at)
            os.close(at)
            at = below
        os.rename(name, last, src_dir_fd=root, dst_dir_fd=at)
    finally:
        os.close(at)


def _quote(path: str) -> str:
    return path if len(path) <= MAX_NAME_CHARACTERS else f"{path[:MAX_NAME_CHARACTERS]}..."
