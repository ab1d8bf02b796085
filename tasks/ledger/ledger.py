"""The ledger: the directory of JSON lines to which a flow run writes its results, and from which it resumes.

Each writer appends only to its own parts, `part-<writer>-<n>.jsonl`, so any number of processes may write to one
ledger. The writer passes each line to the operating system at once, so a killed process loses no line. A power failure
may lose the lines of the last seconds. Readers skip an incomplete last line.

A ledger may also be at a location such as a bucket, which cannot append to files. There the writer sends the lines of
five seconds together as a part, and a killed process loses the lines that it has not sent. Readers use a copy.
"""

import errno
import fnmatch
import itertools
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...blocks.retry import compute_backoff
from ...blocks.storage.location import LocalMirror, Location, make_private_directory
from ...blocks.storage.location_parsing import parse_location
from ...sandbox.errors import ConfigurationError
from ...sandbox.file_lock import try_lock
from ...sandbox.result import Outcome
from .ledger_line import LedgerLine, LinePosition, SearchLine, encode_line, read_part_lines, read_search_lines

PART_SIZE_BYTES = 64 * 1024 * 1024  # A writer begins a new part after this size.
SEND_INTERVAL_SECONDS = 5.0  # the longest wait of a line; shorter ones make more files, and readers list all files
SEND_SIZE_BYTES = 8 * 1024 * 1024  # bytes that are sent without a wait
MAX_HELD_BYTES = 64 * 1024 * 1024  # Writers wait while a slow location leaves so many bytes unsent.
RETRY_PATIENCE_SECONDS = 60.0  # An upload fails after retries for so long.
LONGEST_DELAY_SECONDS = 8.0  # the longest delay between tries
LONGEST_UPLOAD_SECONDS = 120.0  # the patience, and the time for a last try that hangs
TIMEOUT_TEXT = "it has not answered yet"
LOCK_RETRY_SECONDS = 0.05  # seconds between two tries to lock a ledger


class Ledger:
    """One ledger, open for reading and for appending.

    `path` is absolute, or a location. `part_kind` is "part" for outcomes. The names of this writer's parts begin with
    `part_kind` and `part_prefix`, by which readers select parts.
    """

    def __init__(self, path: str | os.PathLike[str] | Location, part_prefix: str = "", part_kind: str = "part") -> None:
        """Open the ledger. Raises ConfigurationError if the location does not exist."""
        self.path = parse_location(path)
        self._kind = part_kind
        self._writer = f"{part_kind}-{part_prefix}{uuid.uuid4().hex[:12]}"
        self._part_number = 0
        self._file: Any = None
        self._lock_descriptor: int | None = None  # the locked directory
        self.has_other_writers = False  # True if another writer was active at `register_writer`
        if isinstance(self.path, Location):
            location, writer = self.path, self._writer
            # A method of this ledger would make a reference cycle, which would delay the deletion of the local copies.
            self._upload_buffer = UploadBuffer(lambda number, data: (location / f"{writer}-{number}.jsonl").write(data))
            self._mirror = LocalMirror(self.path)

    def create(self) -> None:
        """Create the directory. Raises ConfigurationError if it cannot be created or written."""
        try:
            if isinstance(self.path, Location):
                self.path.make_directory()
                return
            make_private_directory(self.path)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written")
        except OSError as error:
            raise ConfigurationError(
                f"the ledger {self.path} cannot be created: {error.strerror}. Set `results_path` to "
                "another place, or RLM_BATCH_RESULTS to another root"
            ) from None

    def register_writer(self) -> bool:
        """Lock the directory until `unregister_writer` or the end of the process. Return whether no other writer has.

        Locations and some file systems have no locks, and locks of other machines may be invisible. There each writer
        counts as the only writer.
        """
        if isinstance(self.path, Location):
            return True
        try:
            self._lock_descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            is_alone = try_lock(self._lock_descriptor)
            if not is_alone:  # `claim_idle_ledger` may have the lock for an instant.
                time.sleep(LOCK_RETRY_SECONDS)
                is_alone = try_lock(self._lock_descriptor)
            # All active writers share this lock, so other writers see each of them as long as it is active.
            try_lock(self._lock_descriptor, is_shared=True)
        except OSError:
            return True
        self.has_other_writers = not is_alone
        return is_alone

    def unregister_writer(self) -> None:
        """Unlock the directory."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def write_outcome(self, key: str, outcome: Outcome, unchecked_key: str = "") -> None:
        """Append the line of an outcome. Raises OSError as `write_line` does."""
        self.write_line(encode_line(key, outcome, unchecked_key))

    def write_line(self, data: bytes) -> LinePosition | None:
        """Append one line and return its position, or None if the ledger is at a location.

        Raises OSError if the line could not be written. At a location, this may be an earlier line.
        """
        with self._explain_write_errors():
            if isinstance(self.path, Location):
                self._upload_buffer.write(data)
                return None
            file = self._open_file()
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._close_file()  # The file may end with half a line, so the next line needs a new file.
                raise
            return LinePosition(str(file.name), file.tell() - len(data), len(data))

    @contextmanager
    def _explain_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Pass one argument: with more, the error's text would begin with a number in brackets.
            raise OSError(
                f"a result could not be written to the ledger {self.path}: {error.strerror}. What was written before "
                "stays: retry the flow run (or run again with this results_path) to run only the rest"
            ) from error

    def _open_file(self) -> Any:
        """Return the file for the next line. Replace a file that is full, or that another process has deleted."""
        file = self._file
        if file is not None and os.fstat(file.fileno()).st_nlink == 0:
            # The file or its directory was deleted. The content exists while the file is open, so copy it.
            self._file = None
            with file:
                file.seek(0)
                shutil.copyfileobj(file, self._open_file())
        elif file is not None and file.tell() >= PART_SIZE_BYTES:
            self._close_file()
        if self._file is None:
            self._part_number += 1
            assert isinstance(self.path, Path)
            make_private_directory(self.path)
            path = self.path / f"{self._writer}-{self._part_number}.jsonl"
            path.touch(mode=0o600)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - without a buffer, each line is one write
        return self._file

    def close(self) -> None:
        """Close the current part. The next write begins another part.

        At a location, send the unsent lines. If that raises OSError, keep them for the next `close`.
        """
        if isinstance(self.path, Location):
            with self._explain_write_errors():
                self._upload_buffer.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read_lines(self, part_prefix: str = "") -> Iterator[LedgerLine]:
        """Yield every valid line of the parts with that prefix. Raises OSError if a location cannot be read."""
        for part in self.list_parts(part_prefix):
            yield from read_part_lines(part)

    def list_parts(self, part_prefix: str = "") -> list[Path]:
        """Return the files of the parts. Those of a location are copies, which are deleted with this object."""
        pattern = f"{self._kind}-{part_prefix}*.jsonl"
        return self._mirror.refresh(pattern) if isinstance(self.path, Location) else sorted(self.path.glob(pattern))

    def read_search_lines(self) -> Iterator[SearchLine]:
        """Yield the lines of a search in the order in which they were written. A search has one writer at a time."""
        began_at: dict[Path, float] = {}  # the time of each part's first line
        for part in self.list_parts():
            for line in itertools.islice(read_search_lines(part), 1):
                began_at[part] = line.written_at
        for part in sorted(began_at, key=began_at.__getitem__):
            yield from read_search_lines(part)

    def read_new_lines(self, offsets: dict[Path, int]) -> Iterator[LedgerLine]:
        """Yield the complete lines after the parts' offsets, and update the offsets for the next call.

        Raises OSError if a location does not answer. The next call yields the missing lines.
        """
        for part in self.list_parts():
            for line in read_part_lines(part, offsets.get(part, 0)):
                offsets[part] = line.position.end
                yield line

    def load_latest_lines(self, part_prefix: str = "") -> dict[str, LedgerLine]:
        """Return the line that counts for each key: a success before a failure, then a later line before an earlier."""
        latest: dict[str, LedgerLine] = {}
        for line in self.read_lines(part_prefix):
            other = latest.get(line.key)
            if other is None or (line.is_success, line.written_at) >= (other.is_success, other.written_at):
                latest[line.key] = line
        return latest


def list_files(root: Path, pattern: str) -> Iterator[Path]:
    """Yield the matching files in the directories directly below a root, in order. Skip what cannot be read.

    `Path.glob` would fail if another process deletes a directory meanwhile.
    """
    with suppress(OSError):
        for directory in sorted(os.listdir(root)):
            with suppress(OSError):
                for name in sorted(fnmatch.filter(os.listdir(root / directory), pattern)):
                    yield root / directory / name


@contextmanager
def claim_idle_ledger(path: Path) -> Iterator[bool]:
    """Yield True if the ledger at this path is idle: no run writes to it, and none can begin to within the context.

    Links are not followed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


class UploadBuffer:
    """A buffer of lines for a location that cannot append to files. A background thread sends the lines.

    The thread lives while there are lines. It calls `send` with the upload's number, from 1, and its bytes. It retries
    a failed upload with the same number and bytes, so the upload arrives once. A writer does not wait for the network.
    A killed process loses the lines of the last SEND_INTERVAL_SECONDS, or more if the location is slow.
    """

    def __init__(self, send: Callable[[int, bytes], object]) -> None:
        self._send = send
        self._changed = threading.Condition()  # guards the following fields
        self._lines: list[bytes] = []
        self._size = 0  # bytes of `_lines`
        self._upload_number = 0
        self._unsent = b""  # bytes of the upload that is being sent, or could not be sent
        self._error: OSError | None = None  # the reason if the last upload failed
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Add a line to the buffer. Raises OSError if earlier lines cannot be sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._size < MAX_HELD_BYTES, LONGEST_UPLOAD_SECONDS)
            if self._error is not None:
                raise self._error
            if self._size >= MAX_HELD_BYTES:
                raise OSError(errno.ETIMEDOUT, TIMEOUT_TEXT)
            self._lines.append(line)
            self._size += len(line)
            self._start_thread(RETRY_PATIENCE_SECONDS)

    def close(self) -> None:
        """Send all lines, and wait until they have arrived. If they cannot be sent, raise OSError and keep them.

        An upload that has failed before gets one try. The buffer accepts lines again afterwards.
        """
        with self._changed:
            patience = RETRY_PATIENCE_SECONDS if self._error is None else 0.0
            self._error = None
            self._is_closing = True
            self._start_thread(patience)
            has_ended = self._changed.wait_for(lambda: self._thread is None, LONGEST_UPLOAD_SECONDS)
            self._is_closing = False
            if self._error is None and not has_ended:
                self._error = OSError(errno.ETIMEDOUT, TIMEOUT_TEXT)
            if self._error is not None:
                raise self._error

    def _start_thread(self, patience: float) -> None:
        if self._thread is None and (self._lines or self._unsent):
            # A daemon thread lets the process end even if the location hangs.
            self._thread = threading.Thread(target=self._send_lines, args=(patience,), name="outbox", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _send_lines(self, patience: float) -> None:
        """Send the lines when they are due, until the buffer is empty or an upload fails."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._unsent or self._is_closing or self._size >= SEND_SIZE_BYTES, SEND_INTERVAL_SECONDS
                )
                if not self._unsent:
                    self._unsent = b"".join(self._lines)
                    self._lines, self._size = [], 0
                    self._upload_number += 1
                    self._changed.notify_all()
            error = self._send_with_retries(patience)
            with self._changed:
                if error is None:
                    self._unsent = b""
                if error is not None or not self._lines:
                    self._error = error
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _send_with_retries(self, patience: float) -> OSError | None:
        """Send the upload, with retries for `patience` seconds. Return the last error if all tries failed."""
        give_up_at = time.monotonic() + patience
        for failure_count in itertools.count():
            try:
                self._send(self._upload_number, self._unsent)
                return None
            except Exception as error:  # noqa: BLE001 - after any error the lines have not arrived
                delay = compute_backoff(failure_count, 0.5, LONGEST_DELAY_SECONDS)
                if time.monotonic() + delay > give_up_at:
                    text = str(error) or type(error).__name__
                    return error if isinstance(error, OSError) else OSError(errno.EIO, text)
            time.sleep(delay)
        raise AssertionError
