"""Optuna's studies: one in memory that draws a search's points, and the export of a sweep's trials.

One thread makes all calls of Optuna for a search.
"""

import hashlib
import inspect
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.run_record import Objective, ReportSpec
from ..reporting.groups import group_outcomes, read_numbers
from .plan import DEFAULT_PATIENCE, SAMPLERS, Point, SearchPlan, find_sampler_class, import_optuna, parse_pruner
from .space import MAX_EXACT, Choices, Parameter, SearchSpace, infer_space, parse_space

STARTUP_TRIALS = 10  # trials for which Optuna's samplers draw points at random
ALTERNATIVE = "space number"  # the study's parameter for the alternative; no variable can have this name
PLAIN_TYPES = (bool, int, float, str, type(None))  # types of choices that Optuna takes unchanged


class TrialStudy:
    """The study of one search. Its trials have the sweep's numbers."""

    def __init__(self, plan: SearchPlan) -> None:
        """Create the study. Raises ConfigurationError if Optuna is missing or refuses the space."""
        self._optuna = import_optuna()
        self._plan = plan
        self._parameters = StudyParameters(plan.space)
        self._storage: Any = self._optuna.storages.InMemoryStorage()
        self._sampler: Any = None
        self._start = list(plan.start)  # points that no trial has tried yet
        directions = [objective.direction for objective in plan.objectives] or ["minimize"]
        with keep_quiet(self._optuna):
            self.study: Any = self._optuna.create_study(
                # Hyperband derives a trial's bracket from this name, so a resumed search needs the same name.
                study_name="search",
                storage=self._storage,
                directions=directions,
                sampler=self._optuna.samplers.RandomSampler(),
                pruner=None if plan.pruner is None else self._make_pruner(plan.pruner),
            )
        # A sampler that has exhausted its space stops the study, which Optuna refuses outside of `optimize`. A sweep
        # runs all of its trials nevertheless.
        self.study.stop = lambda: None
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        for outcome in plan.known:  # Optuna numbers them before the sweep's trials.
            self.study.add_trial(build_trial(outcome, self._parameters, plan.objectives, plan.constraints))
        self.count = 0  # trials that were drawn or added
        self._last_step = -1  # the greatest step of the complete trials; -1 without reports

    def ask(self) -> Point:
        """Return the next trial's point: a start point that was not tried, or one that the sampler draws.

        The samplers random and tpe draw it by the seed and the trial's number.
        """
        self._seed_sampler()
        if self._start:
            point = self._start.pop(0)
            # Optuna draws the variables that the start point lacks.
            self.study.enqueue_trial(self._parameters.encode(point.variables, point.alternative)[0])
        number = 0
        if len(self._plan.space.alternatives) == 1:
            self.study.ask(self._parameters.distributions[0])
        else:
            trial = self.study.ask()
            number = trial.suggest_categorical(ALTERNATIVE, self._parameters.alternatives.choices)
            for name, distribution in self._parameters.distributions[number].items():
                self._suggest(trial, name, distribution)
        params = self._get_trial(self.count).params  # `trial.params` would copy them deeply.
        self.count += 1
        return Point(self._parameters.decode(number, params), number)

    def add(self, point: Point) -> None:
        """Add a trial that an earlier process drew, as a running trial."""
        state = self._optuna.trial.TrialState.RUNNING
        params, distributions = self._parameters.encode(point.variables, point.alternative)
        self.study.add_trial(self._optuna.create_trial(state=state, params=params, distributions=distributions))
        self.count += 1
        for number, start in enumerate(self._start):
            if start.alternative == point.alternative and start.variables.items() <= point.variables.items():
                del self._start[number]
                break

    def has_report(self, number: int, step: int) -> bool:
        """Return whether the trial has a report at that step."""
        return step in self._get_trial(number).intermediate_values

    def report(self, number: int, step: int, value: float) -> bool:
        """Add a trial's report, and return whether the pruner ends the trial.

        At the last step of the complete trials there is nothing to save, so a trial completes.
        """
        self._storage.set_trial_intermediate_value(self._find_id(number), step, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of infinite values and NaN.
            is_pruned = bool(self.study.pruner.prune(self.study, self._get_trial(number)))
        return is_pruned and not 0 <= self._last_step <= step

    def is_running(self, number: int) -> bool:
        """Return whether the trial was drawn and has no outcome yet."""
        return number < self.count and not self._get_trial(number).state.is_finished()

    def tell(self, number: int, outcome: Outcome) -> None:
        """Add a trial's outcome.

        A failure, or an objective or a constraint that is not a number, has no influence on later points.
        """
        states = self._optuna.trial.TrialState
        values = read_fields(outcome, [item.name for item in self._plan.objectives])
        limits = read_fields(outcome, self._plan.constraints)
        if isinstance(outcome, Result) and outcome.meta.pruned:
            self.study.tell(self._find_optuna_number(number), state=states.PRUNED)
        elif not values or limits is None:
            self.study.tell(self._find_optuna_number(number), state=states.FAIL)
        else:
            # This is what `Trial.set_constraint` does, which would draw a point again.
            for name, value in zip(self._plan.constraints, limits, strict=True):
                self._storage.set_trial_system_attr(self._find_id(number), f"constraints:{name}", value)
            self.study.tell(self._find_optuna_number(number), values)
            self._last_step = max([self._last_step, *self._get_trial(number).intermediate_values])

    def _find_optuna_number(self, number: int) -> int:
        """Return the number that Optuna has for a trial: known results have the first numbers."""
        return len(self._plan.known) + number

    def _find_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, self._find_optuna_number(number))

    def _get_trial(self, number: int) -> Any:
        return self._storage.get_trial(self._find_id(number))

    def _seed_sampler(self) -> None:
        """Seed the sampler with the seed and the next trial's number.

        A sampler by import path is seeded once, with the number of the first trial that this process draws: some
        samplers have a sequence that a new seed would break.
        """
        seed = derive_seed(self._plan.seed, self.count)
        if self._sampler is None:
            with keep_quiet(self._optuna):
                self._sampler = self.study.sampler = self._make_sampler(seed)
        elif self._plan.sampler in SAMPLERS:
            # This has the effect of a new sampler. A new one would read all trials again, a third of TPE's time.
            for sampler in (self._sampler, getattr(self._sampler, "_random_sampler", None)):
                if sampler is not None:
                    sampler._rng.rng.seed(seed)

    def _make_pruner(self, pruner: str) -> Any:
        name, settings = parse_pruner(pruner)
        pruners = self._optuna.pruners
        kinds = {
            "median": pruners.MedianPruner,
            "asha": pruners.SuccessiveHalvingPruner,
            "hyperband": pruners.HyperbandPruner,
            "patient": pruners.PatientPruner,
        }
        if name == "patient":
            settings = {"wrapped_pruner": None, "patience": DEFAULT_PATIENCE, **settings}
        try:
            return kinds[name](**settings)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the pruner {pruner}: {error}") from None

    def _make_sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._plan.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if self._plan.sampler == "tpe":
            # With alternatives, the variables of each alternative are sampled together.
            has_alternatives = len(self._plan.space.alternatives) > 1
            options = {"multivariate": True, "group": True} if has_alternatives else {}
            # Running trials count as bad trials, so that workers do not all try the same point.
            return samplers.TPESampler(seed=seed, constant_liar=True, **options)
        sampler = find_sampler_class(self._plan.sampler)
        takes_seed = "seed" in inspect.signature(sampler).parameters
        return sampler(seed=seed) if takes_seed else sampler()

    def _suggest(self, trial: Any, name: str, distribution: Any) -> None:
        """Draw the value of a parameter."""
        kinds = self._optuna.distributions
        if isinstance(distribution, kinds.CategoricalDistribution):
            trial.suggest_categorical(name, distribution.choices)
            return
        suggest = trial.suggest_int if isinstance(distribution, kinds.IntDistribution) else trial.suggest_float
        suggest(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def check_search(plan: SearchPlan) -> None:
    """Make the study and draw points. Raises ConfigurationError if the sampler or the space cannot be used.

    Some samplers import their packages only after their `STARTUP_TRIALS`.
    """
    study = TrialStudy(plan)
    names = [*(objective.name for objective in plan.objectives), *plan.constraints]
    count = 1 if plan.sampler in SAMPLERS else STARTUP_TRIALS + 1
    try:
        with keep_quiet(import_optuna()):
            for number in range(count):
                study.ask()
                study.tell(number, Result(dict.fromkeys(names, -float(number)), Meta()))
    except ConfigurationError:
        raise
    except Exception as error:  # The sampler may be any code.
        raise ConfigurationError(f"the sampler {plan.sampler} cannot be used: {error}") from error


class StudyParameters:
    """A space as Optuna's parameters: distributions of each alternative, and conversion of points in both directions.

    A variable with the same values in all its alternatives is one parameter. Otherwise each alternative has its own.
    """

    def __init__(self, space: SearchSpace) -> None:
        """Make the distributions. Raises ConfigurationError for bounds that Optuna refuses."""
        self._optuna = import_optuna()
        self.space = space
        numbers = list(range(len(space.alternatives)))
        self.alternatives: Any = self._optuna.distributions.CategoricalDistribution(numbers)
        self.distributions: list[dict[str, Any]] = []
        self._names: list[dict[str, str]] = []  # the parameter of each variable, for each alternative
        for number, alternative in enumerate(space.alternatives):
            distributions: dict[str, Any] = {}
            names: dict[str, str] = {}
            for name, values in alternative.items():
                is_shared = all(other.get(name, values) == values for other in space.alternatives)
                names[name] = name if is_shared else f"{name} in space {number}"
                distributions[names[name]] = self._make_distribution(name, values)
            self._names.append(names)
            self.distributions.append(distributions)

    def decode(self, number: int, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of an alternative's point."""
        return {
            name: _decode_value(parameter, params[self._names[number][name]])
            for name, parameter in self.space.alternatives[number].items()
        }

    def encode(self, variables: Mapping[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of Optuna's parameters for a point, which may lack variables, and all distributions.

        `number` is the number of the point's alternative.
        """
        alternative = self.space.alternatives[number]
        params = {
            self._names[number][name]: _encode_value(parameter, variables[name])
            for name, parameter in alternative.items()
            if name in variables
        }
        distributions = dict(self.distributions[number])
        if len(self.space.alternatives) > 1:
            params = {ALTERNATIVE: number, **params}
            distributions = {ALTERNATIVE: self.alternatives, **distributions}
        return params, distributions

    def _make_distribution(self, name: str, parameter: Parameter) -> Any:
        kinds = self._optuna.distributions
        with keep_quiet(self._optuna):
            if isinstance(parameter, Choices):
                return kinds.CategoricalDistribution([_encode_value(parameter, value) for value in parameter.values])
            kind = kinds.IntDistribution if parameter.is_whole else kinds.FloatDistribution
            step = {} if parameter.step is None else {"step": parameter.step}
            try:
                return kind(parameter.low, parameter.high, log=parameter.log, **step)
            except ValueError as error:
                raise ConfigurationError(f"the space of {name!r}: {error}") from None


def read_fields(outcome: Outcome, names: Sequence[str]) -> list[float] | None:
    """Return the values of these fields, which may be infinite, or None if one is missing, NaN or not a number."""
    if not isinstance(outcome, Result):
        return None
    numbers = read_numbers(outcome.outputs.get(name) for name in names)
    return None if numbers is None or any(map(math.isnan, numbers)) else numbers


def derive_seed(seed: int, number: int) -> int:
    """Return the seed of the trial with that number, in the range of numpy's generators."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def _are_plain(choices: Choices) -> bool:
    """Return whether Optuna can distinguish these choices. It compares numbers and bools as floats."""
    values = choices.values
    if any(isinstance(value, int) and abs(value) > MAX_EXACT for value in values):
        return False
    return all(isinstance(value, PLAIN_TYPES) for value in values) and len(set(values)) == len(values)


def _encode_value(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Choices) and not _are_plain(parameter):
        return json.dumps(value, sort_keys=True)
    return value


def _decode_value(parameter: Parameter, value: Any) -> Any:
    if not isinstance(parameter, Choices) or _are_plain(parameter):
        return value
    choices = {json.dumps(choice, sort_keys=True): choice for choice in parameter.values}
    return choices[value]


def build_study(
    outcomes: Sequence[Outcome], spec: ReportSpec, *, storage: str | None = None, name: str | None = None
) -> Any:
    """Return an Optuna study of a run's trials, in their order, in `storage` if there is one.

    A trial with repeats has their aggregate, and lasts from the first to the last of them. A trial that failed, or
    whose objective is not a number, is a failed trial. Trials that did not end, or are not in the space, are left out.

    Raises:
        ConfigurationError: Optuna is not installed, or refuses the storage.
    """
    optuna = import_optuna()
    times = _find_times(outcomes)
    trials = [outcome for outcome in group_outcomes(outcomes, spec) if get_status(outcome) != "unfinished"]
    space = infer_space([trial.meta.variables for trial in trials]) if spec.space is None else parse_space(spec.space)
    with keep_quiet(optuna):
        try:
            study = optuna.create_study(
                storage=storage, study_name=name, directions=[objective.direction for objective in spec.objectives]
            )
        except Exception as error:  # The storage may raise anything.
            reason = escape_text(str(error).partition("\n")[0])
            raise ConfigurationError(f"the study cannot be created in {storage!r}: {reason}") from error
        parameters = StudyParameters(space)
        for trial in trials:
            if space.find_alternative(trial.meta.variables) is None:
                continue
            frozen = build_trial(trial, parameters, spec.objectives, spec.constraints)
            frozen.set_user_attr("index", trial.meta.index)
            if trial.meta.index in times:
                began_at, ended_at = times[trial.meta.index]
                with suppress(ValueError, OverflowError, OSError):  # The ledger's time may be damaged.
                    frozen.datetime_start = datetime.fromtimestamp(began_at)  # noqa: DTZ006 - as in Optuna
                    frozen.datetime_complete = datetime.fromtimestamp(ended_at)  # noqa: DTZ006
            study.add_trial(frozen)
    return study


def build_trial(
    outcome: Outcome, parameters: StudyParameters, objectives: Sequence[Objective], constraints: Sequence[str]
) -> Any:
    """Return an ended trial, whose point is in the space, as a trial of Optuna."""
    optuna = import_optuna()
    point = outcome.meta.variables
    params, distributions = parameters.encode(point, parameters.space.find_alternative(point) or 0)
    state, values = _read_state(optuna, outcome, objectives)
    trial = optuna.create_trial(
        state=state, values=values, params=params, distributions=distributions,
        intermediate_values=dict(outcome.meta.reports),
    )  # fmt: skip
    limits = read_fields(outcome, constraints)
    if limits is not None:
        for field, value in zip(constraints, limits, strict=True):
            trial.set_constraint(field, value)
    return trial


def _find_times(outcomes: Iterable[Outcome]) -> dict[int | None, tuple[float, float]]:
    """Return when each trial began and ended, in epoch seconds. Repeats count from the first to the last."""
    times: dict[int | None, tuple[float, float]] = {}
    for outcome in outcomes:
        meta = outcome.meta
        if meta.ended_at is not None and get_status(outcome) != "unfinished":
            number = meta.index if meta.group is None else meta.group
            began_at, ended_at = times.get(number, (math.inf, -math.inf))
            times[number] = min(began_at, meta.ended_at - meta.seconds), max(ended_at, meta.ended_at)
    return times


def _read_state(optuna: Any, trial: Outcome, objectives: Sequence[Objective]) -> tuple[Any, list[float] | None]:
    """Return the state of a trial in Optuna, and its values. A pruned trial has the value of its last report."""
    states = optuna.trial.TrialState
    if isinstance(trial, Result) and trial.meta.pruned:
        _, last_value = max(trial.meta.reports, default=(0, math.nan))
        return states.PRUNED, None if math.isnan(last_value) else [last_value]
    values = read_fields(trial, [item.name for item in objectives])
    if values is None:
        return states.FAIL, None
    return states.COMPLETE, values


@contextmanager
def keep_quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's logs and warnings in this context: they are for direct callers of Optuna.

    Do not use this for each trial: a change of a log level clears the cache of all of Python's loggers.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
