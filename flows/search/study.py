"""An Optuna study in memory, in our words: points are asked for, and it is told what became of them.

All that Optuna does for a search goes through here, from one thread.
"""

import hashlib
import inspect
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.run_record import Objective
from .plan import SAMPLERS, SearchPlan, find_sampler_class, import_optuna
from .space import Choices, Parameter, SearchSpace

ALTERNATIVE = "space number"  # the study's parameter for it, which is no name of a variable
PLAIN_TYPES = (bool, int, float, str, type(None))  # of choices that Optuna takes as they are


@dataclass(frozen=True, slots=True)
class Point:
    """A trial's variables, and the number of the alternative of the space that they are from."""

    variables: dict[str, Any]
    alternative: int = 0


class TrialStudy:
    """The study of one search: its trials have the sweep's numbers."""

    def __init__(self, plan: SearchPlan) -> None:
        """Raises ConfigurationError where there is no such sampler, or no Optuna."""
        self._optuna = import_optuna()
        self._plan = plan
        self._parameters = StudyParameters(plan.space)
        self._storage: Any = self._optuna.storages.InMemoryStorage()
        self._sampler: Any = None
        directions = [objective.direction for objective in plan.objectives] or ["minimize"]
        with keep_quiet(self._optuna):
            self.study: Any = self._optuna.create_study(
                storage=self._storage, directions=directions, sampler=self._optuna.samplers.RandomSampler()
            )
        if plan.pruner is not None:
            pruners = self._optuna.pruners
            self.study.pruner = pruners.MedianPruner() if plan.pruner == "median" else pruners.SuccessiveHalvingPruner()
        # A sampler that has been through its space stops the study, which Optuna refuses outside `optimize`. A sweep
        # has the trials that it was asked for.
        self.study.stop = lambda: None
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self.count = 0  # trials that were asked for or added

    def ask(self) -> Point:
        """The next trial's point. Optuna's own samplers for us draw it from the seed and the trial's number."""
        self._seed_sampler()
        if len(self._plan.space.alternatives) == 1:
            trial, number = self.study.ask(self._parameters.distributions[0]), 0
        else:
            trial = self.study.ask()
            number = trial.suggest_categorical(ALTERNATIVE, self._parameters.alternatives.choices)
            for name, distribution in self._parameters.distributions[number].items():
                self._suggest(trial, name, distribution)
        params = self._get_trial(self.count).params  # `trial.params` is a deep copy, a third of what asking takes
        self.count += 1
        return Point(self._parameters.decode(number, params), number)

    def add(self, point: Point) -> None:
        """Adds a trial that was asked for before, and is not told yet."""
        state = self._optuna.trial.TrialState.RUNNING
        params, distributions = self._parameters.encode(point.variables, point.alternative)
        self.study.add_trial(self._optuna.create_trial(state=state, params=params, distributions=distributions))
        self.count += 1

    def has_report(self, number: int, step: int) -> bool:
        """Whether the trial has reported at that step before."""
        return step in self._get_trial(number).intermediate_values

    def report(self, number: int, step: int, value: float) -> bool:
        """Takes what a trial has reported; whether the pruner ends it there."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        self._storage.set_trial_intermediate_value(trial_id, step, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, where values are infinite or NaN
            return bool(self.study.pruner.prune(self.study, self._get_trial(number)))

    def is_running(self, number: int) -> bool:
        """Whether the trial was asked for, and not told what became of it."""
        return number < self.count and not self._get_trial(number).state.is_finished()

    def tell(self, number: int, outcome: Outcome) -> None:
        """Tells what became of a trial. One that failed, or whose objective is no number, teaches the study nothing."""
        state = self._optuna.trial.TrialState
        values = read_scores(outcome, self._plan.objectives)
        if isinstance(outcome, Result) and outcome.meta.pruned:
            self.study.tell(number, state=state.PRUNED)
        elif values is None or not self._plan.objectives:
            self.study.tell(number, state=state.FAIL)
        else:
            self.study.tell(number, values)

    def _get_trial(self, number: int) -> Any:
        return self._storage.get_trial(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _seed_sampler(self) -> None:
        """Has the sampler draw the next point by the seed and the trial's number.

        A sampler by import path is seeded once, with the number of the first trial that this process asks for: some
        have a sequence that a new seed would tear.
        """
        plan, seed = self._plan, derive_seed(self._plan.seed, self.count)
        if self._sampler is None:
            with keep_quiet(self._optuna):
                self._sampler = self.study.sampler = self._make_sampler(seed)
        elif plan.sampler in SAMPLERS:
            # What a new sampler with this seed has; a new one would go through all trials again, a third of TPE's time.
            for sampler in (self._sampler, getattr(self._sampler, "_random_sampler", None)):
                if sampler is not None:
                    sampler._rng.rng.seed(seed)

    def _make_sampler(self, seed: int) -> Any:
        samplers, is_alternating = self._optuna.samplers, len(self._plan.space.alternatives) > 1
        if self._plan.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if self._plan.sampler == "tpe":
            # Points under way count as bad ones, so that workers do not all try the same. With alternatives those of
            # each are sampled together.
            more = {"multivariate": True, "group": True} if is_alternating else {}
            return samplers.TPESampler(seed=seed, constant_liar=True, **more)
        kind = find_sampler_class(self._plan.sampler)
        return kind(seed=seed) if "seed" in inspect.signature(kind).parameters else kind()

    def _suggest(self, trial: Any, name: str, distribution: Any) -> Any:
        kinds = self._optuna.distributions
        if isinstance(distribution, kinds.CategoricalDistribution):
            return trial.suggest_categorical(name, distribution.choices)
        suggest = trial.suggest_int if isinstance(distribution, kinds.IntDistribution) else trial.suggest_float
        step = 1 if distribution.log and distribution.step is not None else distribution.step
        return suggest(name, distribution.low, distribution.high, step=step, log=distribution.log)


def check_sampler(plan: SearchPlan) -> None:
    """Has a sampler by import path draw two points. Raises ConfigurationError where it cannot, for want of a package.

    Some import theirs for the second, once there is a trial to go by.
    """
    if plan.sampler in SAMPLERS:
        return
    try:
        study = TrialStudy(plan)
        study.ask()
        study.tell(0, Result({objective.name: 0.0 for objective in plan.objectives}, Meta()))
        study.ask()
    except Exception as error:  # of whatever code that is
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigurationError(f"the sampler {plan.sampler} cannot be used: {reason}") from error


class StudyParameters:
    """A space as Optuna's parameters: the distributions of each alternative, and the points both ways.

    A variable that the alternatives have alike is one parameter; where they differ each has its own.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._optuna = import_optuna()
        self._space = space
        kinds: dict[str, list[Parameter]] = {}
        for alternative in space.alternatives:
            for name, parameter in alternative.items():
                kinds.setdefault(name, []).append(parameter)
        self._names = [
            {name: name if all(p == kinds[name][0] for p in kinds[name]) else f"{name} in space {number}" for name in a}
            for number, a in enumerate(space.alternatives)
        ]
        self.alternatives: Any = self._optuna.distributions.CategoricalDistribution(
            list(range(len(space.alternatives)))
        )
        self.distributions: list[dict[str, Any]] = [
            {names[name]: self._make_distribution(parameter) for name, parameter in alternative.items()}
            for names, alternative in zip(self._names, space.alternatives, strict=True)
        ]

    def decode(self, number: int, params: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of an alternative's point."""
        return {
            name: _decode_value(parameter, params[self._names[number][name]])
            for name, parameter in self._space.alternatives[number].items()
        }

    def encode(self, variables: Mapping[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters, and their distributions, of a point of an alternative."""
        alternative = self._space.alternatives[number]
        params = {self._names[number][name]: _encode_value(p, variables[name]) for name, p in alternative.items()}
        distributions = dict(self.distributions[number])
        if len(self._space.alternatives) > 1:
            params = {ALTERNATIVE: number, **params}
            distributions = {ALTERNATIVE: self.alternatives, **distributions}
        return params, distributions

    def _make_distribution(self, parameter: Parameter) -> Any:
        kinds = self._optuna.distributions
        with keep_quiet(self._optuna):
            if isinstance(parameter, Choices):
                return kinds.CategoricalDistribution([_encode_value(parameter, value) for value in parameter.values])
            kind = kinds.IntDistribution if parameter.is_whole else kinds.FloatDistribution
            step = {} if parameter.step is None else {"step": parameter.step}
            return kind(parameter.low, parameter.high, log=parameter.log, **step)


def read_scores(outcome: Outcome, objectives: tuple[Objective, ...]) -> list[float] | None:
    """The objectives' values, infinities among them; None where one is missing, no number or NaN."""
    if not isinstance(outcome, Result):
        return None
    scores: list[float] = []
    for objective in objectives:
        value = outcome.outputs.get(objective.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        if math.isnan(number):
            return None
        scores.append(number)
    return scores


def derive_seed(seed: int, number: int) -> int:
    """The seed of the trial with that number, as numpy's generators take it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def _are_plain(choices: Choices) -> bool:
    """Whether Optuna tells these choices apart as they are: it takes 1, 1.0 and true for one."""
    values = choices.values
    return all(isinstance(value, PLAIN_TYPES) for value in values) and len(set(values)) == len(values)


def _encode_value(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Choices) and not _are_plain(parameter):
        return json.dumps(value, sort_keys=True)
    return value


def _decode_value(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Choices) and not _are_plain(parameter):
        return next(choice for choice in parameter.values if json.dumps(choice, sort_keys=True) == value)
    return value


@contextmanager
def keep_quiet(optuna: Any) -> Iterator[None]:
    """Within this, Optuna logs and warns of nothing: what it has to say is for whoever calls it themselves.

    For what is made once: to change a level makes all of Python's logging forget what it has worked out.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
