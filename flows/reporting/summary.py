"""What a report knows of a run: counted as outcomes come by, one at a time, and bounded however many there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ...sandbox.errors import NotRun
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.ledger.run_record import ReportSpec
from .text_table import format_cell

ROWS = 1000  # of the table: Prefect's UI takes tables of that size at once
COLUMNS = 16  # variables and as many fields that have a column
KINDS = 100  # of failures that are told apart, by their type and message
TOLD = 20  # failures that are told in full
POINTS = 1000  # of a chart, at most twice as many


@dataclass(slots=True)
class Row:
    """One execution as the table has it; `rank` puts the best first."""

    rank: tuple[int, float, int]
    index: int
    variables: dict[str, str]
    fields: dict[str, str]
    seconds: float
    note: str


@dataclass(slots=True)
class FailureGroup:
    """Failures of one type and message: how many there are, and the first of them."""

    text: str
    count: int
    first: int


@dataclass(slots=True)
class RunSummary:
    """Counts of a run's outcomes, the rows of its table and the points of its chart. `add` takes each outcome once."""

    about: ReportSpec
    done: int = 0
    succeeded: int = 0
    not_run: int = 0
    retried: int = 0
    seconds: float = 0.0  # that code ran, of all executions together
    asked: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0  # in US dollars, None where a price was not known
    providers: dict[str, None] = field(default_factory=dict[str, None])
    variables: dict[str, None] = field(default_factory=dict[str, None])
    fields: dict[str, None] = field(default_factory=dict[str, None])
    left_out: bool = False  # some variables or fields have no column
    kinds: dict[str, FailureGroup] = field(default_factory=dict[str, FailureGroup])
    failures: list[Failure] = field(default_factory=list[Failure])
    best: Result | None = None
    best_score: float | None = None
    single: Result | None = None  # the first that succeeded
    points: list[tuple[int, dict[str, Any], float]] = field(default_factory=list[tuple[int, dict[str, Any], float]])
    crosses: list[int] = field(default_factory=list[int])  # numbers of some of those that failed
    _rows: list[Row] = field(default_factory=list[Row])
    _last: tuple[int, float, int] | None = None  # the rank that is too low for a row, once there are enough
    _every: int = 1  # how many points stand behind one of `points`
    _scored: int = 0

    @property
    def failed(self) -> int:
        """Those that were run and failed for good."""
        return self.done - self.succeeded - self.not_run

    def add(self, outcome: Outcome) -> None:
        """Takes one outcome in."""
        meta = outcome.meta
        index = self.done if meta.index is None else meta.index
        self.done += 1
        self.seconds += meta.seconds
        self.retried += meta.attempt > 1
        self.providers.setdefault(f"{meta.provider} ({meta.isolation})" if meta.isolation else meta.provider)
        queries = meta.queries
        self.asked += queries.asked
        self.calls += queries.calls
        self.prompt_tokens += queries.prompt_tokens
        self.completion_tokens += queries.completion_tokens
        self.cost = None if self.cost is None or queries.cost is None else self.cost + queries.cost
        if isinstance(outcome, Result):
            rank, note = self._success(index, outcome)
        else:
            rank, note = self._failure(index, outcome)
        self._keep(rank, index, outcome, note)

    def _success(self, index: int, result: Result) -> tuple[tuple[int, float, int], str]:
        self.succeeded += 1
        if self.single is None:
            self.single = result
        if self.about.objective is None:
            self._point(index, result, result.meta.seconds)
            return (0, 0.0, index), ""
        score = to_finite_number(result.outputs.get(self.about.objective))
        if score is None:
            return (1, 0.0, index), f"no number as {format_cell(self.about.objective)}"
        self._point(index, result, score)
        rank = (0, score if self.about.direction == "minimize" else -score, index)
        held = self.best
        if held is None or rank < (0, self._signed(self.best_score), _index(held)):
            self.best, self.best_score = result, score
        return rank, ""

    def _signed(self, score: float | None) -> float:
        assert score is not None
        return score if self.about.direction == "minimize" else -score

    def _failure(self, index: int, failure: Failure) -> tuple[tuple[int, float, int], str]:
        text = f"{type(failure.error).__name__}: {failure.error.summary[:300]}"
        idle = isinstance(failure.error, NotRun)
        self.not_run += idle
        kind = self.kinds.get(text)
        if kind is None and len(self.kinds) >= KINDS:
            text = "others"
            kind = self.kinds.get(text)
        if kind is None:
            kind = self.kinds[text] = FailureGroup(text, 0, index)
        kind.count += 1
        kind.first = min(kind.first, index)
        if len(self.failures) < TOLD and not idle:
            self.failures.append(failure)
        if len(self.crosses) < POINTS:
            self.crosses.append(index)
        first = 2 if self.about.objective is not None else 0
        return (first, 0.0, index), text

    def _point(self, index: int, result: Result, value: float) -> None:
        self._scored += 1
        if self._scored % self._every == 0:
            self.points.append((index, result.meta.variables, value))
            if len(self.points) > 2 * POINTS:
                self.points = self.points[1::2]
                self._every *= 2

    def _keep(self, rank: tuple[int, float, int], index: int, outcome: Outcome, note: str) -> None:
        self._name(self.variables, outcome.meta.variables)
        fields = outcome.outputs if isinstance(outcome, Result) else {}
        self._name(self.fields, [name for name in fields if name not in self.variables])
        if len(self._rows) >= 2 * ROWS:
            self._rows = self.rows()
            self._last = self._rows[-1].rank
        if self._last is not None and rank > self._last:
            return  # there are enough that come before it, so that it needs no cells
        variables = {
            name: format_cell(value) for name, value in outcome.meta.variables.items() if name in self.variables
        }
        cells = {name: format_cell(value) for name, value in fields.items() if name in self.fields}
        self._rows.append(Row(rank, index, variables, cells, outcome.meta.seconds, note))

    def _name(self, names: dict[str, None], found: Any) -> None:
        for name in found:
            if name not in names and len(names) < COLUMNS:
                names[name] = None
            elif name not in names:
                self.left_out = True

    def rows(self) -> list[Row]:
        """The rows of the table: the best first, or in order where there is no objective; `ROWS` at most."""
        return sorted(self._rows, key=lambda row: row.rank)[:ROWS]


def to_finite_number(value: Any) -> float | None:
    """The value as a number that others can be compared with, None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _index(outcome: Result) -> int:
    return outcome.meta.index or 0
