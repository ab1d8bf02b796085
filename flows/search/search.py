"""A search: each trial's point is drawn when a worker is free, and recorded before the trial runs.

The ledger is the only durable record. A search that resumes replays the ledger's lines, in order, into a new study.
Trials that were running get the same points again.
"""

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sandbox.result import Outcome, Result
from ...tasks.execution import Execution, Pruning, assign_keys
from ...tasks.ledger.ledger_line import AskedTrial, LedgerLine, TrialReport, encode_asked_trial, encode_trial_report
from ...tasks.ledger.run_record import ReportSpec
from ...tasks.repeats import add_repeat, reads_repeat
from ..reporting.best_trials import BestTrials, is_score
from ..reporting.groups import aggregate_group
from .plan import Point, SearchPlan
from .study import TrialStudy

if TYPE_CHECKING:
    from ..engine.run import Run


@dataclass(slots=True)
class StopRule:
    """The rule that ends a search: a target, or a number of trials without improvement. Failures do not count."""

    plan: SearchPlan
    reason: str = ""  # set once the rule ends the search
    _best: BestTrials = field(init=False)
    _count: int = 0  # trials since the last improvement

    def __post_init__(self) -> None:
        self._best = BestTrials(ReportSpec("trial", self.plan.objectives, constraints=self.plan.constraints))

    def consider(self, outcome: Outcome) -> None:
        """Count the outcome of a trial. A resumed search calls this in the order of the ledger."""
        if not self.plan.may_stop_early or not isinstance(outcome, Result):
            return
        earlier, direction = self._best.score, self.plan.objectives[0].direction
        self._best.consider(outcome)
        score, target, sign = self._best.score, self.plan.stop_at, 1 if direction == "minimize" else -1
        self._count = 0 if is_score(score) and score != earlier else self._count + 1
        if self.reason:
            return
        if target is not None and is_score(score) and sign * score <= sign * target:
            self.reason = f"{self.plan.objectives[0].name} reached {score:.6g}, and stop_at is {target:.6g}"
        elif self.plan.stop_after is not None and self._count >= self.plan.stop_after:
            self.reason = f"{self._count} trials in a row brought no improvement"


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
    _repeats: dict[int, dict[int, Outcome]] = field(
        default_factory=dict[int, dict[int, Outcome]]
    )  # keys: trial, repeat
    _digest: str = field(init=False)
    _recorded: list[AskedTrial] = field(default_factory=list[AskedTrial])  # trials that the ledger has, by number
    _pruned: set[int] = field(default_factory=set[int])  # numbers of trials that the pruner ended

    def __post_init__(self) -> None:
        self.study = TrialStudy(self.plan)
        self.stop = StopRule(self.plan)
        parts = json.dumps([self.plan.space.source, self.code, self.fingerprint], sort_keys=True, default=repr)
        self._digest = hashlib.sha256(parts.encode()).hexdigest()[:24]

    def load_history(self) -> None:
        """Replay the ledger's lines of this search into the study. Raises OSError if a location cannot be read."""
        self._recorded = self._find_recorded_trials()
        numbers = {trial.key: trial.index for trial in self._recorded}
        points = (Point(trial.variables, trial.alternative) for trial in self._recorded)
        places = {execution.key: find_trial(execution) for _, execution in self._assign_keys(points)}
        for line in self.run.ledger.read_search_lines():
            if isinstance(line, AskedTrial):
                if numbers.get(line.key) == self.study.count:
                    self.study.add(Point(line.variables, line.alternative))
                continue
            number, repeat = places.get(line.key, (None, 0))
            if number is None or not self.study.is_running(number):
                continue
            if isinstance(line, LedgerLine):
                outcome = line.to_outcome()
                if isinstance(outcome, Result):  # A trial that failed runs again.
                    self._add_outcome(number, repeat, outcome)
            elif not self.study.has_report(number, line.step):
                self.study.report(number, line.step, line.value)
                if line.is_pruned:
                    self._pruned.add(number)

    def _assign_keys(self, points: Iterator[Point]) -> Iterator[tuple[Point, Execution]]:
        """Yield each point with its executions: one, or one for each repeat."""
        repeats, prepare = self.run.plan.report_spec.repeats, self.run.preparation
        needs_repeat = repeats is not None and reads_repeat(self.code, prepare and prepare.code)
        copies, same_copies = itertools.tee(
            (point, repeat) for point in points for repeat in range(1 if repeats is None else repeats.count)
        )
        items = (
            (self.code, add_repeat(point.variables, repeat) if needs_repeat else point.variables)
            for point, repeat in same_copies
        )
        executions = assign_keys(items, self.fingerprint, repeats=repeats)
        return zip((point for point, _ in copies), executions, strict=True)

    def _find_recorded_trials(self) -> list[AskedTrial]:
        """Return the recorded trials of this search, from number 0 to the first that is missing."""
        asked: dict[int, AskedTrial] = {}
        for line in self.run.ledger.read_search_lines():
            if isinstance(line, AskedTrial) and line.search == self._digest and line.index < self.plan.trials:
                asked.setdefault(line.index, line)
        return [asked[number] for number in itertools.takewhile(asked.__contains__, itertools.count())]

    def make_executions(self, is_over: Callable[[], bool]) -> Iterator[Execution]:
        """Yield the trials in order, each with a point that is drawn when the trial is taken.

        Once `is_over` returns True, the remaining trials get no point and do not run.
        """
        for point, execution in self._assign_keys(self._iterate_points(is_over)):
            number, repeat = find_trial(execution)
            if self.plan.pruner is not None:
                judge = partial(self._judge_report, execution.key, number)
                execution.pruning = Pruning(self.plan.objectives[0].name, judge)
            if number >= len(self._recorded) and point.variables and not repeat:
                line = AskedTrial(execution.key, number, point.variables, point.alternative, self._digest)
                self.run.ledger.write_line(encode_asked_trial(line))
            yield execution

    def _iterate_points(self, is_over: Callable[[], bool]) -> Iterator[Point]:
        for trial in self._recorded:
            yield Point(trial.variables, trial.alternative)
        for _ in range(len(self._recorded), self.plan.trials):
            if self.stop.reason:
                return
            yield Point({}) if is_over() else self.study.ask()

    def find_result(self, execution: Execution) -> Result | None:
        """Return a trial's result from an earlier run, if one counts.

        A pruned result counts only in its own search, because it depends on the other trials of the search.
        """
        is_recorded = find_trial(execution)[0] < len(self._recorded)
        return self.run.cache.find_result(execution, lambda result: is_recorded or not result.meta.pruned)

    def record_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Tell the study the outcome of a trial, unless the study has it from the ledger or no point depends on it."""
        number, repeat = find_trial(execution)
        if self.plan.is_adaptive and self.study.is_running(number):
            self._add_outcome(number, repeat, outcome)

    def _add_outcome(self, number: int, repeat: int, outcome: Outcome) -> None:
        """Tell the study a trial's outcome, which is the aggregate of its repeats if there are several."""
        spec = self.run.plan.report_spec
        if spec.repeats is not None:
            outcomes = self._repeats.setdefault(number, {})
            outcomes[repeat] = outcome
            if len(outcomes) < spec.repeats.count:
                return
            outcome = aggregate_group(list(self._repeats.pop(number).values()), number, spec.aggregate)
        for step, value in outcome.meta.reports if self.plan.pruner is not None else ():
            if not self.study.has_report(number, step):  # The result is from another run.
                self.study.report(number, step, value)
        self.study.tell(number, outcome)
        self.stop.consider(outcome)

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
    return (execution.index, 0) if group is None else (group, repeat or 0)


async def execute_search(plan: SearchPlan, code: str, run: "Run") -> None:
    """Execute a search's trials."""
    executor, fingerprint = run.executor, {**await run.compute_fingerprint(), **plan.fingerprint()}
    search = Search(plan, code, fingerprint, run)
    await asyncio.to_thread(search.load_history)
    had_stopped = bool(search.stop.reason)
    run.sink.observers.append(search.record_outcome)
    await executor.execute_all(search.make_executions(lambda: executor.is_over), search.find_result)
    if search.stop.reason and search.study.count < plan.trials:
        stopped = f"after {search.study.count} of at most {plan.trials} trials, because {search.stop.reason}"
        run.record.stopped = stopped
        remedy = ": set another `stop_at` or `stop_after` to continue it"
        run.sink.warn(f"the search had stopped {stopped}{remedy}" if had_stopped else f"the search stopped {stopped}")


@dataclass(frozen=True, slots=True)
class DrawnPoints:
    """All points of a search that learns from no outcome. Each iteration draws the same points again."""

    plan: SearchPlan

    def __iter__(self) -> Iterator[dict[str, Any]]:
        study = TrialStudy(self.plan)
        return (study.ask().variables for _ in range(self.plan.trials))
