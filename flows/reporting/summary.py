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
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.ledger.run_record import ReportSpec
from .best_trials import BestTrials, is_score
from .columns import Tables
from .failure_reasons import FailureReasons
from .groups import GroupCollector, is_incomplete
from .table import MAX_VARIABLES, NO_FEASIBLE_TRIAL, OutcomeTable, format_cell, format_variables

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
    """An even sample of many items, with at most twice `limit` items."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self.added = 0  # number of items so far, kept or not
        self._stride = 1  # one of so many items is kept

    def add(self, item: ItemT) -> None:
        """Keep every item at first. When there are too many, keep every second, then every fourth, and so on."""
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


def describe_reduction(reduction: Outcome, spec: ReportSpec) -> tuple[str, str]:
    """Return the title of a run's reduction, and the fields that it submitted or its error."""
    title = "Reduction" if spec.noun == "chunk" else "Summary"
    if not isinstance(reduction, Result):
        return title, f"{type(reduction.error).__name__}: {reduction.error.summary}"
    return title, ", ".join(f"{name}={format_cell(value)}" for name, value in reduction.outputs.items())


class ShownDisplays:
    """The first executions that displayed something, ended with a value outside of the fields, or collected files."""

    def __init__(self) -> None:
        self.metas: list[Meta] = []
        self.omitted_count = 0
        self._bytes = 0

    def add(self, meta: Meta) -> None:
        """Keep an execution that has something to show, or only count it if there is no room for it."""
        has_value = meta.value is not None or meta.value_repr is not None
        if not (meta.displays or meta.collected or meta.not_collected or has_value):
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
    unfinished: int = 0  # executions that did not run to the end, so rates leave them out
    row_count: int = 0  # executions, or groups of them
    incomplete: int = 0  # groups of repeats whose numbers are from fewer repeats than the run has
    silent: int = 0  # executions that succeeded without a call of SUBMIT
    passed: int = 0  # executions whose check submitted `passed` as true
    not_passed: int = 0  # executions whose check submitted `passed` as false
    exited: int = 0  # executions that succeeded, and called sys.exit before SUBMIT
    retried: int = 0
    seconds: float = 0.0  # run time of the code in all executions
    cpu_seconds: float | None = None  # CPU seconds of all executions; None if no kernel measured them
    peak_mib: float | None = None  # the most memory of an execution
    peak_index: int | None = None  # number of the execution with `peak_mib`
    asked: int = 0  # queries
    cached: int = 0  # answers that came from the cache
    usage: Usage = field(default_factory=Usage)  # calls, tokens and cost of the language model
    total_usage: Usage | None = None  # `usage` of all attempts, if the ledger has it
    providers: set[str] = field(default_factory=set[str])  # names with levels of isolation
    failures: FailureReasons = field(default_factory=FailureReasons)
    first_result: Result | None = None
    reduction: Outcome | None = None
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
        index = self.done if outcome.meta.index is None else outcome.meta.index
        self._add_meta(index, outcome.meta)
        if outcome.meta.is_reduction:
            self.reduction = outcome
            return
        self.done += 1
        if isinstance(outcome, Result):
            self._count_result(outcome)
        else:
            self._count_failure(index, outcome)
        row = self._groups.add(outcome)
        if row is outcome:
            self._add_row(index, outcome)
        elif row is not None:
            self._add_row(row.meta.index or 0, row)

    def _add_meta(self, index: int, meta: Meta) -> None:
        """Add the use of resources and of models, the displays and the files of an execution."""
        self.seconds += meta.seconds
        if meta.cpu_seconds is not None:
            self.cpu_seconds = (self.cpu_seconds or 0.0) + meta.cpu_seconds
        if meta.peak_mib is not None and (self.peak_mib is None or meta.peak_mib > self.peak_mib):
            self.peak_mib, self.peak_index = meta.peak_mib, index
        self.retried += meta.attempt > 1
        if meta.provider:
            self.providers.add(f"{meta.provider} ({meta.isolation})" if meta.isolation else meta.provider)
        self.displays.add(meta)
        self.collected += len(meta.collected)
        self.not_collected += len(meta.not_collected)
        queries = meta.queries
        self.asked += queries.asked
        self.cached += queries.cached
        self.usage += Usage(queries.calls, queries.prompt_tokens, queries.completion_tokens, queries.cost)

    def _count_result(self, result: Result) -> None:
        self.succeeded += 1
        has_exited = get_status(result) == "exited"
        self.exited += has_exited
        self.silent += not (result.meta.submitted or result.meta.pruned or has_exited)
        verdict = result.outputs.get("passed") if result.meta.judged is not None else None
        if verdict in (False, True):  # So 0 and 1 count, too.
            self.passed += bool(verdict)
            self.not_passed += not verdict
        if self.first_result is None:
            self.first_result = result

    def _count_failure(self, index: int, failure: Failure) -> None:
        self.failures.add(index, failure)
        self.not_run += isinstance(failure.error, NotRun)
        if get_status(failure) == "unfinished":
            self.unfinished += 1
        elif len(self.failed_indexes) < MAX_POINTS and not self.spec.by:
            group = failure.meta.group
            self.failed_indexes.append(index if group is None else group)

    def describe(self, total: int) -> str:
        """Return in a line how many of `total` executions have each outcome, and the best trial if there is one."""
        text = self.count_outcomes(total)
        if self.best.result is not None:
            text += f"; best {self.spec.objective} {self.describe_best_trials()}"
        elif self.infeasible and not self.best.results:
            text += f"; {NO_FEASIBLE_TRIAL}"
        return text

    def count_outcomes(self, total: int) -> str:
        """Return in words how many of `total` executions have each outcome."""
        noun = self.spec.noun if self.spec.repeats is None else "execution"
        others = [
            (self.pruned, "{:,} of them pruned"),
            (self.failed, "{:,} failed"),
            (self.not_run, "{:,} not run"),
        ]
        counts = [f"{self.succeeded:,} of {total:,} {noun}s succeeded"]
        verdict_count = self.passed + self.not_passed
        if verdict_count:
            others.insert(0, (self.not_passed, "{:,} did not pass"))
            others.insert(1, (self.succeeded - verdict_count, "{:,} succeeded without a verdict"))
            counts = [f"{self.passed:,} of {total:,} {noun}s passed"]
        counts += [text.format(count) for count, text in others if count]
        text = ", ".join(counts)
        if self.unfinished:  # These are among the failed ones and those not run.
            text += f" ({self.unfinished:,} did not run to the end)"
        return text

    def describe_best_trials(self) -> str:
        """Return the best trial, or the trials on the Pareto front. Return an empty text if there is none."""
        best = self.best.result
        if best is not None:
            values = format_variables(best.meta.variables, MAX_VARIABLES)
            return f"{self.best.score:.6g} in trial {best.meta.index}" + (f" with {values}" if values else "")
        numbers = [str(result.meta.index) for result in self.best.results]
        if not numbers:
            return ""
        shown = ", ".join(numbers[:MAX_VARIABLES])
        if len(numbers) > MAX_VARIABLES:
            shown += f" and {len(numbers) - MAX_VARIABLES} more"
        goals = ", ".join(f"{item.direction} {item.name}" for item in self.spec.objectives)
        return f"{len(numbers)} trials ({shown}) by {goals}"

    def close_groups(self) -> None:
        """Add the rows of the groups that lack repeats. Call this once, after all outcomes."""
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
        self.row_count += 1
        self.incomplete += is_incomplete(outcome, self.spec)
        self.table.add(index, outcome)
        if isinstance(outcome, Result):
            self._add_curve(index, outcome.meta)
            self._add_points(index, outcome)

    def _add_curve(self, index: int, meta: Meta) -> None:
        if meta.reports:
            reports = sorted(meta.reports)
            stride = max(1, len(reports) // MAX_CURVE_POINTS)
            sample = [*reports[::stride], reports[-1]]
            finite = [(step, value) for step, value in sample if is_score(value)]
            self.curves.add(Curve(index, finite, is_pruned=meta.pruned))

    def _add_points(self, index: int, result: Result) -> None:
        """Compare a result with the best, and add its points to the charts."""
        spec, meta = self.spec, result.meta
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
        tables = Tables.LEDGER | Tables.USAGE if shows_usage else Tables.LEDGER
        return self.table.build_rows(self.best.numbers, tables)

    def build_records(self, limit: int) -> list[dict[str, Any]]:
        """Return the first rows of the table as dicts by column, at most `limit`, with numbers as numbers."""
        return self.table.build_records(self.best.numbers, limit)
