"""A search: trials are asked for as workers come free, recorded before they run, and gone on with after a death.

The ledger is the only durable record. What it has of this search is told to a new study in the order in which it was
written; trials that were under way run with the point that they had.
"""

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sandbox.meta import Meta
from ...sandbox.result import Outcome, Result
from ...tasks.execution import Execution, Pruning, assign_keys, build_pruned_result
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.ledger_line import AskedTrial, LedgerLine, TrialReport, encode_asked_trial, encode_trial_report
from .plan import SearchPlan
from .study import Point, TrialStudy

if TYPE_CHECKING:
    from ..engine.job import Job
    from ..engine.results.result_cache import ResultCache


@dataclass(slots=True)
class Search:
    """The search of one flow run: its trials as executions of the code, and the study that they are asked of.

    `fingerprint` is what the trials' keys are made of beside code and variables; `provider` is the provider's name.
    """

    plan: SearchPlan
    code: str
    fingerprint: dict[str, Any]
    provider: str
    ledger: Ledger
    cache: "ResultCache"
    study: TrialStudy = field(init=False)
    _digest: str = field(init=False)
    _asked: Point | None = None  # the point that was asked for last, until it is written
    _recorded: list[AskedTrial] = field(default_factory=list[AskedTrial])  # of this search, by their numbers
    _reports: dict[int, list[tuple[int, float]]] = field(default_factory=dict[int, list[tuple[int, float]]])
    _pruned: set[int] = field(default_factory=set[int])  # numbers of trials that were told to end

    def __post_init__(self) -> None:
        self.study = TrialStudy(self.plan)
        parts = json.dumps([self.plan.space.source, self.code, self.fingerprint], sort_keys=True, default=repr)
        self._digest = hashlib.sha256(parts.encode()).hexdigest()[:24]

    def load_history(self) -> None:
        """Tells the study what the ledger has of this search. Raises OSError where a location cannot be read."""
        self._recorded = self._find_recorded_trials()
        numbers = {trial.key: trial.index for trial in self._recorded}
        for line in self.ledger.read_trial_lines():
            number = numbers.get(line.key)
            if number is None:
                continue
            if isinstance(line, AskedTrial):
                if number == self.study.count:
                    self.study.add(Point(line.variables, line.alternative))
            elif not self.study.is_running(number):
                continue
            elif isinstance(line, LedgerLine):
                outcome = line.to_outcome()
                if isinstance(outcome, Result):  # one that failed is run again
                    self._tell(number, outcome)
            elif not self.study.has_report(number, line.step):  # and the pruner has its rungs again
                self.study.report(number, line.step, line.value)
                self._note_report(number, line.step, line.value, is_pruned=line.is_pruned)

    def _find_recorded_trials(self) -> list[AskedTrial]:
        """The trials that the ledger has of this search, from the first on."""
        asked: dict[int, AskedTrial] = {}
        for line in self.ledger.read_trial_lines():
            if isinstance(line, AskedTrial) and line.search == self._digest and line.index < self.plan.trials:
                asked.setdefault(line.index, line)
        return [asked[number] for number in itertools.takewhile(asked.__contains__, itertools.count())]

    def make_executions(self, is_over: Callable[[], bool]) -> Iterator[Execution]:
        """The trials in order, each asked for when it is taken.

        Once it `is_over`, those that were not asked for come without a point: none of them is run.
        """
        items = ((self.code, point.variables) for point in self._make_points(is_over))
        for execution in assign_keys(items, self.fingerprint):
            number = execution.index
            if self.plan.pruner is not None:
                judge = partial(self._judge_report, execution.key, number)
                execution.pruning = Pruning(self.plan.objectives[0].name, judge)
            if self._asked is not None:
                point, self._asked = self._asked, None
                line = AskedTrial(execution.key, number, point.variables, point.alternative, self._digest)
                self.ledger.write_line(encode_asked_trial(line))
            yield execution

    def _make_points(self, is_over: Callable[[], bool]) -> Iterator[Point]:
        for trial in self._recorded:
            yield Point(trial.variables, trial.alternative)
        for _ in range(len(self._recorded), self.plan.trials):
            if is_over():
                yield Point({})
            else:
                self._asked = self.study.ask()
                yield self._asked

    def find_result(self, execution: Execution) -> Result | None:
        """The result that a trial has from before, if there is one that counts.

        One that was pruned counts in its own search alone, for it is what the others there made of it.
        """
        is_recorded = execution.index < len(self._recorded)
        result = self.cache.find_result(execution, lambda result: is_recorded or not result.meta.pruned)
        if result is None and execution.index in self._pruned:  # whose end was not written any more
            reports = tuple(self._reports[execution.index])
            meta = Meta(execution.index, execution.variables, self.provider, reports=reports, pruned=True)
            result = build_pruned_result(meta, self.plan.objectives[0].name)
            self.cache.adopt_result(execution, result)
        return result

    def record_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Tells the study what became of a trial, unless the ledger has told it, or no point depends on it."""
        if self.plan.is_adaptive and self.study.is_running(execution.index):
            self._tell(execution.index, outcome)

    def _tell(self, number: int, outcome: Outcome) -> None:
        for step, value in outcome.meta.reports if self.plan.pruner is not None else ():
            if not self.study.has_report(number, step):  # of a result from elsewhere, which others are measured against
                self.study.report(number, step, value)
        self.study.tell(number, outcome)

    def _judge_report(self, key: str, number: int, step: int, value: float) -> bool:
        """Records a report; whether the trial ends there. What it had reported before it was run again stands."""
        if number in self._pruned:
            return True
        if self.study.has_report(number, step):
            return False
        is_pruned = self.study.report(number, step, value)
        self._note_report(number, step, value, is_pruned=is_pruned)
        self.ledger.write_line(encode_trial_report(TrialReport(key, number, step, value, is_pruned)))
        return is_pruned

    def _note_report(self, number: int, step: int, value: float, *, is_pruned: bool) -> None:
        self._reports.setdefault(number, []).append((step, value))
        if is_pruned:
            self._pruned.add(number)


async def execute_search(plan: SearchPlan, code: str, job: "Job") -> None:
    """Execute a search's trials."""
    executor: Any = job.executor  # a LaneExecutor: shards are handed their points
    fingerprint = {**await job.compute_fingerprint(), **plan.fingerprint()}
    provider = job.context.provider.provider_name
    search = Search(plan, code, fingerprint, provider, job.context.ledger, job.cache)
    await asyncio.to_thread(search.load_history)
    job.recorder.observers.append(search.record_outcome)
    await executor.execute_all(search.make_executions(lambda: executor.is_over), search.find_result)


@dataclass(frozen=True, slots=True)
class DrawnPoints:
    """All points of a search that learns from no outcome, drawn ahead of its trials each time they are read."""

    plan: SearchPlan

    def __iter__(self) -> Iterator[dict[str, Any]]:
        study = TrialStudy(self.plan)
        return (study.ask().variables for _ in range(self.plan.trials))
