"""A search: each trial's point is drawn when a worker is free, and recorded before the trial runs.

The ledger is the only durable record. A search that resumes replays the ledger's lines, in order, into a new study.
Trials that were running get the same points again.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sandbox.result import Outcome, Result
from ...tasks.execution import Execution, Pruning, assign_keys, with_index
from ...tasks.ledger.ledger_line import AskedTrial, LedgerLine, TrialReport, encode_asked_trial, encode_trial_report
from ...tasks.ledger.run_record import Direction, ReportSpec
from ...tasks.repeats import Item, RepeatedItems
from ..reporting.best_trials import BestTrials, is_score
from ..reporting.groups import GroupCollector
from .plan import Point, SearchPlan
from .study import TrialStudy

if TYPE_CHECKING:
    from ..engine.run import Run


@dataclass(slots=True)
class StopRule:
    """The rule that ends a search: a target, or a number of trials without improvement. Failures do not count."""

    plan: SearchPlan
    reason: str | None = None  # set once the rule ends the search
    _best: BestTrials = field(init=False)
    _stale_count: int = 0  # trials since the last improvement

    def __post_init__(self) -> None:
        self._best = BestTrials(ReportSpec("trial", self.plan.objectives, constraints=self.plan.constraints))

    def consider(self, outcome: Outcome) -> None:
        """Count the outcome of a trial. A resumed search calls this in the order of the ledger."""
        if self.reason is not None or not self.plan.may_stop_early or not isinstance(outcome, Result):
            return
        earlier_best = self._best.score
        self._best.consider(outcome)
        best = self._best.score
        self._stale_count += 1
        if is_score(best) and best != earlier_best:
            self._stale_count = 0
        objective, target = self.plan.objectives[0], self.plan.stop_at
        if target is not None and is_score(best) and _has_reached(best, target, objective.direction):
            self.reason = f"{objective.name} reached {best:.6g}, and stop_at is {target:.6g}"
        elif self.plan.stop_after is not None and self._stale_count >= self.plan.stop_after:
            self.reason = f"{self._stale_count} trials in a row brought no improvement"


def _has_reached(value: float, target: float, direction: Direction) -> bool:
    return value <= target if direction == "minimize" else value >= target


@dataclass(slots=True)
class Search:
    """The search of one flow run: its trials as executions of the code, and the study that draws their points.

    `fingerprint` goes into the trials' keys, beside code and variables.
    """

    plan: SearchPlan
    code: str
    fingerprint: dict[str, Any]
    run: "Run"
    study: TrialStudy = field(init=False)
    stop: StopRule = field(init=False)
    _digest: str = field(init=False)  # tells this search from others on the same ledger
    _points: list[Point] = field(default_factory=list[Point])  # points of the trials so far, by number
    _recorded_count: int = 0  # trials whose points are from the ledger, which are the first ones
    _pruned: set[int] = field(default_factory=set[int])  # numbers of trials that the pruner ended
    _groups: GroupCollector = field(init=False)  # combines the repeats of a trial

    def __post_init__(self) -> None:
        self.study = TrialStudy(self.plan)
        self.stop = StopRule(self.plan)
        self._groups = GroupCollector(self.run.plan.report_spec)
        parts = json.dumps([self.plan.space.source, self.code, self.fingerprint], sort_keys=True, default=repr)
        self._digest = hashlib.sha256(parts.encode()).hexdigest()[:24]

    def load_history(self) -> None:
        """Replay the ledger's lines of this search into the study. Raises OSError if a location cannot be read."""
        recorded = self._find_recorded_trials()
        self._points = [Point(trial.variables, trial.alternative) for trial in recorded]
        self._recorded_count = len(recorded)
        numbers = {trial.key: trial.index for trial in recorded}
        executions = {execution.key: execution for execution in self._assign_keys(self._points)}
        for line in self.run.ledger.read_search_lines():
            if isinstance(line, AskedTrial):
                if numbers.get(line.key) == self.study.count:
                    self.study.add(Point(line.variables, line.alternative))
            elif line.key in executions:
                self._replay(line, executions[line.key])

    def _replay(self, line: LedgerLine | TrialReport, execution: Execution) -> None:
        """Tell the study an outcome or a report that the ledger has, if the trial has no outcome yet."""
        number, _ = find_trial(execution)
        if not self.study.is_running(number):
            return
        if isinstance(line, LedgerLine):
            outcome = line.to_outcome()
            if isinstance(outcome, Result):  # A trial that failed runs again.
                self._add_outcome(number, with_index(outcome, execution.index, execution.place))
        elif not self.study.has_report(number, line.step):
            self.study.report(number, line.step, line.value)
            if line.is_pruned:
                self._pruned.add(number)

    def _assign_keys(self, points: Iterable[Point]) -> Iterator[Execution]:
        """Yield the executions of each point: one, or one for each repeat."""
        items: Iterable[Item] = ((self.code, point.variables) for point in points)
        repeats = self.run.plan.report_spec.repeats
        if repeats is not None:
            items = RepeatedItems(items, repeats.count)
        return assign_keys(items, self.fingerprint, repeats=repeats)

    def _find_recorded_trials(self) -> list[AskedTrial]:
        """Return the recorded trials of this search, from number 0 to the first that is missing."""
        asked: dict[int, AskedTrial] = {}
        for line in self.run.ledger.read_search_lines():
            if isinstance(line, AskedTrial) and line.search == self._digest and line.index < self.plan.trials:
                asked.setdefault(line.index, line)
        trials: list[AskedTrial] = []
        while len(trials) in asked:
            trials.append(asked[len(trials)])
        return trials

    def make_executions(self, is_over: Callable[[], bool]) -> Iterator[Execution]:
        """Yield the trials in order, each with a point that is drawn when the trial is taken.

        Once `is_over` returns True, the remaining trials get no point and do not run.
        """
        for execution in self._assign_keys(self._draw_points(is_over)):
            number, repeat = find_trial(execution)
            if self.plan.pruner is not None:
                judge = partial(self._judge_report, execution.key, number)
                execution.pruning = Pruning(self.plan.objectives[0].name, judge)
            point = self._points[number]
            is_new = number >= self._recorded_count and repeat == 0
            if is_new and point.variables:
                line = AskedTrial(execution.key, number, point.variables, point.alternative, self._digest)
                self.run.ledger.write_line(encode_asked_trial(line))
            yield execution

    def _draw_points(self, is_over: Callable[[], bool]) -> Iterator[Point]:
        yield from self._points[: self._recorded_count]
        for _ in range(self._recorded_count, self.plan.trials):
            if self.stop.reason is not None:
                return
            self._points.append(Point({}) if is_over() else self.study.ask())
            yield self._points[-1]

    def find_result(self, execution: Execution) -> Result | None:
        """Return a trial's result from an earlier run, if one counts.

        A pruned result counts only in its own search, because it depends on the other trials of the search.
        """
        number, _ = find_trial(execution)
        is_recorded = number < self._recorded_count
        return self.run.cache.find_result(execution, lambda result: is_recorded or not result.meta.pruned)

    def record_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Tell the study the outcome of a trial, unless the study has it already or no point depends on outcomes."""
        number, _ = find_trial(execution)
        if self.plan.is_adaptive and self.study.is_running(number):
            self._add_outcome(number, outcome)

    def _add_outcome(self, number: int, outcome: Outcome) -> None:
        """Tell the study a trial's outcome. With repeats it is their aggregate, once the trial has all of them."""
        trial = self._groups.add(outcome)
        if trial is None:
            return
        if self.plan.pruner is not None:
            for step, value in trial.meta.reports:
                if not self.study.has_report(number, step):  # The result is from another run.
                    self.study.report(number, step, value)
        self.study.tell(number, trial)
        self.stop.consider(trial)

    def _judge_report(self, key: str, number: int, step: int, value: float) -> bool:
        """Record a report, and return whether the trial is pruned. Reports from an earlier run are kept."""
        if number in self._pruned:
            return True
        if self.study.has_report(number, step):
            return False
        is_pruned = self.study.report(number, step, value)
        if is_pruned:
            self._pruned.add(number)
        self.run.ledger.write_line(encode_trial_report(TrialReport(key, number, step, value, is_pruned)))
        return is_pruned


def find_trial(execution: Execution) -> tuple[int, int]:
    """Return the number of an execution's trial, and of its repeat, which is 0 without repeats."""
    group, repeat = execution.place
    if group is None:
        return execution.index, 0
    return group, repeat or 0


async def execute_search(plan: SearchPlan, code: str, run: "Run") -> None:
    """Execute a search's trials."""
    executor, fingerprint = run.executor, {**await run.compute_fingerprint(), **plan.fingerprint()}
    search = Search(plan, code, fingerprint, run)
    await asyncio.to_thread(search.load_history)
    had_stopped = search.stop.reason is not None
    run.sink.observers.append(search.record_outcome)
    await executor.execute_all(search.make_executions(lambda: executor.is_over), search.find_result)
    if search.stop.reason is None or search.study.count == plan.trials:
        return
    run.record.stopped = f"after {search.study.count} of at most {plan.trials} trials, because {search.stop.reason}"
    if had_stopped:
        remedy = "set another `stop_at` or `stop_after` to continue it"
        run.sink.warn(f"the search had stopped {run.record.stopped}: {remedy}")
    else:
        run.sink.warn(f"the search stopped {run.record.stopped}")


@dataclass(frozen=True, slots=True)
class DrawnPoints:
    """All points of a search that learns from no outcome. Each iteration draws the same points again."""

    plan: SearchPlan

    def __iter__(self) -> Iterator[dict[str, Any]]:
        study = TrialStudy(self.plan)
        return (study.ask().variables for _ in range(self.plan.trials))
