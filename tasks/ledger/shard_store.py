"""The executions of a job in shards, and where each outcome is: in a temporary database, not in memory.

A million executions take some 300 MB of disk, below the system's directory for temporary files, and no memory but
SQLite's cache.
"""

import json
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, overload

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json
from ...sandbox.result import Failure, Outcome
from ..execution import Execution, execution_from_json, execution_to_json, with_index
from .ledger import Ledger
from .ledger_line import LedgerLine, LinePosition, read_line

PAGE_ROWS = 500  # that are read at a time
CACHE_KIB = 32 * 1024  # of the database in memory
UNFINISHED, FAILED, SUCCEEDED = 0, 1, 2
SCHEMA = f"""
pragma journal_mode = off;
pragma synchronous = off;
pragma cache_size = -{CACHE_KIB};
create table executions (
    number integer primary key, key blob not null, code integer not null, state integer not null default {UNFINISHED},
    part integer, start integer, length integer, outcome text, work text not null);
create table codes (number integer primary key, text text not null);
create table before (
    key blob primary key, at real not null, part integer not null, start integer not null, length integer not null
) without rowid;
create table occurrences (digest blob primary key, count integer not null) without rowid;
begin;
"""  # and no end of the transaction: what is not committed one by one costs a tenth, and nobody else reads it


class OutcomeRow(NamedTuple):
    """Where the outcome of an execution is: in a part of the ledger, or here as JSON where no ledger has it."""

    number: int
    part: int | None
    start: int
    length: int
    outcome: str


class ShardStore:
    """Executions by their numbers, and their outcomes as they come.

    An outcome is a line of the ledger, which is read again when it is asked for, or is stored here where no ledger has
    it. The methods raise sqlite3.Error where the disk is full.
    """

    def __init__(self, *, ledger: Ledger) -> None:
        """`ledger` has the lines. It is held because the copies that it has fetched from a location end with it."""
        self._ledger = ledger
        # Without a name: a file that is deleted when it is closed. Whoever reads the results may be in another thread.
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.executescript(SCHEMA)
        self._last_code, self._code_count = "", 0
        self._part_numbers: dict[str, int] = {}
        self._part_paths: list[str] = []
        self._has_key_index = False

    # --------------------------------------------------------------------------------------------------- executions

    def count_occurrence(self, digest: bytes) -> int:
        """How often this was called with that digest, this call included."""
        statement = "insert into occurrences values (?, 1) on conflict do update set count = count + 1 returning count"
        return self._database.execute(statement, (digest,)).fetchone()[0]

    def add_execution(self, execution: Execution) -> None:
        """Adds an execution, whose number is its index. Raises ConfigurationError where its variables are no JSON."""
        if not self._code_count or execution.code != self._last_code:
            self._last_code, self._code_count = execution.code, self._code_count + 1
            self._database.execute("insert into codes values (?, ?)", (self._code_count, _encode_json(self._last_code)))
        try:
            work = _encode_json(execution_to_json(execution))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the variables of number {execution.index} are not JSON: {error}") from None
        self._database.execute(
            "insert into executions (number, key, code, work) values (?, ?, ?, ?)",
            (execution.index, bytes.fromhex(execution.key), self._code_count, work),
        )

    def iterate_unfinished(self, start: int, stop: int) -> Iterator[Execution]:
        """The executions from `start` up to `stop` that have no outcome yet, in order."""
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
        """How many executions from `start` up to `stop` have no outcome yet."""
        query = "select count(*) from executions where number >= ? and number < ? and state = ?"
        return self._database.execute(query, (start, stop, UNFINISHED)).fetchone()[0]

    # ----------------------------------------------------------------------------------------------------- outcomes

    def add_previous_line(self, line: LedgerLine) -> None:
        """Adds a line that the ledger had before, for `find_previous_line`; only results count, the latest of a key."""
        if not line.is_success:
            return
        path, start, length = line.position
        self._database.execute(
            "insert into before values (?, ?, ?, ?, ?) on conflict do update set at = excluded.at, "
            "part = excluded.part, start = excluded.start, length = excluded.length where excluded.at >= at",
            (bytes.fromhex(line.key), line.written_at, self._find_part_number(path), start, length),
        )

    def find_previous_line(self, key: str) -> LedgerLine | None:
        """The result that the ledger had of that key, None where it had none."""
        row = self._find_previous_row(key)
        return None if row is None else read_line(LinePosition(self._part_paths[row[0]], row[1], row[2]))

    def record_previous_result(self, execution: Execution) -> None:
        """Takes the result that `find_previous_line` finds, or that is about to be in the ledger, for the outcome."""
        self._set_line(execution.index, SUCCEEDED, self._find_previous_row(execution.key) or (None, None, None))

    def _find_previous_row(self, key: str) -> Any:
        query = "select part, start, length from before where key = ?"
        return self._database.execute(query, (bytes.fromhex(key),)).fetchone()

    def _set_line(self, number: int, state: int, position: tuple[int | None, int | None, int | None]) -> None:
        """Sets an execution's state, and where its outcome's line is: its part's number, its offset and its length."""
        statement = "update executions set state = ?, part = ?, start = ?, length = ? where number = ?"
        self._database.execute(statement, (state, *position, number))

    def record_line(self, line: LedgerLine) -> Outcome | None:
        """Adds a new line of the ledger. Returns its outcome where it is the first of one of these executions."""
        if not self._has_key_index:
            self._database.execute("create unique index if not exists keys on executions (key)")
            self._has_key_index = True
        row = self._database.execute(
            "select number, state, part from executions where key = ?", (bytes.fromhex(line.key),)
        ).fetchone()
        if row is None:
            return None
        number, known_state, part = row
        state = SUCCEEDED if line.is_success else FAILED
        # Success beats failure, and the first success stays; of failures the later counts.
        if known_state > state or (known_state == SUCCEEDED and part is not None):
            return None
        path, start, length = line.position
        self._set_line(number, state, (self._find_part_number(path), start, length))
        return with_index(line.to_outcome(), number) if known_state == UNFINISHED else None

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Stores an outcome that is in no ledger, because it does not count for a later run."""
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

    # --------------------------------------------------------------------------------------------------------- rows

    def read_rows(self, states: Collection[int], after: int, limit: int, skip: int = 0) -> list[OutcomeRow]:
        """The rows in one of these states, by their numbers, of which `after` is the last that is not wanted."""
        rows = self._database.execute(
            "select number, part, start, length, outcome from executions where number > ? and "
            f"state in ({', '.join(map(str, states))}) order by number limit ? offset ?",
            (after, limit, skip),
        )
        return [OutcomeRow(*row) for row in rows]

    @property
    def last_number(self) -> int:
        """The greatest number, -1 where there is none."""
        number = self._database.execute("select max(number) from executions").fetchone()[0]
        return -1 if number is None else number

    def count_rows(self, states: Collection[int]) -> int:
        """How many rows are in one of these states."""
        query = f"select count(*) from executions where state in ({', '.join(map(str, states))})"
        return self._database.execute(query).fetchone()[0]

    def load_outcome(self, row: OutcomeRow) -> Outcome:
        """The outcome of a row. Raises OSError where the ledger has it no longer."""
        if row.part is None:
            return outcome_from_json(json.loads(row.outcome))
        path = self._part_paths[row.part]
        line = read_line(LinePosition(path, row.start, row.length))
        if line is None:
            raise OSError(f"the result of number {row.number} is no longer in the ledger: {path} has changed")
        return with_index(line.to_outcome(), row.number)

    def _find_part_number(self, path: str) -> int:
        if path not in self._part_numbers:
            self._part_numbers[path] = len(self._part_paths)
            self._part_paths.append(path)
        return self._part_numbers[path]


class LazyOutcomes(Sequence[Outcome]):
    """Outcomes in order, each read from the ledger when it is asked for. Raises OSError where that has gone."""

    def __init__(self, store: ShardStore, states: Collection[int]) -> None:
        self._store, self._states = store, states
        self._is_gapless = False

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
            return self._load(positions, 1)[0]
        if positions.step == 1 and positions:
            return self._load(positions.start, len(positions))
        return [self._load(position, 1)[0] for position in positions]

    def _load(self, position: int, count: int) -> list[Outcome]:
        # Where no number is missing it is the position, and the rows before it need not be counted.
        skip, after = (0, position - 1) if self._check_gapless() else (position, -1)
        return [self._store.load_outcome(row) for row in self._store.read_rows(self._states, after, count, skip)]

    def _check_gapless(self) -> bool:
        self._is_gapless = self._is_gapless or len(self) == self._store.last_number + 1
        return self._is_gapless

    def __repr__(self) -> str:
        return f"<{len(self):,} outcomes, read from the ledger as they are asked for>"


def _encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
