"""The ledger: the directory of JSON lines that a flow run writes its results to, and resumes from.

A writer appends to parts of its own, `part-<writer>-<n>.jsonl`, and to nobody else's, so that any number of processes
may write to one ledger. Lines are handed to the operating system as they come: a process that is killed loses none that
was written, a machine that loses power may lose the last seconds. Readers skip a torn last line.

A ledger may also be at a location such as a bucket, where nothing is appended to: what was written in the last five
seconds is sent together, as a part, and a process that is killed loses what it has not sent. Readers have a copy.
"""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...blocks.storage.location import Location
from ...blocks.storage.location_parsing import parse_location
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome
from .ledger_line import LedgerLine, LinePosition, encode_line, read_part_lines
from .trial_lines import TrialLine, read_trial_lines
from .upload_buffer import UploadBuffer

PART_SIZE_BYTES = 64 * 1024 * 1024  # after which a writer begins a new part: small enough to copy and to look at


class Ledger:
    """One ledger, open for reading and for appending.

    `path` is absolute, or a location; its text names this ledger again. At a location `create`, `close` and what reads
    wait for the network, and `write_outcome` does not.
    """

    def __init__(self, path: str | os.PathLike[str] | Location, part_prefix: str = "", part_kind: str = "part") -> None:
        """`part_prefix` begins the names of this writer's parts, so that they can be read by themselves.

        Parts of another `part_kind` than outcomes are in files that nobody takes for those. Raises ConfigurationError
        where there is no such location.
        """
        self.path = parse_location(path)
        self._kind = part_kind
        self._writer = f"{part_kind}-{part_prefix}{uuid.uuid4().hex[:12]}"
        self._part = 0
        self._file: Any = None
        self._lock_descriptor: int | None = None  # of the directory, which it locks
        if isinstance(self.path, Location):
            # No method of this ledger, which would be a cycle: the copies are deleted with the last that uses it.
            self._upload_buffer = UploadBuffer(partial(_send_part, self.path, self._writer))
            self._mirror = LocalMirror(self.path)

    def create(self) -> None:
        """Makes the directory. Raises ConfigurationError where it cannot be made or written."""
        try:
            if isinstance(self.path, Location):
                self.path.make_directory()
                return
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "it cannot be written")
        except OSError as error:
            kind = "location" if isinstance(self.path, Location) else "directory"
            raise ConfigurationError(
                f"the ledger {self.path} cannot be made: {error.strerror}. Name another {kind} with results_path"
                + (", or another root with the environment variable RLM_BATCH_RESULTS" if kind == "directory" else "")
            ) from (None if kind == "location" else error)

    def register_writer(self) -> bool:
        """Marks this writer as active, until `unregister_writer` or its process's end; returns whether no other is.

        The directory is locked for that: at a location, on a file system without locks, and where those of other
        machines are not seen, each writer is taken for the only one.
        """
        if isinstance(self.path, Location):
            return True
        try:
            self._lock_descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            except BlockingIOError:
                is_alone = False
            # Shared by all active writers, so that each is seen for as long as it is active.
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return is_alone

    def unregister_writer(self) -> None:
        """Marks this writer as no longer active."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def write_outcome(self, key: str, outcome: Outcome) -> None:
        """Appends the line of an outcome; see `write_line`."""
        self.write_line(encode_line(key, outcome))

    def write_line(self, data: bytes) -> LinePosition | None:
        """Appends one line, and returns where it stands; at a location that is None.

        Raises OSError, with the ledger's path in it, where that cannot be done; at a location, where lines that were
        written before could not be sent.
        """
        if isinstance(self.path, Location):
            with self._explain_write_errors():
                self._upload_buffer.write(data)
            return None
        try:
            with self._explain_write_errors():
                file = self._open_file()
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return LinePosition(str(file.name), file.tell() - len(data), len(data))
        except OSError:
            self._close_file()  # part of the line may be there: what is written next is not to be on the same one
            raise

    @contextmanager
    def _explain_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # With one argument, or its text would begin with a number in brackets.
            raise OSError(
                f"a result could not be written to the ledger {self.path}: {error.strerror}. What was written before "
                f"stays: {'see to it' if isinstance(self.path, Location) else 'make room'}, and retry the flow run (or "
                "run again with this results_path) to run only the rest"
            ) from error

    def _open_file(self) -> Any:
        file = self._file
        if file is not None and not os.fstat(file.fileno()).st_nlink:
            # It was deleted, or the whole directory was; its content is there for as long as it is open.
            self._file = None
            with file:
                file.seek(0)
                shutil.copyfileobj(file, self._open_file())
        elif file is not None and file.tell() >= PART_SIZE_BYTES:
            self.close()
        if self._file is None:
            self._part += 1
            assert isinstance(self.path, Path)
            self.path.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that each line is one write.
            self._file = open(self.path / f"{self._writer}-{self._part}.jsonl", "a+b", buffering=0)  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Closes the part that is being written; the next write begins another.

        At a location it sends what was not sent yet. Raises OSError, with the location in it, where that cannot be
        done; what is unsent stays, and closing tries again.
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
        """Every whole line of every part, as it was written; torn, damaged and foreign ones are skipped.

        With `part_prefix` only of the parts whose names begin so. Raises OSError where a location cannot be read.
        """
        for part in self.list_parts(part_prefix):
            yield from read_part_lines(part)

    def list_parts(self, part_prefix: str = "") -> list[Path]:
        """The files of its parts; at a location copies, which are there for as long as this object is.

        Raises OSError where a location cannot be read.
        """
        pattern = f"{self._kind}-{part_prefix}*.jsonl"
        return self._mirror.refresh(pattern) if isinstance(self.path, Location) else sorted(self.path.glob(pattern))

    def read_trial_lines(self) -> Iterator[TrialLine]:
        """Every whole line of a search and its outcomes, in the order in which they were written.

        Raises OSError where a location cannot be read.
        """
        return read_trial_lines(self.list_parts())

    def follow_lines(self) -> Callable[[], Iterator[LedgerLine]]:
        """A function that returns, at each call, the whole lines that no earlier call has returned.

        At a location a call takes one listing, and fetches what parts have gained. It raises OSError where that cannot
        be done; the next call goes on.
        """
        offsets: dict[Path, int] = {}

        def read_new_lines() -> Iterator[LedgerLine]:
            for part in self.list_parts():
                offset = offsets.get(part, 0)
                if isinstance(self.path, Location) and os.path.getsize(part) <= offset:
                    continue
                # Opened rather than asked for its size, which a file system of a network may have from a while ago.
                for line in read_part_lines(part, offset):
                    offsets[part] = line.position.end
                    yield line

        return read_new_lines

    def load_latest_lines(self, part_prefix: str = "") -> dict[str, LedgerLine]:
        """For each key the line that counts: success beats failure, and then the later line beats the earlier.

        With `part_prefix` only of the parts whose names begin so.
        """
        latest: dict[str, LedgerLine] = {}
        for line in self.read_lines(part_prefix):
            other = latest.get(line.key)
            if other is None or (line.is_success, line.written_at) >= (other.is_success, other.written_at):
                latest[line.key] = line
        return latest


def _send_part(location: Location, writer: str, number: int, data: bytes) -> None:
    (location / f"{writer}-{number}.jsonl").write(data)
