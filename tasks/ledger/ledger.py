"""The ledger: the directory of JSON lines that a flow run writes its results to, and resumes from.

A writer appends to parts of its own, `part-<writer>-<n>.jsonl`, and to nobody else's, so that any number of processes
may write to one ledger. Lines are handed to the operating system as they come: a process that is killed loses none that
was written, a machine that loses power may lose the last seconds. A torn last line is passed over by readers.

A ledger may also be at a location such as a bucket, where nothing is appended to: what was written in the last five
seconds is sent together, as a part, and a process that is killed loses what it has not sent. Readers have a copy.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...blocks.storage.data_dirs import resolve_data_dir
from ...blocks.storage.location import Location
from ...blocks.storage.location_parsing import is_remote, parse_location, parse_scheme
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome, Result, outcome_from_json, outcome_to_json
from .upload_buffer import UploadBuffer

VERSION = 1
# What of an outcome's meta is computed with, and of which type it has to be for that.
META_TYPES: dict[str, Any] = {
    "index": (int, type(None)),
    "variables": dict,
    "seconds": (int, float),
    "attempt": int,
    "layers": list,
    "earlier_errors": list,
    "files": list,
    "stdout": str,
    "stderr": str,
    "queries": (dict, type(None)),
}
PART_SIZE_BYTES = 64 * 1024 * 1024  # bytes after which a writer begins a new part: small enough to copy and to look at


def get_results_root() -> Path:
    """Where ledgers are made by default: `RLM_BATCH_RESULTS`, or the user's data directory.

    Raises ConfigurationError where that variable names a location that is no directory of this machine.
    """
    named = os.environ.get("RLM_BATCH_RESULTS", "")
    if is_remote(named):
        raise ConfigurationError(
            f"RLM_BATCH_RESULTS is {named}, and must be a directory of this machine: it has an index and large "
            "parameters too. Name the location with results_path"
        )
    if parse_scheme(named) is not None:
        return Path(str(parse_location(named)))
    return resolve_data_dir("results", "RLM_BATCH_RESULTS")


class LinePosition(NamedTuple):
    """Where a line stands: its part's path, and its offset and length in bytes."""

    part: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One line of a ledger, as it was read: `at` is in epoch seconds, `where` the part, offset and length in bytes.

    The part of a ledger at a location is a copy of this machine's, which goes with the `Ledger` that has read it.
    """

    key: str
    written_at: float
    is_success: bool
    data: dict[str, Any]
    position: LinePosition

    def to_outcome(self) -> Outcome:
        """The result or the failure that the line holds."""
        return outcome_from_json(self.data)


class Ledger:
    """One ledger, open for reading and for appending.

    `path` is absolute, or a location; its text is what names this ledger again. At a location `best`, `lines`, what
    `follow` returns, `create`, `put`, `get` and `close` wait for the network, and `write` does not.
    """

    def __init__(self, path: str | os.PathLike[str] | Location, part_prefix: str = "") -> None:
        """`part_of` is what the names of this writer's parts begin with, so that they can be read by themselves.

        Raises ConfigurationError where there is no such location.
        """
        self.path = parse_location(path)
        self._writer = part_prefix + uuid.uuid4().hex[:12]
        self._part = 0
        self._file: Any = None
        self._lock_descriptor: int | None = None  # the directory, as it is locked
        if isinstance(self.path, Location):
            self._upload_buffer = UploadBuffer(
                partial(_send_part, self.path, self._writer)
            )  # no cycle: the copies go with the last user
            self._copies = LocalMirror(self.path)

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
            what = "location" if isinstance(self.path, Location) else "directory"
            raise ConfigurationError(
                f"the ledger {self.path} cannot be made: {error.strerror}. Name another {what} with results_path"
                + (", or another root with the environment variable RLM_BATCH_RESULTS" if what == "directory" else "")
            ) from (None if what == "location" else error)

    def register_writer(self) -> bool:
        """Says that this writer is at work, until `release` or its process's end; and whether it is the only one.

        On a file system without locks, or where another machine's are not seen, it takes itself for the only one; so it
        does at a location.
        """
        if isinstance(self.path, Location):
            return True
        try:
            self._lock_descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            # Shared by all who are at work, so that each is seen for as long as it is.
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return alone

    def unregister_writer(self) -> None:
        """Says that this writer has done its work."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def write_outcome(self, key: str, outcome: Outcome) -> None:
        """Appends one line. Raises OSError, with the ledger's path in it, where that cannot be done.

        At a location: where lines that were written before could not be sent.
        """
        succeeded = isinstance(outcome, Result)
        line = {
            "version": VERSION,
            "key": key,
            "at": time.time(),
            "index": outcome.meta.index,
            "attempt": outcome.meta.attempt,
            "status": "succeeded" if succeeded else "failed",
            **outcome_to_json(outcome),
        }
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        if isinstance(self.path, Location):
            with self._explain_write_errors():
                self._upload_buffer.write(data)
            return
        try:
            with self._explain_write_errors():
                file = self._open_file()
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
            # Somebody has removed it, or the whole directory; what was written to it is there while it is open.
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
            self._file = open(self.path / f"part-{self._writer}-{self._part}.jsonl", "a+b", buffering=0)  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Closes the part that is being written; the next write begins another.

        At a location it sends what was not sent yet. Raises OSError, with the location in it, where that cannot be
        done; what is left is kept, and closing tries again.
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
        """Every whole line of every part, as it was written; torn and foreign ones are passed over.

        With `part_of` only of the parts of those writers. Raises OSError where a location cannot be read.
        """
        for part in self._list_parts(part_prefix):
            yield from read_part_lines(part)

    def _list_parts(self, part_prefix: str = "") -> list[Path]:
        pattern = f"part-{part_prefix}*.jsonl"
        return self._copies.refresh(pattern) if isinstance(self.path, Location) else sorted(self.path.glob(pattern))

    def follow_lines(self) -> Callable[[], Iterator[LedgerLine]]:
        """What reads, each time that it is called, the whole lines that no earlier call has given.

        At a location a call takes one listing, and fetches what parts have gained. It raises OSError where that cannot
        be done; the next call goes on.
        """
        offsets: dict[Path, int] = {}

        def new() -> Iterator[LedgerLine]:
            for part in self._list_parts():
                offset = offsets.get(part, 0)
                if isinstance(self.path, Location) and os.path.getsize(part) <= offset:
                    continue
                # Opened rather than asked for its size, which a file system of a network may have from a while ago.
                for line in read_part_lines(part, offset):
                    offsets[part] = line.position.end
                    yield line

        return new

    def load_latest_lines(self, part_prefix: str = "") -> dict[str, LedgerLine]:
        """For each key the line that counts: success beats failure, and then the later beats the earlier.

        With `part_of` only of what those writers wrote.
        """
        found: dict[str, LedgerLine] = {}
        for line in self.read_lines(part_prefix):
            held = found.get(line.key)
            if held is None or (line.is_success, line.written_at) >= (held.is_success, held.written_at):
                found[line.key] = line
        return found


def _send_part(location: Location, writer: str, number: int, data: bytes) -> None:
    (location / f"part-{writer}-{number}.jsonl").write(data)


def read_part_lines(part: Path, offset: int = 0) -> Iterator[LedgerLine]:
    """The whole lines of a part from that byte on."""
    with part.open("rb") as file:
        file.seek(offset)
        for raw in file:
            start, offset = offset, offset + len(raw)
            if not raw.endswith(b"\n"):
                return  # torn: its writer was killed, or is writing it
            line = parse_line(raw, LinePosition(str(part), start, len(raw)))
            if line is not None:
                yield line


def read_line(position: LinePosition) -> LedgerLine | None:
    """The line at that position; None if it is no longer there."""
    try:
        with open(position.part, "rb") as file:
            file.seek(position.offset)
            return parse_line(file.read(position.length), position)
    except OSError:
        return None


def parse_line(raw: bytes, position: LinePosition) -> LedgerLine | None:
    """The line; None of what we do not write: it is damaged, or somebody else's."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not _is(data, dict) or not _is(data.get("key"), str) or not _is(data.get("at"), (int, float)):
        return None
    succeeded = data.get("status") == "succeeded"
    if not succeeded and data.get("status") != "failed":
        return None
    held, meta = data.get("outputs" if succeeded else "error"), data.get("meta")
    if not _is(held, dict) or not _is(meta, dict) or not _is(data.get("index"), (int, type(None))):
        return None
    if succeeded == ("error" in data) or not (
        succeeded or (_is(held.get("error"), str) and _is(held.get("text"), str))
    ):
        return None
    if not all(_is(meta[name], kind) for name, kind in META_TYPES.items() if name in meta):
        return None
    if not _is((meta.get("queries") or {}).get("tree", []), list):
        return None
    return LedgerLine(data["key"], data["at"], succeeded, data, position)


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
