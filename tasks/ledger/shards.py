"""The shards of a job: the files with their work, and the store of the job's executions and outcomes.

`shards/<job>/<shard>-<attempt>.jsonl` below the job's ledger is the work of one attempt at a shard. It has a header,
and then a line for each execution. A line without code has the code of the line before.

The store is a temporary database. A million executions take about 400 MB of disk in the system's directory for
temporary files. Only SQLite's cache takes memory.
"""

import itertools
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, overload

from ...blocks.storage.location import PathOrLocation, iterate_lines, write_file
from ...blocks.storage.location_parsing import parse_location
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json
from ...sandbox.result import Failure, Outcome
from ..execution import Execution, execution_from_json, execution_to_json, with_index
from ..repeats import Repeats, locate_execution
from .ledger import Ledger
from .ledger_line import VERSION, LedgerLine, LinePosition, check_version, read_line

PAGE_ROWS = 500
CACHE_KIB = 32 * 1024
UNFINISHED, FAILED, SUCCEEDED = 0, 1, 2
SCHEMA = f"""
pragma journal_mode = off;
pragma synchronous = off;
pragma cache_size = -{CACHE_KIB};
create table executions (
    number integer primary key, key blob not null, code integer not null, state integer not null default {UNFINISHED},
    part text, start integer, length integer, outcome text, work text not null);
create table codes (number integer primary key, text text not null);
create table occurrences (digest blob primary key, count integer not null) without rowid;
begin;
"""  # The transaction never ends: that is ten times faster, and nothing else reads the database.


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The facts about its job that a shard must know."""

    shards: int  # the number of the job's shards
    total: int  # the number of executions in this work
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
        """Return the files of the attempt whose work is at this path. Raises ConfigurationError for other paths."""
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
        """Write the work atomically. Raises OSError if the file cannot be written."""

        def encode_lines() -> Iterator[bytes]:
            yield _encode_json(asdict(header)).encode("ascii") + b"\n"
            last_code: str | None = None
            for execution in executions:
                line: dict[str, Any] = {"number": execution.index, **execution_to_json(execution)}
                if execution.code != last_code:
                    line["code"] = last_code = execution.code
                yield _encode_json(line).encode("ascii") + b"\n"

        write_file(self.work_path, encode_lines())

    def read_work(self) -> tuple[ShardHeader, Iterator[Execution]]:
        """Return the header, and an iterator that reads the executions.

        Raises ConfigurationError if the file is missing or damaged.
        """
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


class OutcomeRow(NamedTuple):
    """The row of an execution that has an outcome."""

    number: int
    part: str | None  # the part of the ledger with the outcome's line; None if no ledger has it
    start: int  # the offset of the line in bytes
    length: int  # the length of the line in bytes
    outcome: str  # the outcome as JSON, if no ledger has it


class ShardStore:
    """Executions by their numbers, and their outcomes so far.

    The store has the positions of the outcomes in the ledger, from which it reads them on request. It contains only the
    outcomes that are in no ledger. The methods raise sqlite3.Error if the disk is full.
    """

    def __init__(self, *, ledger: Ledger, total: int, repeats: Repeats | None = None) -> None:
        self._repeats = repeats
        self._total = total  # the number of the reduction, if there is one
        self._ledger = ledger  # The copies of a location's files are deleted with the ledger.
        # A database without a name is deleted when it is closed. Another thread may read the results.
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.executescript(SCHEMA)
        self._last_code, self._code_count = "", 0

    def count_occurrence(self, digest: bytes) -> int:
        """Return how often this method was called with that digest, including this call."""
        statement = "insert into occurrences values (?, 1) on conflict do update set count = count + 1 returning count"
        return self._database.execute(statement, (digest,)).fetchone()[0]

    def add_execution(self, execution: Execution) -> None:
        """Add an execution under its index."""
        if not self._code_count or execution.code != self._last_code:
            self._last_code, self._code_count = execution.code, self._code_count + 1
            self._database.execute("insert into codes values (?, ?)", (self._code_count, _encode_json(self._last_code)))
        work = _encode_json(execution_to_json(execution))
        self._database.execute(
            "insert into executions (number, key, code, work) values (?, ?, ?, ?)",
            (execution.index, bytes.fromhex(execution.key), self._code_count, work),
        )

    def iterate_unfinished(self, start: int, stop: int) -> Iterator[Execution]:
        """Yield the executions from `start` up to `stop` that have no outcome yet, in order."""
        query = (
            "select executions.number, text, work from executions join codes on codes.number = code "
            "where executions.number >= ? and executions.number < ? and state = ? order by executions.number limit ?"
        )
        while rows := self._database.execute(query, (start, stop, UNFINISHED, PAGE_ROWS)).fetchall():
            for number, code, work in rows:
                yield execution_from_json(number, json.loads(code), json.loads(work))
                start = number + 1

    def count_unfinished(self, start: int, stop: int) -> int:
        """Return how many executions from `start` up to `stop` have no outcome yet."""
        query = "select count(*) from executions where number >= ? and number < ? and state = ?"
        return self._database.execute(query, (start, stop, UNFINISHED)).fetchone()[0]

    def find_starts(self, start: int, stop: int, count: int) -> list[int]:
        """Cut the executions from `start` up to `stop` into at most `count` ranges with equally many unfinished ones.

        Returns the first number of each range.
        """
        size = math.ceil(self.count_unfinished(start, stop) / count)
        query = "select number from executions where number >= ? and number < ? and state = ? order by number"
        numbers = self._database.execute(query, (start, stop, UNFINISHED))
        return [number for position, (number,) in enumerate(numbers) if position % size == 0]

    def record_adopted(self, execution: Execution) -> None:
        """Record that an execution has a result, copied from another ledger. Later, `record_line` stores its line."""
        self._database.execute("update executions set state = ? where number = ?", (SUCCEEDED, execution.index))

    def record_line(self, line: LedgerLine) -> Outcome | None:
        """Record a new line of the ledger. Return the outcome if it is the first one of its execution, else None."""
        # The index is made after the executions were added, because adding them is faster without it.
        self._database.execute("create unique index if not exists keys on executions (key)")
        row = self._database.execute(
            "select number, state, part from executions where key = ?", (bytes.fromhex(line.key),)
        ).fetchone()
        if row is None:
            return None
        number, known_state, known_part = row
        state = SUCCEEDED if line.is_success else FAILED
        # A success counts before a failure. The first success counts, and the last failure.
        if known_state > state or (known_state == SUCCEEDED and known_part is not None):
            return None
        statement = "update executions set state = ?, part = ?, start = ?, length = ? where number = ?"
        self._database.execute(statement, (state, *line.position, number))
        return self._build_outcome(line, number) if known_state == UNFINISHED else None

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Store an outcome that is in no ledger, because it does not count for a later run."""
        if self._read_state(execution.index) is None:
            self.add_execution(execution)
        state = FAILED if isinstance(outcome, Failure) else SUCCEEDED
        statement = "update executions set state = ?, outcome = ? where number = ?"
        self._database.execute(statement, (state, _encode_json(outcome_to_json(outcome)), execution.index))

    def __contains__(self, index: int) -> bool:
        return bool(self._read_state(index))

    def _read_state(self, index: int) -> int | None:
        row = self._database.execute("select state from executions where number = ?", (index,)).fetchone()
        return None if row is None else row[0]

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes so far, in order."""
        return LazyOutcomes(self, f"{FAILED}, {SUCCEEDED}")

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures so far, in order."""
        return LazyOutcomes(self, f"{FAILED}")  # type: ignore[return-value]

    def read_rows(self, states: str, start: int, limit: int, skip: int = 0) -> list[OutcomeRow]:
        """Return rows from the number `start` on, in order, without the first `skip` rows, and at most `limit` rows.

        `states` is a list in SQL of the states that the rows may have.
        """
        rows = self._database.execute(
            "select number, part, start, length, outcome from executions where number >= ? and "
            f"state in ({states}) order by number limit ? offset ?",
            (start, limit, skip),
        )
        return [OutcomeRow(*row) for row in rows]

    def count_rows(self, states: str) -> int:
        """Return how many rows have one of these states."""
        return self._database.execute(f"select count(*) from executions where state in ({states})").fetchone()[0]

    def load_outcome(self, row: OutcomeRow) -> Outcome:
        """Return the outcome of a row. Raises OSError if it is no longer in the ledger."""
        if row.part is None:
            return outcome_from_json(json.loads(row.outcome))
        position = LinePosition(row.part, row.start, row.length)
        line = read_line(position)
        if line is None:
            raise OSError(f"the result of number {row.number} is no longer in the ledger: {position.part} has changed")
        return self._build_outcome(line, row.number)

    def _build_outcome(self, line: LedgerLine, number: int) -> Outcome:
        place, is_reduction = locate_execution(self._repeats, number), number == self._total
        return with_index(line.to_outcome(), number, place, is_reduction=is_reduction)


class LazyOutcomes(Sequence[Outcome]):
    """Outcomes in order, each read from the ledger on access. An access raises OSError if the line is missing."""

    def __init__(self, store: ShardStore, states: str, size: int | None = None) -> None:
        self._store, self._states, self._size = store, states, size

    def __len__(self) -> int:
        return self._store.count_rows(self._states) if self._size is None else self._size

    def __iter__(self) -> Iterator[Outcome]:
        return itertools.islice(self._read(), self._size)

    def _read(self) -> Iterator[Outcome]:
        start = 0
        while rows := self._store.read_rows(self._states, start, PAGE_ROWS):
            for row in rows:
                yield self._store.load_outcome(row)
            start = rows[-1].number + 1

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | Sequence[Outcome]:
        if at == slice(None, -1):  # Reports leave the reduction out, and memory may not hold the others.
            return LazyOutcomes(self._store, self._states, max(0, len(self) - 1))
        positions = range(len(self))[at]
        if isinstance(positions, int):
            return self._load(positions)
        return [self._load(position) for position in positions]

    def _load(self, position: int) -> Outcome:
        (row,) = self._store.read_rows(self._states, 0, 1, position)
        return self._store.load_outcome(row)

    def __repr__(self) -> str:
        return f"<{len(self):,} outcomes, read from the ledger as they are asked for>"


def _encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
