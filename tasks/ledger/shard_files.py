"""The work of a shard, a file in `shards/<job>/` below its job's ledger.

`<shard>-<attempt>.jsonl` has a header, and then a line for each execution. A line without code has the code of the line
before.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...blocks.storage.location import PathOrLocation, iterate_lines, write_file
from ...blocks.storage.location_parsing import parse_location
from ...sandbox.errors import ConfigurationError
from ..execution import Execution, execution_from_json, execution_to_json
from .ledger_line import VERSION, check_version


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The part of a job that a shard must know."""

    shards: int  # number of the job's shards
    total: int  # number of executions in this work
    what: str  # the job's word for an execution
    commit: str | None  # the commit that the job found for the repository's ref
    version: int = VERSION


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
    def work_path(self) -> PathOrLocation:
        """The file with the header and the executions."""
        return self.ledger / "shards" / self.job / f"{self.shard:05}-{self.attempt}.jsonl"

    @property
    def part_prefix(self) -> str:
        """The beginning of the names of the ledger's parts that this attempt writes."""
        return f"{self.job}-{self.shard:05}-{self.attempt}-"

    def write_work(self, header: ShardHeader, executions: Iterable[Execution]) -> None:
        """Write the work atomically. Raises OSError."""

        def encode() -> Iterator[bytes]:
            yield _encode_line(asdict(header))
            code: str | None = None
            for execution in executions:
                line: dict[str, Any] = {"number": execution.index, **execution_to_json(execution)}
                if execution.code != code:
                    code = line["code"] = execution.code
                yield _encode_line(line)

        write_file(self.work_path, encode())

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
        except (PermissionError, ValueError, TypeError, AttributeError, StopIteration) as error:
            raise ConfigurationError(f"the shard's work {self.work_path} cannot be read: {error}") from None

    def _parse_executions(self, lines: Iterator[bytes]) -> Iterator[Execution]:
        code = ""
        for line in lines:
            work = json.loads(line)
            code = work.get("code", code)
            yield execution_from_json(work["number"], code, work)


def _encode_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"
