"""A sequence of outcomes that are read when they are asked for, and not held in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol, overload

from ...sandbox.result import Outcome

PAGE_ROWS = 500  # that are read at a time


class OutcomeRow(NamedTuple):
    """Where the outcome of an execution is: in a part of the ledger, or here as JSON where no ledger has it."""

    number: int
    part: int | None
    start: int
    length: int
    outcome: str


class OutcomeRows(Protocol):
    """The rows of a store, each in one of several states."""

    @property
    def last_number(self) -> int:
        """The greatest number, -1 where there is none."""
        ...

    def count_rows(self, states: Collection[int]) -> int:
        """How many rows are in one of these states."""
        ...

    def read_rows(self, states: Collection[int], after: int, limit: int, skip: int = 0) -> list[OutcomeRow]:
        """The rows in one of these states, by their numbers, of which `after` is the last that is not wanted."""
        ...

    def load_outcome(self, row: OutcomeRow) -> Outcome:
        """The outcome of a row. Raises OSError where the ledger has it no longer."""
        ...


class LazyOutcomes(Sequence[Outcome]):
    """Outcomes in order, each read from the ledger when it is asked for. Raises OSError where that has gone."""

    def __init__(self, rows: OutcomeRows, states: Collection[int]) -> None:
        self._rows, self._states = rows, states
        self._is_gapless = False

    def __len__(self) -> int:
        return self._rows.count_rows(self._states)

    def __iter__(self) -> Iterator[Outcome]:
        after = -1
        while page := self._rows.read_rows(self._states, after, PAGE_ROWS):
            for row in page:
                yield self._rows.load_outcome(row)
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
        return [self._rows.load_outcome(row) for row in self._rows.read_rows(self._states, after, count, skip)]

    def _check_gapless(self) -> bool:
        self._is_gapless = self._is_gapless or len(self) == self._rows.last_number + 1
        return self._is_gapless

    def __repr__(self) -> str:
        return f"<{len(self):,} outcomes, read from the ledger as they are asked for>"
