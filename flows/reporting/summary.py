"""The summary of a run: counts, the best trials, rows of the table and points of the charts.

The summary takes one outcome at a time. Its size has a limit that does not depend on the number of outcomes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

from ...sandbox.errors import NotRun
from ...sandbox.meta import Meta
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.run_record import ReportSpec
from .best_trials import BestTrials, is_score
from .columns import Tables
from .failure_reasons import FailureReasons
from .groups import GroupCollector, is_incomplete
from .table import OutcomeTable

MAX_ROWS = 1000  # rows of the table; Prefect's UI shows so many rows without delay
MAX_COLUMNS = 16  # variables, and also fields, that have a column; objectives always have one
MAX_POINTS = 1000  # points of a chart; there may be twice as many
MAX_CURVES = 100  # curves of reported values; there may be twice as many
MAX_CURVE_POINTS = 100  # points of one curve
MAX_SHOWN = 100  # executions whose displays are in a report
MAX_SHOWN_BYTES = 32 * 1024 * 1024  # bytes of all displays together; browsers open a page of this size at once
MAX_PARTS = 50  # displays, and collected files, of one execution that are in a report

ItemT = TypeVar("ItemT")


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
        size = len(json.dumps(texts, ensure_ascii=False))
        if len(self.metas) >= MAX_SHOWN or self._bytes + size > MAX_SHOWN_BYTES:
            self.omitted_count += 1
            return
        self._bytes += size
        self.metas.append(meta)


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
    peak_index: int | None = None  # number of the execution with this peak
    asked: int = 0  # queries
    cached: int = 0  # answers that came from the cache
    usage: Usage = field(default_factory=Usage)  # The calls, tokens and cost of the language model.
    total_usage: Usage | None = None  # The usage by all attempts, if a ledger has it.
    providers: dict[str, None] = field(default_factory=dict[str, None])
    failures: FailureReasons = field(default_factory=FailureReasons)
    first_result: Result | None = None
    points: Sample[ChartPoint] = field(default_factory=partial(Sample[ChartPoint], MAX_POINTS))
    pruned_points: Sample[ChartPoint] = field(default_factory=partial(Sample[ChartPoint], MAX_POINTS))
    curves: Sample[Curve] = field(default_factory=partial(Sample[Curve], MAX_CURVES))
    displays: ShownDisplays = field(default_factory=ShownDisplays)
    collected: int = 0  # files
    not_collected: int = 0  # sentences about files that were not collected
    failed_indexes: list[int] = field(default_factory=list[int])  # the first `MAX_POINTS` of them
    best: BestTrials = field(init=False)
    table: OutcomeTable = field(init=False)
    _groups: GroupCollector = field(init=False)

    def __post_init__(self) -> None:
        self.best = BestTrials(self.spec)
        self.table = OutcomeTable(self.spec, Tables.LEDGER | Tables.USAGE, MAX_ROWS, MAX_COLUMNS)
        self._groups = GroupCollector(self.spec)

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
            self.failures.add(index, outcome)
            was_unfinished = get_status(outcome) == "unfinished"
            self.not_run += isinstance(outcome.error, NotRun)
            self.unfinished += was_unfinished
            if len(self.failed_indexes) < MAX_POINTS and not was_unfinished:
                self.failed_indexes.append(index if meta.group is None else meta.group)
        row = self._groups.add(outcome)
        if row is not None:
            self._add_row(index if row is outcome else row.meta.index or 0, row)

    def close_groups(self) -> None:
        """Add the rows of the groups whose repeats have not all an outcome. Call this once, after all outcomes."""
        for group in self._groups.close_rest():
            self._add_row(group.meta.index or 0, group)

    @classmethod
    def from_outcomes(cls, outcomes: Iterable[Outcome], spec: ReportSpec) -> Self:
        """Return the summary of all outcomes of a run."""
        summary = cls(spec)
        for outcome in outcomes:
            summary.add(outcome)
        summary.close_groups()
        return summary

    def _add_row(self, index: int, outcome: Outcome) -> None:
        """Add the row and the points of an execution, or of a group of repeats."""
        self.incomplete += is_incomplete(outcome, self.spec)
        self.table.add(index, outcome)
        if isinstance(outcome, Result):
            self._add_points(index, outcome)

    def _add_points(self, index: int, result: Result) -> None:
        """Consider a result as the best, and add its points to the charts."""
        spec, meta = self.spec, result.meta
        if meta.reports:
            reports = sorted(meta.reports)
            every = max(1, len(reports) // MAX_CURVE_POINTS)
            finite = [(step, value) for step, value in (*reports[::every], reports[-1]) if is_score(value)]
            self.curves.add(Curve(index, finite, is_pruned=meta.pruned))
        if not spec.objectives:
            self.points.add(ChartPoint(index, meta.variables, (meta.seconds,)))
            return
        if meta.pruned:
            self.pruned += 1
            last_value = result.outputs.get(spec.objectives[0].name)
            if is_score(last_value):
                self.pruned_points.add(ChartPoint(index, meta.variables, (float(last_value),)))
            return
        scores = self.best.consider(result)
        if scores is not None and all(map(is_score, scores)):
            is_feasible = spec.is_feasible(result.outputs)
            self.infeasible += not is_feasible
            self.points.add(ChartPoint(index, meta.variables, scores, is_feasible))

    def build_rows(self, *, shows_usage: bool) -> list[list[str]]:
        """Return the rows of the table, the headings first.

        `shows_usage` adds columns with the CPU seconds and the peak memory.
        """
        return self.table.build_rows(self.best.numbers, Tables.LEDGER | (Tables.USAGE if shows_usage else Tables(0)))

    def build_records(self, limit: int) -> list[dict[str, Any]]:
        """Return the first rows of the table as dicts by column, at most `limit`, with numbers as numbers."""
        return self.table.build_records(self.best.numbers, limit)
