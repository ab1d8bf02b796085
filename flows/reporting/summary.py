"""The counts, rows and points of a report, from outcomes one at a time; its size is bounded however many there are."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...sandbox.errors import NotRun
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.ledger.run_record import ReportSpec
from .best_trial import BestTrial, is_nonfinite, is_score
from .columns import list_new_fields
from .displays import ShownDisplays
from .pareto_front import ParetoFront
from .text_table import format_cell

MAX_ROWS = 1000  # of the table: Prefect's UI takes tables of that size at once
MAX_COLUMNS = 16  # variables and as many fields that have a column, beside the objectives
MAX_FAILURE_GROUPS = 100
MAX_FULL_TEXTS = 20  # failures, or the fields of a single result, that are shown in full
MAX_POINTS = 1000  # of a chart, at most twice as many
MAX_CURVES = 100  # of reported values, at most twice as many
MAX_CURVE_POINTS = 100  # of each

ItemT = TypeVar("ItemT")
Cell = bool | float | str
Rank = tuple[int, float, int]  # puts rows in order: the best first


@dataclass(slots=True)
class Row:
    """One execution as the table has it; cells that are no numbers are text that is short enough for one."""

    rank: Rank
    index: int
    variables: dict[str, Cell]
    fields: dict[str, Cell]
    seconds: float
    note: str


@dataclass(slots=True)
class FailureGroup:
    """Failures of one type and message: how many there are, and the first of them."""

    text: str
    count: int
    first: int


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """An execution in a chart: its number, its variables, and its scores or else its seconds."""

    index: int
    variables: dict[str, Any]
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The first of its values, where there is one."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Curve:
    """What an execution has reported: steps and values, some of them where there are many."""

    index: int
    points: list[tuple[int, float]]
    is_pruned: bool


@dataclass(slots=True)
class Thinning:
    """How many items there were, of which every `stride` was taken."""

    count: int = 0
    stride: int = 1


@dataclass(slots=True)
class RunSummary:
    """Counts of a run's outcomes, the rows of its table and the points of its chart. `add` takes each outcome once."""

    spec: ReportSpec
    done: int = 0
    succeeded: int = 0
    pruned: int = 0  # of those that succeeded
    not_run: int = 0
    silent: int = 0  # of those that succeeded: their code never called SUBMIT
    retried: int = 0
    seconds: float = 0.0  # that code ran, of all executions together
    asked: int = 0  # queries
    cached: int = 0  # answers that came from the cache
    usage: Usage = field(default_factory=Usage)  # of the language model
    providers: dict[str, None] = field(default_factory=dict[str, None])
    variables: dict[str, None] = field(default_factory=dict[str, None])
    fields: dict[str, None] = field(default_factory=dict[str, None])
    has_hidden_columns: bool = False  # some variables or fields have no column
    failure_groups: dict[str, FailureGroup] = field(default_factory=dict[str, FailureGroup])
    full_failures: list[Failure] = field(default_factory=list[Failure])
    first_result: Result | None = None
    points: list[ChartPoint] = field(default_factory=list[ChartPoint])
    pruned_points: list[ChartPoint] = field(default_factory=list[ChartPoint])
    curves: list[Curve] = field(default_factory=list[Curve])
    displays: ShownDisplays = field(default_factory=ShownDisplays)
    collected: int = 0  # files that came home, and
    not_collected: int = 0  # sentences about some that did not
    failed_indexes: list[int] = field(default_factory=list[int])  # of some of those that failed
    best_trial: BestTrial = field(init=False)
    front: ParetoFront = field(init=False)
    _rows: list[Row] = field(default_factory=list[Row])
    _last_rank: Rank | None = None  # that is high enough for a row, once there are enough
    _thinning: dict[str, Thinning] = field(default_factory=dict[str, Thinning])

    def __post_init__(self) -> None:
        self.best_trial = BestTrial(self.spec.objective, self.spec.direction)
        self.front = ParetoFront(self.spec.objectives)

    @property
    def best_trials(self) -> list[Result]:
        """The best trial, or with several objectives those on the Pareto front."""
        if self.spec.objectives:
            return self.front.results
        return [] if self.best_trial.result is None else [self.best_trial.result]

    @property
    def failed(self) -> int:
        """The number of those that were run and failed for good."""
        return self.done - self.succeeded - self.not_run

    def add(self, outcome: Outcome) -> None:
        """Counts one outcome."""
        meta = outcome.meta
        index = self.done if meta.index is None else meta.index
        self.done += 1
        self.seconds += meta.seconds
        self.retried += meta.attempt > 1
        self.providers.setdefault(f"{meta.provider} ({meta.isolation})" if meta.isolation else meta.provider)
        self.displays.add(meta)
        self.collected += len(meta.collected)
        self.not_collected += len(meta.not_collected)
        queries = meta.queries
        self.asked += queries.asked
        self.cached += queries.cached
        self.usage += Usage(queries.calls, queries.prompt_tokens, queries.completion_tokens, queries.cost)
        if isinstance(outcome, Result):
            rank, note = self._add_result(index, outcome)
        else:
            rank, note = self._add_failure(index, outcome)
        self._add_row(rank, index, outcome, note)

    def sort_rows(self) -> list[Row]:
        """The rows of the table: the best first, or in order where there is no objective; `MAX_ROWS` at most."""
        return sorted(self._rows, key=lambda row: row.rank)[:MAX_ROWS]

    def _add_result(self, index: int, result: Result) -> tuple[Rank, str]:
        self.succeeded += 1
        self.silent += not (result.meta.submitted or result.meta.pruned)
        if self.first_result is None:
            self.first_result = result
        variables = result.meta.variables
        if result.meta.reports:
            reports = sorted(result.meta.reports)
            every = max(1, len(reports) // MAX_CURVE_POINTS)
            finite = [(step, value) for step, value in (*reports[::every], reports[-1]) if is_score(value)]
            self._add_thinned(self.curves, "curves", MAX_CURVES, Curve(index, finite, is_pruned=result.meta.pruned))
        if self.spec.objectives:
            return self._add_scores(index, result)
        if self.spec.objective is None:
            self._add_thinned(self.points, "points", MAX_POINTS, ChartPoint(index, variables, (result.meta.seconds,)))
            return (0, 0.0, index), ""
        if result.meta.pruned:
            return self._add_pruned(index, result)
        score = self.best_trial.consider(result)
        if score is None:
            return (2, 1.0, index), f"no number as {format_cell(self.spec.objective)}"
        if is_nonfinite(score):
            return (2, 0.0, index), "diverged"
        self._add_thinned(self.points, "points", MAX_POINTS, ChartPoint(index, variables, (float(score),)))
        return (0, score if self.spec.direction == "minimize" else -score, index), ""

    def _add_pruned(self, index: int, result: Result) -> tuple[Rank, str]:
        self.pruned += 1
        value = result.outputs.get(self.spec.objective or "")
        if is_score(value):
            point = ChartPoint(index, result.meta.variables, (float(value),))
            self._add_thinned(self.pruned_points, "pruned", MAX_POINTS, point)
        return (1, 0.0, index), "pruned"

    def _add_scores(self, index: int, result: Result) -> tuple[Rank, str]:
        scores = self.front.consider(result)
        if scores is None:
            return (2, 1.0, index), "without all objectives as numbers"
        self._add_thinned(self.points, "points", MAX_POINTS, ChartPoint(index, result.meta.variables, scores))
        return (0, 0.0, index), ""

    def _add_failure(self, index: int, failure: Failure) -> tuple[Rank, str]:
        text = f"{type(failure.error).__name__}: {failure.error.summary[:300]}"
        was_not_run = isinstance(failure.error, NotRun)
        self.not_run += was_not_run
        if text not in self.failure_groups and len(self.failure_groups) >= MAX_FAILURE_GROUPS:
            text = "others"
        group = self.failure_groups.setdefault(text, FailureGroup(text, 0, index))
        group.count += 1
        group.first = min(group.first, index)
        if len(self.full_failures) < MAX_FULL_TEXTS and not was_not_run:
            self.full_failures.append(failure)
        if len(self.failed_indexes) < MAX_POINTS:
            self.failed_indexes.append(index)
        return (3 if self.spec.objective is not None or self.spec.objectives else 0, 0.0, index), text

    def _add_thinned(self, items: list[ItemT], name: str, limit: int, item: ItemT) -> None:
        """Takes an item, or one of several: there are twice the limit at most."""
        thinning = self._thinning.setdefault(name, Thinning())
        thinning.count += 1
        if thinning.count % thinning.stride == 0:
            items.append(item)
            if len(items) > 2 * limit:
                items[:] = items[1::2]
                thinning.stride *= 2

    def _add_row(self, rank: Rank, index: int, outcome: Outcome, note: str) -> None:
        meta = outcome.meta
        self._add_columns(self.variables, meta.variables)
        fields = outcome.outputs if isinstance(outcome, Result) else {}
        self._add_columns(self.fields, list_new_fields(outcome))
        if len(self._rows) >= 2 * MAX_ROWS:
            self._rows = self.sort_rows()
            self._last_rank = self._rows[-1].rank
        if self._last_rank is not None and rank > self._last_rank:
            return  # there are enough that come before it, so that it needs no cells
        variables = {name: _shorten(value) for name, value in meta.variables.items() if name in self.variables}
        cells = {name: _shorten(value) for name, value in fields.items() if name in self.fields | self.variables}
        self._rows.append(Row(rank, index, variables, cells, meta.seconds, note))

    def _add_columns(self, columns: dict[str, None], names: Iterable[str]) -> None:
        for name in names:
            is_objective = name == self.spec.objective or any(name == item.name for item in self.spec.objectives)
            if name not in columns and (len(columns) < MAX_COLUMNS or is_objective):
                columns[name] = None
            elif name not in columns:
                self.has_hidden_columns = True


def _shorten(value: Any) -> Cell:
    return value if isinstance(value, bool) or is_score(value) else format_cell(value)
