"""A shard's files, in the ledger that it writes to: what it is to do, and its sign of life.

They are in `shards/<job>/`. `<shard>-<attempt>.jsonl` is the work: a head, and then an execution a line, whose code is
that of the line before where it says none. `<shard>-<attempt>.beat` says how far the attempt is, and that it is alive.
A later attempt's work means that nobody waits for the earlier ones any more.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...blocks.storage import locations
from ...blocks.storage.locations import Place, located
from ...sandbox.errors import ConfigurationError
from ..execution import Execution
from .shard_store import execution_from, work_of

VERSION = 1


@dataclass(frozen=True, slots=True)
class Head:
    """What an attempt at a shard is: of which job, which of how many shards, which attempt, and how much there is.

    `what` is what the job calls an execution. `commit` is the one that the job resolved the repository's ref to.
    """

    job: str
    shard: int
    shards: int
    attempt: int
    total: int
    what: str
    commit: str | None
    version: int = VERSION

    @property
    def part_of(self) -> str:
        """What the names of the ledger's parts begin with that this attempt writes."""
        return f"{self.job}-{self.shard:05}-{self.attempt}-"


@dataclass(slots=True)
class Beat:
    """How far an attempt is. `count` goes up while it is alive; `error` is a type and a message, of one that failed.

    `sandboxes` were opened, for `sandbox_seconds` together; the model was called `calls` times, for `cost` US dollars
    where every price is known.
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
    late: int = 0  # executions that the deadline left undone
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Portion:
    """The files of one attempt at a shard."""

    ledger: Place
    job: str
    shard: int
    attempt: int

    @classmethod
    def at(cls, work: str) -> Portion:
        """That whose work is at this location. Raises ConfigurationError where no attempt has its work there."""
        try:
            ledger, _, job, name = work.rsplit("/", 3)
            shard, attempt = (int(number) for number in name.removesuffix(".jsonl").split("-"))
        except ValueError:
            raise ConfigurationError(
                f"{work} is not the work of a shard: a job that has shards makes its own"
            ) from None
        return cls(located(ledger), job, shard, attempt)

    @property
    def folder(self) -> Place:
        return self.ledger / "shards" / self.job

    @property
    def work(self) -> Place:
        return self.folder / f"{self.shard:05}-{self.attempt}.jsonl"

    @property
    def next(self) -> Portion:
        """The attempt after this one."""
        return Portion(self.ledger, self.job, self.shard, self.attempt + 1)

    def write(self, head: Head, executions: Iterable[Execution]) -> None:
        """Writes the work, in one piece. Raises OSError."""
        locations.write(self.work, self._written(head, executions))

    def _written(self, head: Head, executions: Iterable[Execution]) -> Iterator[bytes]:
        yield _line(asdict(head))
        code: str | None = None
        for execution in executions:
            line: dict[str, Any] = {"number": execution.index, **work_of(execution)}
            if execution.code != code:
                code = line["code"] = execution.code
            yield _line(line)

    def read(self) -> tuple[Head, Iterator[Execution]]:
        """What the work says; the executions are read as they are asked for. Raises ConfigurationError."""
        lines = locations.lines(self.work)
        try:
            return Head(**json.loads(next(lines))), self._executions(lines)
        except FileNotFoundError:
            raise ConfigurationError(
                f"the work of this shard, {self.work}, is not there for this worker: the results_path of a job with "
                "shards has to be a location that every worker reaches by the same name"
            ) from None
        except PermissionError as error:
            raise ConfigurationError(
                f"the work of this shard, {self.work}, may not be read: {error.strerror or error}"
            ) from error
        except (ValueError, TypeError, StopIteration) as error:
            raise ConfigurationError(
                f"the work of this shard, {self.work}, is damaged, or from another version of rlm-batch: {error}"
            ) from None

    def _executions(self, lines: Iterator[bytes]) -> Iterator[Execution]:
        code = ""
        for line in lines:
            work = json.loads(line)
            code = work.get("code", code)
            yield execution_from(work["number"], code, work)

    def exists(self) -> bool:
        """Whether this attempt was begun."""
        return bool(locations.names(self.folder, self.work.name))

    def beat(self, beat: Beat) -> None:
        """Writes the sign of life, in one piece. Raises OSError."""
        locations.write(self._beat, json.dumps(asdict(beat)).encode("ascii"))

    @property
    def _beat(self) -> Place:
        return self.folder / f"{self.shard:05}-{self.attempt}.beat"

    def life(self) -> Beat | None:
        """The last sign of life, None where there is none yet."""
        known = {item.name for item in fields(Beat)}  # a worker may have another version, which says more
        with suppress(OSError, ValueError, TypeError, AttributeError):
            said = json.loads(locations.read(self._beat))
            return Beat(**{name: value for name, value in said.items() if name in known})
        return None


def kept_cut(ledger: Place, job: str, size: int) -> tuple[str, int]:
    """An id of the ledger, and how many executions a shard of the job has: as they are there, and else made now.

    So a job that is run again has the shards that it had, however many there would be today. Raises OSError.
    """
    return _kept(ledger / "shards" / "id", uuid.uuid4().hex[:16]), int(
        _kept(ledger / "shards" / job / "size", str(size))
    )


def _kept(place: Place, value: str) -> str:
    try:
        return locations.read(place).decode("ascii")
    except FileNotFoundError:
        locations.write(place, value.encode("ascii"))
        return locations.read(place).decode("ascii")  # another may have been as quick


def last_attempts(ledger: Place, job: str) -> dict[int, int]:
    """The number of the last attempt at each shard of a job that has one."""
    found: dict[int, int] = {}
    for name in locations.names(ledger / "shards" / job, "*-*.jsonl"):
        with suppress(ValueError):
            shard, attempt = (int(number) for number in name.removesuffix(".jsonl").split("-"))
            found[shard] = max(attempt, found.get(shard, 0))
    return found


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"
