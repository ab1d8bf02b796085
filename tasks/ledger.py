"""The ledger: the directory of JSON lines that a flow run writes its results to, and resumes from.

A writer appends to parts of its own, `part-<writer>-<n>.jsonl`, and to nobody else's, so that any number of processes
may write to one ledger. Lines are handed to the operating system as they come: a process that is killed loses none that
was written, a machine that loses power may lose the last seconds. A torn last line is passed over by readers.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..blocks.places import kept
from ..sandbox.errors import ConfigurationError
from ..sandbox.result import Failure, Result, outcome_from_json, outcome_to_json

VERSION = 1
PART_SIZE = 64 * 1024 * 1024  # bytes after which a writer begins a new part: small enough to copy and to look at


def results_root() -> Path:
    """Where ledgers are made by default: `RLM_BATCH_RESULTS`, or the user's data directory."""
    return kept("results", "RLM_BATCH_RESULTS")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a ledger, as it was read: `at` is in epoch seconds, `where` the part, offset and length in bytes."""

    key: str
    at: float
    succeeded: bool
    data: dict[str, Any]
    where: tuple[str, int, int]

    def outcome(self) -> Result | Failure:
        """The result or the failure that the line holds."""
        return outcome_from_json(self.data)


class Ledger:
    """One ledger, open for reading and for appending. `path` is absolute."""

    def __init__(self, path: str | os.PathLike[str], part_of: str = "") -> None:
        """`part_of` is what the names of this writer's parts begin with, so that they can be read by themselves."""
        self.path = Path(path).expanduser().absolute()
        self._writer = part_of + uuid.uuid4().hex[:12]
        self._part = 0
        self._file: Any = None
        self._claimed: int | None = None  # the directory, as it is locked

    def create(self) -> None:
        """Makes the directory. Raises ConfigurationError where it cannot be made or written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "it cannot be written")
        except OSError as error:
            raise ConfigurationError(
                f"the ledger {self.path} cannot be made: {error.strerror}. Name another directory with results_path, "
                "or another root with the environment variable RLM_BATCH_RESULTS"
            ) from error

    def claim(self) -> bool:
        """Says that this writer is at work, until `release` or its process's end; and whether it is the only one.

        On a file system without locks, or where another machine's are not seen, it takes itself for the only one.
        """
        try:
            self._claimed = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            # Shared by all who are at work, so that each is seen for as long as it is.
            fcntl.flock(self._claimed, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return alone

    def release(self) -> None:
        """Says that this writer has done its work."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def write(self, key: str, outcome: Result | Failure) -> None:
        """Appends one line. Raises OSError, with the ledger's path in it, where that cannot be done."""
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
        try:
            file = self._open()
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.close()  # part of the line may be there: what is written next is not to be on the same one
            # With one argument, or its text would begin with a number in brackets.
            raise OSError(
                f"a result could not be written to the ledger {self.path}: {error.strerror}. What was written before "
                "stays: make room, and retry the flow run (or run again with this results_path) to run only the rest"
            ) from error

    def _open(self) -> Any:
        file = self._file
        if file is not None and not os.fstat(file.fileno()).st_nlink:
            # Somebody has removed it, or the whole directory; what was written to it is there while it is open.
            self._file = None
            with file:
                file.seek(0)
                shutil.copyfileobj(file, self._open())
        elif file is not None and file.tell() >= PART_SIZE:
            self.close()
        if self._file is None:
            self._part += 1
            self.path.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that each line is one write.
            self._file = open(self.path / f"part-{self._writer}-{self._part}.jsonl", "a+b", buffering=0)  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Closes the part that is being written; the next write begins another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self, part_of: str = "") -> Iterator[Line]:
        """Every whole line of every part, as it was written; torn and foreign ones are passed over.

        With `part_of` only of the parts of those writers.
        """
        for part in sorted(self.path.glob(f"part-{part_of}*.jsonl")):
            yield from read_part(part)

    def follow(self) -> Callable[[], Iterator[Line]]:
        """What reads, each time that it is called, the whole lines that no earlier call has given."""
        offsets: dict[Path, int] = {}

        def new() -> Iterator[Line]:
            for part in sorted(self.path.glob("part-*.jsonl")):
                offset = offsets.get(part, 0)
                if os.path.getsize(part) <= offset:
                    continue
                for line in read_part(part, offset):
                    offsets[part] = line.where[1] + line.where[2]
                    yield line

        return new

    def best(self, part_of: str = "") -> dict[str, Line]:
        """For each key the line that counts: success beats failure, and then the later beats the earlier.

        With `part_of` only of what those writers wrote.
        """
        found: dict[str, Line] = {}
        for line in self.lines(part_of):
            held = found.get(line.key)
            if held is None or (line.succeeded, line.at) >= (held.succeeded, held.at):
                found[line.key] = line
        return found


def read_part(part: Path, offset: int = 0) -> Iterator[Line]:
    """The whole lines of a part from that byte on."""
    with part.open("rb") as file:
        file.seek(offset)
        for raw in file:
            start, offset = offset, offset + len(raw)
            if not raw.endswith(b"\n"):
                return  # torn: its writer was killed, or is writing it
            try:
                data = json.loads(raw)
                yield Line(data["key"], data["at"], data["status"] == "succeeded", data, (str(part), start, len(raw)))
            except (ValueError, KeyError, TypeError):
                continue


def read_line(part: str, offset: int, length: int) -> Line | None:
    """One line again, by where it was found; None if it is no longer there."""
    try:
        with open(part, "rb") as file:
            file.seek(offset)
            data = json.loads(file.read(length))
            return Line(data["key"], data["at"], data["status"] == "succeeded", data, (part, offset, length))
    except (OSError, ValueError, KeyError, TypeError):
        return None
