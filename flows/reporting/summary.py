"""The summary of a run: counts, the best trials, rows of the table and points of the charts.

The summary takes one outcome at a time. Its size has a limit that does not depend on the number of outcomes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard, TypeVar

from ...sandbox.errors import NotRun
from ...sandbox.meta import Meta
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.ledger.run_record import ReportSpec
from .groups import GroupCollector, is_incomplete, list_hidden_fields, read_number
from .table import INFEASIBLE, describe_exit, format_cell, list_new_fields

MAX_ROWS = 1000  # rows of the table; Prefect's UI shows so many rows without delay
MAX_COLUMNS = 16  # variables, and also fields, that have a column; objectives always have one
MAX_FAILURE_GROUPS = 100
MAX_FULL_TEXTS = 20  # failures, or fields of a single result, that are shown in full
MAX_POINTS = 1000  # points of a chart; there may be twice as many
MAX_CURVES = 100  # curves of reported values; there may be twice as many
MAX_CURVE_POINTS = 100  # points of one curve
MAX_SHOWN = 100  # executions whose displays are in a report
MAX_SHOWN_BYTES = 32 * 1024 * 1024  # bytes of all displays together; browsers open a page of this size at once
MAX_PARTS = 50  # displays, and collected files, of one execution that are in a report

ItemT = TypeVar("ItemT")
Cell = bool | float | str
Rank = tuple[int, float, int]  # sorts rows, the best first


@dataclass(slots=True)
class BestTrials:
    """The best trials among those considered so far, in any order.

    With one objective, the best trial has the least (or greatest) value. Of equal trials, the one with the lowest
    number is the best. A value that is not finite is worse than every finite value, in both directions. A pruned trial
    is never the best. With several objectives, the best trials are the Pareto front: no other trial is as good in every
    objective and better in one. Without objectives `results` is empty. Only feasible trials can be the best.
    """

    spec: ReportSpec
    score: float | None = None  # the best trial's value of a single objective
    _rank: Rank | None = None
    _members: list[tuple[tuple[float, ...], Result]] = field(default_factory=list[tuple[tuple[float, ...], Result]])

    @property
    def results(self) -> list[Result]:
        """The best trials, by their numbers."""
        return sorted((result for _, result in self._members), key=lambda result: result.meta.index or 0)

    @property
    def result(self) -> Result | None:
        """The best trial by a single objective, or None."""
        return None if self.spec.objectives or not self._members else self._members[0][1]

    def consider(self, result: Result) -> tuple[float, ...] | None:
        """Keep the trial if no other one is better. Return its scores, or None if it did not submit them as numbers."""
        if self.spec.objectives:
            return self._consider_for_front(result)
        if self.spec.objective is None or result.meta.pruned:
            return None
        score = read_number(result.outputs.get(self.spec.objective))
        if score is None:
            return None
        has_diverged = not math.isfinite(score)
        loss = 0.0 if has_diverged else score if self.spec.direction == "minimize" else -score
        rank = (has_diverged, loss, result.meta.index or 0)
        if self.spec.is_feasible(result.outputs) and (self._rank is None or rank < self._rank):
            self._rank, self.score, self._members = rank, score, [((loss,), result)]
        return (score,)

    def _consider_for_front(self, result: Result) -> tuple[float, ...] | None:
        objectives = self.spec.objectives
        scores = [score for item in objectives if is_score(score := result.outputs.get(item.name))]
        if len(scores) < len(objectives):
            return None
        signs = [1 if objective.direction == "minimize" else -1 for objective in objectives]
        losses = tuple(sign * float(score) for sign, score in zip(signs, scores, strict=True))
        is_feasible = self.spec.is_feasible(result.outputs)
        if is_feasible and not any(_beats(other, losses) for other, _ in self._members):
            self._members = [member for member in self._members if not _beats(losses, member[0])]
            self._members.append((losses, result))
        return tuple(map(float, scores))


def _beats(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))


def is_nonfinite(value: Any) -> TypeGuard[float]:
    """Return whether the value is NaN or an infinity."""
    return isinstance(value, float) and not math.isfinite(value)


def is_score(value: Any) -> TypeGuard[float]:
    """Return whether the value can compare trials: a bool, or a finite number that a float can hold."""
    number = read_number(value)
    return number is not None and math.isfinite(number)


class Sample(list[ItemT]):
    """An even sample of many items. It has at most twice `limit` items. `added` is the number of all."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self.added = 0
        self._stride = 1

    def add(self, item: ItemT) -> None:
        """Take every item at first. When there are too many, take every second, then every fourth, and so on."""
        self.added += 1
        if self.added % self._stride == 0:
            self.append(item)
            if len(self) > 2 * self._limit:
                self[:] = self[1::2]
                self._stride *= 2


@dataclass(slots=True)
class Row:
    """A row of the table. Cells that are not numbers are text, cut to a cell's length."""

    rank: Rank
    index: int
    variables: dict[str, Cell]
    fields: dict[str, Cell]
    seconds: float
    note: str
    cpu_seconds: float | None = None
    peak_mib: float | None = None


@dataclass(slots=True)
class FailureGroup:
    """Failures of one type and message: their count, and the number of the first execution."""

    count: int
    first: int


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """An execution in a chart. Its values are its scores, or its seconds if there is no objective."""

    index: int
    variables: dict[str, Any]
    values: tuple[float, ...]
    is_feasible: bool = True

    @property
    def value(self) -> float:
        """The first of the values."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Curve:
    """Steps and values that an execution reported, or a sample of them."""

    index: int
    points: list[tuple[int, float]]
    is_pruned: bool


class ShownDisplays:
    """The first executions that displayed something, ended with a value outside of the fields, or collected files."""

    def __init__(self) -> None:
        self.metas: list[Meta] = []
        self.omitted_count = 0
        self._bytes = 0

    def add(self, meta: Meta) -> None:
        """Keep an execution that has something to show, or only count it if there is no room for it."""
        has_files = meta.collected or meta.not_collected
        if not (meta.displays or has_files) and meta.value is None and meta.value_repr is None:
            return
        texts = [meta.value, meta.value_repr, *meta.displays, *meta.collected[:MAX_PARTS], *meta.not_collected]
        size = sum(map(len, _list_texts(texts)))
        if len(self.metas) >= MAX_SHOWN or self._bytes + size > MAX_SHOWN_BYTES:
            self.omitted_count += 1
            return
        self._bytes += size
        self.metas.append(meta)


def _list_texts(value: Any) -> Iterator[str]:
    """Yield all text in a value of JSON, without the keys of its dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        items: Any = value.values() if isinstance(value, dict) else value  # type: ignore[reportUnknownVariableType]
        for item in items:
            yield from _list_texts(item)


@dataclass(slots=True)
class RunSummary:
    """The summary of a run. `add` takes each outcome once."""

    spec: ReportSpec
    done: int = 0
    succeeded: int = 0
    pruned: int = 0  # counted in `succeeded` too
    infeasible: int = 0  # trials with scores that violate a constraint
    not_run: int = 0
    unfinished: int = 0  # executions that no rate counts: those that were not run, and failures outside of their code
    incomplete: int = 0  # groups of repeats whose numbers are from fewer repeats than the run has
    silent: int = 0  # executions that succeeded without a call of SUBMIT
    exited: int = 0  # executions that succeeded, and called sys.exit before SUBMIT
    retried: int = 0
    seconds: float = 0.0  # The run time of code in all executions.
    cpu_seconds: float | None = None  # CPU seconds of all executions; None if no kernel said them
    peak_mib: float | None = None  # the most memory of an execution
    peak_index: int | None = None  # that execution's number
    asked: int = 0  # queries
    cached: int = 0  # answers that came from the cache
    usage: Usage = field(default_factory=Usage)  # The calls, tokens and cost of the language model.
    total_usage: Usage | None = None  # The usage by all attempts, if a ledger has it.
    providers: dict[str, None] = field(default_factory=dict[str, None])
    variables: dict[str, None] = field(default_factory=dict[str, None])
    fields: dict[str, None] = field(default_factory=dict[str, None])
    has_hidden_columns: bool = False  # Some variables or fields have no column.
    failure_groups: dict[str, FailureGroup] = field(default_factory=dict[str, FailureGroup])  # The keys are messages.
    full_failures: list[Failure] = field(default_factory=list[Failure])
    first_result: Result | None = None
    points: Sample[ChartPoint] = field(default_factory=partial(Sample[ChartPoint], MAX_POINTS))
    pruned_points: Sample[ChartPoint] = field(default_factory=partial(Sample[ChartPoint], MAX_POINTS))
    curves: Sample[Curve] = field(default_factory=partial(Sample[Curve], MAX_CURVES))
    displays: ShownDisplays = field(default_factory=ShownDisplays)
    collected: int = 0  # files
    not_collected: int = 0  # sentences about files that were not collected
    failed_indexes: list[int] = field(default_factory=list[int])  # the first `MAX_POINTS` of them
    best: BestTrials = field(init=False)
    _groups: GroupCollector | None = None  # None if the run has no repeats
    _rows: list[Row] = field(default_factory=list[Row])
    _last_rank: Rank | None = None  # the worst rank that is kept, once there are enough rows

    def __post_init__(self) -> None:
        self.best = BestTrials(self.spec)
        if self.spec.repeats is not None:
            self._groups = GroupCollector(self.spec.repeats, self.spec.aggregate)

    @property
    def failed(self) -> int:
        """The number of executions that ran and failed."""
        return self.done - self.succeeded - self.not_run

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        meta, queries = outcome.meta, outcome.meta.queries
        index = self.done if meta.index is None else meta.index
        self.done += 1
        self.seconds += meta.seconds
        if meta.cpu_seconds is not None:
            self.cpu_seconds = (self.cpu_seconds or 0.0) + meta.cpu_seconds
        if meta.peak_mib is not None and (self.peak_mib is None or meta.peak_mib > self.peak_mib):
            self.peak_mib, self.peak_index = meta.peak_mib, index
        self.retried += meta.attempt > 1
        self.providers.setdefault(f"{meta.provider} ({meta.isolation})" if meta.isolation else meta.provider)
        self.displays.add(meta)
        self.collected += len(meta.collected)
        self.not_collected += len(meta.not_collected)
        self.asked += queries.asked
        self.cached += queries.cached
        self.usage += Usage(queries.calls, queries.prompt_tokens, queries.completion_tokens, queries.cost)
        if isinstance(outcome, Result):
            self.succeeded += 1
            has_exited = get_status(outcome) == "exited"
            self.exited += has_exited
            self.silent += not (meta.submitted or meta.pruned or has_exited)
            if self.first_result is None:
                self.first_result = outcome
        else:
            self._add_failure(index, outcome)
        if self._groups is None or meta.group is None:
            self._add_ranked(index, outcome)
        elif (group := self._groups.add(outcome)) is not None:
            self._add_ranked(meta.group, group)

    def close_groups(self) -> None:
        """Add the rows of the groups whose repeats have not all an outcome. Call this once, after all outcomes."""
        for group in () if self._groups is None else self._groups.close_rest():
            self._add_ranked(group.meta.index or 0, group)

    def _add_ranked(self, index: int, outcome: Outcome) -> None:
        """Add the row and the points of an execution, or of a group of repeats."""
        self.incomplete += is_incomplete(outcome, self.spec)
        if isinstance(outcome, Result):
            rank, note = self._rank_result(index, outcome)
            note = describe_exit(outcome) or note
        else:
            rank = (3 if self.spec.objective is not None or self.spec.objectives else 0, 0.0, index)
            note = _describe_failure(outcome)
        self._add_row(rank, index, outcome, note)

    def sort_rows(self) -> list[Row]:
        """Return the first `MAX_ROWS` rows of the table: the best first, or in order without an objective."""
        return sorted(self._rows, key=lambda row: row.rank)[:MAX_ROWS]

    def _rank_result(self, index: int, result: Result) -> tuple[Rank, str]:
        """Add a result's points, and return its row's rank and note."""
        spec, meta = self.spec, result.meta
        if meta.reports:
            reports = sorted(meta.reports)
            every = max(1, len(reports) // MAX_CURVE_POINTS)
            finite = [(step, value) for step, value in (*reports[::every], reports[-1]) if is_score(value)]
            self.curves.add(Curve(index, finite, is_pruned=meta.pruned))
        if spec.objectives:
            scores = self.best.consider(result)
            if scores is None:
                return (2, 1.0, index), "without all objectives as numbers"
            is_feasible = self._check_feasibility(result)
            self.points.add(ChartPoint(index, meta.variables, scores, is_feasible))
            return ((0, 0.0, index), "") if is_feasible else ((1, 0.0, index), INFEASIBLE)
        if spec.objective is None:
            self.points.add(ChartPoint(index, meta.variables, (meta.seconds,)))
            return (0, 0.0, index), ""
        if meta.pruned:
            self.pruned += 1
            last_value = result.outputs.get(spec.objective)
            if is_score(last_value):
                self.pruned_points.add(ChartPoint(index, meta.variables, (float(last_value),)))
            return (1, 0.0, index), "pruned"
        scores = self.best.consider(result)
        if scores is None:
            return (2, 1.0, index), f"no number as {format_cell(spec.objective)}"
        (score,) = scores
        if is_nonfinite(score):
            return (2, 0.0, index), "diverged"
        is_feasible = self._check_feasibility(result)
        self.points.add(ChartPoint(index, meta.variables, (float(score),), is_feasible))
        if not is_feasible:
            return (1, score if spec.direction == "minimize" else -score, index), INFEASIBLE
        return (0, score if spec.direction == "minimize" else -score, index), ""

    def _check_feasibility(self, result: Result) -> bool:
        """Return whether a trial is feasible, and count it if not."""
        is_feasible = self.spec.is_feasible(result.outputs)
        self.infeasible += not is_feasible
        return is_feasible

    def _add_failure(self, index: int, failure: Failure) -> None:
        """Count a failure."""
        text = _describe_failure(failure)
        was_not_run, is_unfinished = isinstance(failure.error, NotRun), get_status(failure) == "unfinished"
        self.not_run += was_not_run
        self.unfinished += is_unfinished
        if text not in self.failure_groups and len(self.failure_groups) >= MAX_FAILURE_GROUPS:
            text = "others"
        group = self.failure_groups.setdefault(text, FailureGroup(0, index))
        group.count += 1
        group.first = min(group.first, index)
        if len(self.full_failures) < MAX_FULL_TEXTS and not was_not_run:
            self.full_failures.append(failure)
        if len(self.failed_indexes) < MAX_POINTS and not is_unfinished:
            group = failure.meta.group
            self.failed_indexes.append(index if group is None else group)

    def _add_row(self, rank: Rank, index: int, outcome: Outcome, note: str) -> None:
        meta = outcome.meta
        self._add_columns(self.variables, meta.variables)
        hidden = set[str]() if self.spec.repeats is None else list_hidden_fields([outcome], self.spec)
        self._add_columns(self.fields, (name for name in list_new_fields(outcome) if name not in hidden))
        if len(self._rows) >= 2 * MAX_ROWS:
            self._rows = self.sort_rows()
            self._last_rank = self._rows[-1].rank
        if self._last_rank is not None and rank > self._last_rank:
            return
        outputs = outcome.outputs if isinstance(outcome, Result) else {}
        variables = {name: _shorten(value) for name, value in meta.variables.items() if name in self.variables}
        fields = {name: _shorten(value) for name, value in outputs.items() if name in self.fields | self.variables}
        self._rows.append(Row(rank, index, variables, fields, meta.seconds, note, meta.cpu_seconds, meta.peak_mib))

    def _add_columns(self, columns: dict[str, None], names: Iterable[str]) -> None:
        for name in names:
            is_objective = name == self.spec.objective or any(name == item.name for item in self.spec.objectives)
            if name not in columns and (len(columns) < MAX_COLUMNS or is_objective):
                columns[name] = None
            elif name not in columns:
                self.has_hidden_columns = True


def _describe_failure(failure: Failure) -> str:
    return f"{type(failure.error).__name__}: {failure.error.summary[:300]}"


def _shorten(value: Any) -> Cell:
    return value if isinstance(value, bool) or is_score(value) else format_cell(value)
