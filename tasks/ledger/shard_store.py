"""What a job that is shared out consists of, and where each outcome stands: in a temporary database, not in memory.

A million executions take some 300 MB of disk, below the system's directory for temporary files, and of memory only what
SQLite keeps of them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Failure, Outcome, outcome_from_json, outcome_to_json
from ..execution import Execution
from .completion_markers import MarkerLocation
from .ledger import Ledger, LedgerLine, LinePosition, read_line

CACHE_KIB = 32 * 1024  # KiB of the database in memory
PAGE_ROWS = 500  # rows that are read at a time
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


class ShardStore:
    """Executions by their numbers, each with its work and, once it has one, where its outcome is.

    An outcome is a line of the ledger, which is read again when it is asked for, or stands here where no ledger has it.
    The methods raise sqlite3.Error where the disk is full.
    """

    def __init__(self, *, ledger: Ledger) -> None:
        """`ledger` has the lines. What it has fetched from a location lasts as long as it: so the store holds it."""
        self._ledger = ledger
        # Without a name: a file that is deleted when it is closed. Whoever reads the results may be in another thread.
        self._base = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._base.executescript(SCHEMA)
        self._code, self._codes = "", 0  # the text of the last execution, and how many there are
        self._parts: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        self._indexed = False

    # ------------------------------------------------------------------------------------------------- what is wanted

    def count_occurrence(self, digest: bytes) -> int:
        """How often that digest has been asked about, this time included."""
        statement = "insert into occurrences values (?, 1) on conflict do update set count = count + 1 returning count"
        return self._base.execute(statement, (digest,)).fetchone()[0]

    def add_execution(self, execution: Execution) -> None:
        """One more execution, whose number is its index. Raises ConfigurationError where its variables are no JSON."""
        if not self._codes or execution.code != self._code:
            self._code, self._codes = execution.code, self._codes + 1
            self._base.execute("insert into codes values (?, ?)", (self._codes, _encode_json(self._code)))
        try:
            work = _encode_json(execution_to_json(execution))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the variables of number {execution.index} are not JSON: {error}") from None
        self._base.execute(
            "insert into executions (number, key, code, work) values (?, ?, ?, ?)",
            (execution.index, bytes.fromhex(execution.key), self._codes, work),
        )

    def iterate_unfinished(self, start: int, stop: int) -> Iterator[Execution]:
        """The executions from `start` up to `stop` that have no outcome yet, in order."""
        after = start - 1
        while True:
            rows = self._base.execute(
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
        """How many of those there are."""
        query = "select count(*) from executions where number >= ? and number < ? and state = ?"
        return self._base.execute(query, (start, stop, UNFINISHED)).fetchone()[0]

    # ------------------------------------------------------------------------------------------------- what is there

    def add_previous_line(self, line: LedgerLine) -> None:
        """A line that the ledger had before: if it is a result, `before` finds it; of several the latest."""
        if not line.is_success:
            return
        path, start, length = line.position
        self._base.execute(
            "insert into before values (?, ?, ?, ?, ?) on conflict do update set at = excluded.at, "
            "part = excluded.part, start = excluded.start, length = excluded.length where excluded.at >= at",
            (bytes.fromhex(line.key), line.written_at, self._part(path), start, length),
        )

    def find_previous_line(self, key: str) -> LedgerLine | None:
        """The result that the ledger had of that key, None where it had none."""
        row = self._base.execute(
            "select part, start, length from before where key = ?", (bytes.fromhex(key),)
        ).fetchone()
        return None if row is None else read_line(LinePosition(self._path(row[0]), row[1], row[2]))

    def record_previous_result(self, execution: Execution) -> None:
        """The execution's outcome is the result that `before` finds, or that is about to be in the ledger."""
        row = self._base.execute(
            "select part, start, length from before where key = ?", (bytes.fromhex(execution.key),)
        ).fetchone()
        self._base.execute(
            "update executions set state = ?, part = ?, start = ?, length = ? where number = ?",
            (SUCCEEDED, *(row or (None, None, None)), execution.index),
        )

    def record_line(self, line: LedgerLine) -> Outcome | None:
        """A new line of the ledger. Returns its outcome where that is the first of one of these executions."""
        if not self._indexed:
            self._base.execute("create unique index if not exists keys on executions (key)")
            self._indexed = True
        row = self._base.execute(
            "select number, state, part from executions where key = ?", (bytes.fromhex(line.key),)
        ).fetchone()
        if row is None:
            return None
        number, held, part = row
        state = SUCCEEDED if line.is_success else FAILED
        # Success beats failure, and the first success stays; of failures the later counts.
        if held > state or (held == SUCCEEDED and part is not None):
            return None
        path, start, length = line.position
        self._base.execute(
            "update executions set state = ?, part = ?, start = ?, length = ? where number = ?",
            (state, self._part(path), start, length, number),
        )
        return _with_index(line.to_outcome(), number) if held == UNFINISHED else None

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """An outcome that no ledger has, because it does not count another time."""
        if self._state(execution.index) is None:
            self.add_execution(execution)
        self._base.execute(
            "update executions set state = ?, outcome = ? where number = ?",
            (
                FAILED if isinstance(outcome, Failure) else SUCCEEDED,
                _encode_json(outcome_to_json(outcome)),
                execution.index,
            ),
        )

    def __contains__(self, index: int) -> bool:
        return bool(self._state(index))

    def _state(self, index: int) -> int | None:
        row = self._base.execute("select state from executions where number = ?", (index,)).fetchone()
        return None if row is None else row[0]

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes so far, in order."""
        return LazyOutcomes(self, (FAILED, SUCCEEDED))

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures so far, in order."""
        return LazyOutcomes(self, (FAILED,))  # type: ignore[return-value]

    # ---------------------------------------------------------------------------------------------------------- rows

    def rows(self, states: tuple[int, ...], after: int, limit: int, skip: int = 0) -> list[tuple[Any, ...]]:
        """Rows whose state is one of these: the number, where the outcome is, and the outcome that no ledger has."""
        return self._base.execute(
            "select number, part, start, length, outcome from executions where number > ? and "
            f"state in ({', '.join(map(str, states))}) order by number limit ? offset ?",
            (after, limit, skip),
        ).fetchall()

    @property
    def last(self) -> int:
        """The greatest number, -1 where there is none."""
        found = self._base.execute("select max(number) from executions").fetchone()[0]
        return -1 if found is None else found

    def length(self, states: tuple[int, ...]) -> int:
        """How many there are."""
        query = f"select count(*) from executions where state in ({', '.join(map(str, states))})"
        return self._base.execute(query).fetchone()[0]

    def outcome(self, row: tuple[Any, ...]) -> Outcome:
        """The outcome that a row says. Raises OSError where the ledger has it no longer."""
        number, part, start, length, outcome = row
        if part is None:
            return outcome_from_json(json.loads(outcome))
        line = read_line(LinePosition(self._path(part), start, length))
        if line is None:
            raise OSError(f"the result of number {number} is no longer in the ledger: {self._path(part)} has changed")
        return _with_index(line.to_outcome(), number)

    def _part(self, path: str) -> int:
        number = self._parts.get(path)
        if number is None:
            number = self._parts[path] = len(self._parts)
            self._paths[number] = path
        return number

    def _path(self, number: int) -> str:
        return self._paths[number]


class LazyOutcomes(Sequence[Outcome]):
    """Outcomes in order, each read from where it is written when it is asked for: none of them is in memory.

    It reads the ledger for as long as it is used. Raises OSError where that has gone meanwhile.
    """

    def __init__(self, catalogue: ShardStore, states: tuple[int, ...]) -> None:
        self._catalogue, self._states = catalogue, states
        self._is_whole = False

    def __len__(self) -> int:
        return self._catalogue.length(self._states)

    def __iter__(self) -> Iterator[Outcome]:
        after = -1
        while rows := self._catalogue.rows(self._states, after, PAGE_ROWS):
            for row in rows:
                yield self._catalogue.outcome(row)
            after = rows[-1][0]

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> list[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | list[Outcome]:
        places = range(len(self))[at]
        if isinstance(places, int):
            return self._at(places, 1)[0]
        if places.step == 1 and places:
            return self._at(places.start, len(places))
        return [self._at(place, 1)[0] for place in places]

    def _at(self, place: int, count: int) -> list[Outcome]:
        # Where none is missing the place is the number, and the others need not be counted.
        skip, after = (0, place - 1) if self._whole() else (place, -1)
        return [self._catalogue.outcome(row) for row in self._catalogue.rows(self._states, after, count, skip)]

    def _whole(self) -> bool:
        self._is_whole = self._is_whole or len(self) == self._catalogue.last + 1
        return self._is_whole

    def __repr__(self) -> str:
        return f"<{len(self):,} outcomes, read from the ledger as they are asked for>"


def execution_to_json(execution: Execution) -> dict[str, Any]:
    """What a catalogue or a shard's file says of an execution, beside its number and its code."""
    work: dict[str, Any] = {"key": execution.key, "variables": execution.variables}
    if execution.encoded_variables:
        work["encoded"] = {name: value.decode("utf-8") for name, value in execution.encoded_variables.items()}
    if execution.marker is not None:
        work["mark"] = [execution.marker.path, execution.marker.is_stale]
    return work


def execution_from_json(index: int, code: str, work: dict[str, Any]) -> Execution:
    """The execution of which `work_of` said that."""
    encoded = {name: text.encode("utf-8") for name, text in work.get("encoded", {}).items()}
    mark = MarkerLocation(*work["mark"]) if "mark" in work else None
    return Execution(index, code, work["variables"], work["key"], encoded, mark)


def _encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _with_index(outcome: Outcome, index: int) -> Outcome:
    outcome.meta = replace(outcome.meta, index=index)
    return outcome
