"""The files of a shard, in `shards/<job>/` below its ledger.

`<shard>-<attempt>.jsonl` is the work: a header, and then a line for each execution. A line without code has the code
of the line before. `<shard>-<attempt>.beat` is the heartbeat, with the attempt's progress.
`<shard>-<attempt>.cancelled` means that the job has cancelled the attempt. The job waits only for the latest attempt
that has work.
"""

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...blocks.storage.location import PathOrLocation, iterate_lines, list_names, write_file
from ...blocks.storage.location_parsing import parse_location
from ...sandbox.errors import ConfigurationError
from ..execution import Execution, execution_from_json, execution_to_json
from .ledger_line import VERSION, check_version


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The number of the job's shards, and of the executions in this work.

    `what` is the job's word for an execution. `commit` is the commit that the job found for the repository's ref.
    """

    shards: int
    total: int
    what: str
    commit: str | None
    version: int = VERSION


@dataclass(slots=True)
class Heartbeat:
    """The progress of an attempt. `count` increases while it is alive. `error` is a type and a message if it failed.

    `sandbox_seconds` is the time that all sandboxes were open together. `cost` is in US dollars, None if a price is
    unknown.
    """

    count: int = 0
    done: int = 0
    failed: int = 0
    sandboxes: int = 0
    sandbox_seconds: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0
    late: int = 0  # executions without an outcome at the deadline
    error: tuple[str, str] | None = None
    ended: bool = False  # The attempt has no more sandboxes, and this is its last heartbeat.


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of one attempt at a shard."""

    ledger: PathOrLocation
    job: str
    shard: int
    attempt: int

    @classmethod
    def from_work_path(cls, work_path: str) -> "ShardFiles":
        """Return the files of the attempt with this work. Raises ConfigurationError for other paths."""
        try:
            ledger, _, job, name = work_path.rsplit("/", 3)
            shard, attempt = (int(number) for number in name.removesuffix(".jsonl").split("-"))
        except ValueError:
            raise ConfigurationError(f"{work_path} is not a shard's work: only a job with shards creates it") from None
        return cls(parse_location(ledger), job, shard, attempt)

    @property
    def directory(self) -> PathOrLocation:
        """The directory of all files of the job's shards."""
        return self.ledger / "shards" / self.job

    def _locate(self, suffix: str) -> PathOrLocation:
        return self.directory / f"{self.shard:05}-{self.attempt}.{suffix}"

    @property
    def work_path(self) -> PathOrLocation:
        """The file with the header and the executions."""
        return self._locate("jsonl")

    @property
    def part_prefix(self) -> str:
        """The beginning of the names of the ledger's parts that this attempt writes."""
        return f"{self.job}-{self.shard:05}-{self.attempt}-"

    @property
    def next_attempt(self) -> "ShardFiles":
        """The attempt after this one."""
        return ShardFiles(self.ledger, self.job, self.shard, self.attempt + 1)

    def write_work(self, header: ShardHeader, executions: Iterable[Execution]) -> None:
        """Write the work atomically. Raises OSError."""
        write_file(self.work_path, self._encode_work(header, executions))

    def _encode_work(self, header: ShardHeader, executions: Iterable[Execution]) -> Iterator[bytes]:
        yield _encode_line(asdict(header))
        code: str | None = None
        for execution in executions:
            line: dict[str, Any] = {"number": execution.index, **execution_to_json(execution)}
            if execution.code != code:
                code = line["code"] = execution.code
            yield _encode_line(line)

    def read_work(self) -> tuple[ShardHeader, Iterator[Execution]]:
        """Return the header, and the executions as an iterator over the file. Raises ConfigurationError."""
        lines = iterate_lines(self.work_path)
        try:
            header = json.loads(next(lines))
            check_version(header, self.work_path)
            return ShardHeader(**header), self._parse_executions(lines)
        except FileNotFoundError:
            raise ConfigurationError(
                f"this worker cannot see the shard's work {self.work_path}: set results_path to a "
                "location that every worker reaches under the same name"
            ) from None
        except PermissionError as error:
            raise ConfigurationError(
                f"the shard's work {self.work_path} cannot be read: {error.strerror or error}"
            ) from error
        except (ValueError, TypeError, AttributeError, StopIteration) as error:
            raise ConfigurationError(f"the shard's work {self.work_path} is damaged: {error}") from None

    def _parse_executions(self, lines: Iterator[bytes]) -> Iterator[Execution]:
        code = ""
        for line in lines:
            work = json.loads(line)
            code = work.get("code", code)
            yield execution_from_json(work["number"], code, work)

    def has_work(self) -> bool:
        """Return whether this attempt's work was written."""
        return bool(list_names(self.directory, self.work_path.name))

    def mark_cancelled(self) -> None:
        """Tell the attempt to end, even if its process has not started yet. Raises OSError."""
        write_file(self._locate("cancelled"), b"cancelled\n")

    def is_cancelled(self) -> bool:
        """Return whether `mark_cancelled` was called. Raises OSError."""
        try:
            self._locate("cancelled").read_bytes()
        except FileNotFoundError:
            return False
        return True

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Write the heartbeat atomically. Raises OSError."""
        write_file(self._locate("beat"), json.dumps(asdict(heartbeat)).encode("ascii"))

    def read_heartbeat(self) -> Heartbeat | None:
        """Return the last heartbeat, or None before the first."""
        with suppress(OSError, ValueError, TypeError):
            return Heartbeat(**json.loads(self._locate("beat").read_bytes()))
        return None


class ShardCut(NamedTuple):
    """The sizes of a job's shards, and the id of its ledger."""

    ledger_id: str
    shard_size: int  # executions in one shard


def load_or_create_cut(ledger: PathOrLocation, job: str, shard_size: int) -> ShardCut:
    """Return the cut of an earlier run of the job, or else create a cut with that size. Raises OSError."""
    return ShardCut(
        _load_or_create(ledger / "shards" / "id", uuid.uuid4().hex[:16]),
        int(_load_or_create(ledger / "shards" / job / "size", str(shard_size))),
    )


def _load_or_create(path: PathOrLocation, value: str) -> str:
    try:
        return path.read_bytes().decode("ascii")
    except FileNotFoundError:
        write_file(path, value.encode("ascii"))
        return path.read_bytes().decode("ascii")  # Another run may have written it at the same time.


def find_last_attempts(ledger: PathOrLocation, job: str) -> dict[int, int]:
    """Return the number of the last attempt by shard; shards without an attempt are missing."""
    attempts: dict[int, int] = {}
    for name in list_names(ledger / "shards" / job, "*-*.jsonl"):
        with suppress(ValueError):
            shard, attempt = (int(number) for number in name.removesuffix(".jsonl").split("-"))
            attempts[shard] = max(attempt, attempts.get(shard, 0))
    return attempts


def _encode_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"
