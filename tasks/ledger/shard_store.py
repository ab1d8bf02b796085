"""The store of a job in shards: its executions and the positions of their outcomes, in a temporary database.

A million executions take about 400 MB of disk in the system's directory for temporary files. Only SQLite's cache takes
memory.
"""

import json
import math
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, overload

from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json
from ...sandbox.result import Failure, Outcome
from ..execution import Execution, execution_from_json, execution_to_json, with_index
from ..repeats import Repeats, locate_execution
from .ledger import Ledger
from .ledger_line import LedgerLine, LinePosition, read_line

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
"""  # One transaction without end is ten times faster, and nothing else reads the database.


class OutcomeRow(NamedTuple):
    """The position of an execution's outcome in a part of the ledger, or the outcome as JSON if no ledger has it."""

    number: int
    part: str | None
    start: int
    length: int
    outcome: str


class ShardStore:
    """Executions by their numbers, and their outcomes so far.

    An outcome is a line of the ledger, which is read on request. The database has the outcomes that are in no ledger.
    The methods raise sqlite3.Error if the disk is full.
    """

    def __init__(self, *, ledger: Ledger, repeats: Repeats | None = None) -> None:
        self._repeats = repeats
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
        after = start - 1
        while True:
            rows = self._database.execute(
                "select executions.number, text, work from executions join codes on codes.number = code "
                "where executions.number > ? and executions.number < ? and state = ? "
                "order by executions.number limit ?",
                (after, stop, UNFINISHED, PAGE_ROWS),
            ).fetchall()
            for after, code, work in rows:
                yield execution_from_json(after, json.loads(code), json.loads(work))
            if len(rows) < PAGE_ROWS:
                return

    def count_unfinished(self, start: int, stop: int) -> int:
        """Return how many executions from `start` up to `stop` have no outcome yet."""
        query = "select count(*) from executions where number >= ? and number < ? and state = ?"
        return self._database.execute(query, (start, stop, UNFINISHED)).fetchone()[0]

    def find_starts(self, start: int, stop: int, count: int) -> list[int]:
        """Return the first numbers of `count` ranges with equally many unfinished executions each, or of fewer."""
        size = math.ceil(self.count_unfinished(start, stop) / count)
        query = (
            "select number from (select number, row_number() over (order by number) - 1 as place from executions "
            "where number >= ? and number < ? and state = ?) where place % ? = 0 order by number"
        )
        return [number for (number,) in self._database.execute(query, (start, stop, UNFINISHED, size))]

    def record_adopted(self, execution: Execution) -> None:
        """Record that the ledger gets the execution's result from another ledger. `record_line` gets the line later."""
        self._set_line(execution.index, SUCCEEDED, (None, None, None))

    def _set_line(self, number: int, state: int, position: LinePosition | tuple[None, None, None]) -> None:
        """Set an execution's state, and the position of its outcome."""
        statement = "update executions set state = ?, part = ?, start = ?, length = ? where number = ?"
        self._database.execute(statement, (state, *position, number))

    def record_line(self, line: LedgerLine) -> Outcome | None:
        """Add a new line of the ledger. Return the outcome if it is the execution's first outcome, otherwise None."""
        self._database.execute("create unique index if not exists keys on executions (key)")  # faster afterwards
        row = self._database.execute(
            "select number, state, part from executions where key = ?", (bytes.fromhex(line.key),)
        ).fetchone()
        if row is None:
            return None
        number, known_state, part = row
        state = SUCCEEDED if line.is_success else FAILED
        # A success counts before a failure. The first success counts, and the last failure.
        if known_state > state or (known_state == SUCCEEDED and part is not None):
            return None
        self._set_line(number, state, line.position)
        return self._place_outcome(line, number) if known_state == UNFINISHED else None

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
        return LazyOutcomes(self, (FAILED, SUCCEEDED))

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures so far, in order."""
        return LazyOutcomes(self, (FAILED,))  # type: ignore[return-value]

    def read_rows(self, states: Collection[int], after: int, limit: int, skip: int = 0) -> list[OutcomeRow]:
        """Return rows in one of these states whose numbers are greater than `after`, in order."""
        rows = self._database.execute(
            "select number, part, start, length, outcome from executions where number > ? and "
            f"state in ({', '.join(map(str, states))}) order by number limit ? offset ?",
            (after, limit, skip),
        )
        return [OutcomeRow(*row) for row in rows]

    def count_rows(self, states: Collection[int]) -> int:
        """Return how many rows are in one of these states."""
        query = f"select count(*) from executions where state in ({', '.join(map(str, states))})"
        return self._database.execute(query).fetchone()[0]

    def load_outcome(self, row: OutcomeRow) -> Outcome:
        """Return the outcome of a row. Raises OSError if it is no longer in the ledger."""
        if row.part is None:
            return outcome_from_json(json.loads(row.outcome))
        position = LinePosition(row.part, row.start, row.length)
        line = read_line(position)
        if line is None:
            raise OSError(f"the result of number {row.number} is no longer in the ledger: {position.part} has changed")
        return self._place_outcome(line, row.number)

    def _place_outcome(self, line: LedgerLine, number: int) -> Outcome:
        return with_index(line.to_outcome(), number, locate_execution(self._repeats, number))


class LazyOutcomes(Sequence[Outcome]):
    """Outcomes in order, each read from the ledger on access. An access raises OSError if the line is missing."""

    def __init__(self, store: ShardStore, states: Collection[int]) -> None:
        self._store, self._states = store, states

    def __len__(self) -> int:
        return self._store.count_rows(self._states)

    def __iter__(self) -> Iterator[Outcome]:
        after = -1
        while page := self._store.read_rows(self._states, after, PAGE_ROWS):
            for row in page:
                yield self._store.load_outcome(row)
            after = page[-1].number

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> list[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | list[Outcome]:
        positions = range(len(self))[at]
        if isinstance(positions, int):
            return self._load(positions)
        return [self._load(position) for position in positions]

    def _load(self, position: int) -> Outcome:
        (row,) = self._store.read_rows(self._states, -1, 1, position)
        return self._store.load_outcome(row)

    def __repr__(self) -> str:
        return f"<{len(self):,} outcomes, read from the ledger as they are asked for>"


def _encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
