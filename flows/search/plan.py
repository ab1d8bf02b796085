"""The plan of a search: the parameters of a sweep that searches, checked before anything runs."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ...blocks.worker_consent import is_deployment_run
from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.run_record import Direction, Objective
from ..parameters import Options
from .settings import OWN_SAMPLERS, SAMPLERS, SearchSettings
from .space import SearchSpace, parse_space

DEFAULT_SAMPLER = "tpe"
PRUNERS = ("median", "asha", "hyperband", "patient")
DEFAULT_PATIENCE = 10  # reports without improvement
MAX_TRIALS = 100_000  # all are in memory, and an adaptive sampler reads all of them for the next point
IMPORT_PATH = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, slots=True)
class StartPoint:
    """A point to try first: the values of some or all variables of an alternative of the space."""

    variables: Mapping[str, Any]
    alternative: int


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search: the space, the number of trials, and the objectives.

    With a pruner, `stop_at` or `stop_after` there is exactly one objective.

    Args:
        space: The values of the variables.
        trials: The number of trials.
        objectives: The fields that compare trials.
        sampler: "random", "tpe", or an import path.
        seed: The sampler's seed.
        pruner: The pruner's name, for "patient" also with its patience; None for no pruner.
        start: The points that are tried first.
        stop_at: The objective's value that ends the search.
        stop_after: The number of trials without improvement that ends the search.
        constraints: The fields that are at most 0 in a feasible trial.
    """

    space: SearchSpace
    trials: int
    objectives: tuple[Objective, ...]
    sampler: str = "tpe"
    seed: int = 0
    pruner: str | None = None
    start: tuple[StartPoint, ...] = ()
    stop_at: float | None = None
    stop_after: int | None = None
    constraints: tuple[str, ...] = ()

    @property
    def may_stop_early(self) -> bool:
        """The search may end before all trials have run."""
        return self.stop_at is not None or self.stop_after is not None

    @property
    def is_adaptive(self) -> bool:
        """The search is adaptive: a trial's outcome influences later points, the pruning of others, or the end."""
        return self.sampler != "random" or self.pruner is not None or self.may_stop_early

    def fingerprint(self) -> dict[str, Any]:
        """Return the search's part of trials' keys: with a pruner, results also depend on other trials' reports."""
        if self.pruner is None:
            return {}
        (objective,) = self.objectives
        return {"pruner": [self.pruner, objective.name, objective.direction]}


def parse_objectives(
    objective: str | Sequence[str] | None, direction: Direction | Sequence[Direction]
) -> tuple[Objective, ...]:
    """Return the objectives with their directions. One direction applies to all. Raises ConfigurationError."""
    names = [] if objective is None else [objective] if isinstance(objective, str) else list(objective)
    directions = [direction] * len(names) if isinstance(direction, str) else list(direction)
    if isinstance(objective, (list, tuple)) and not names:
        raise ConfigurationError("the list of objectives is empty: name the submitted fields, or leave it out")
    if len(directions) != len(names):
        raise ConfigurationError(
            f"there are {len(names)} objectives and {len(directions)} directions: give one direction for "
            "each, or one for all"
        )
    for name in names:
        if not name:
            raise ConfigurationError("an objective has no name: name a submitted field, as in SUBMIT(loss=...)")
        if names.count(name) > 1:
            raise ConfigurationError(f"the objective {name!r} is named twice: leave one out")
    assert all(item in get_args(Direction) for item in directions)  # The flow's parameters ensure it.
    return tuple(Objective(name, item) for name, item in zip(names, directions, strict=True))  # type: ignore[arg-type]


def plan_search(
    space: Any,
    trials: int | None,
    objectives: tuple[Objective, ...],
    settings: SearchSettings,
    code: str,
    options: Options,
) -> SearchPlan:
    """Return the search for these parameters of a sweep. Raises ConfigurationError."""
    if trials is None:
        raise ConfigurationError(f"{name_parameter('trials')} is missing: give the number of points to try")
    if trials > MAX_TRIALS:
        raise ConfigurationError(f"{name_parameter('trials')} is {trials:,}, and at most {MAX_TRIALS:,} are allowed")
    parsed = parse_space(space)
    points = tuple(_find_start_point(parsed, number, point) for number, point in enumerate(settings.start or (), 1))
    sampler, pruner = settings.sampler or DEFAULT_SAMPLER, settings.pruner
    plan = SearchPlan(
        parsed, trials, objectives, sampler, settings.seed or 0, pruner, points, settings.stop_at, settings.stop_after,
        tuple(settings.constraints or ()),
    )  # fmt: skip
    if len(points) > trials:
        raise ConfigurationError(
            f"{name_parameter('start')} has {len(points)} points, more than the {trials} trials: raise "
            f"{name_parameter('trials')}, or leave some points out"
        )
    if sampler not in SAMPLERS:
        find_sampler_class(sampler)
    adaptive = _name_adaptive_part(plan)
    if not objectives and plan.is_adaptive:
        raise ConfigurationError(
            f"{adaptive} needs an objective: name the submitted field with {name_parameter('objective')}"
        )
    if plan.may_stop_early and len(objectives) > 1:
        raise ConfigurationError(f"{adaptive} needs one objective, and there are {len(objectives)}: leave it out")
    if pruner is not None:
        _check_pruner(plan, code, options.preparation and options.preparation.code)
    if options.shards is not None and plan.is_adaptive:
        raise ConfigurationError(
            f"{adaptive} needs the results of other trials, which shards do not share: leave "
            f"{name_parameter('shards')} out, or use the sampler random without a pruner and without a stop"
        )
    import_optuna()
    return plan


def _name_adaptive_part(plan: SearchPlan) -> str:
    """Return the part of an adaptive search that depends on the objective."""
    if plan.may_stop_early:
        return name_parameter("stop_after" if plan.stop_at is None else "stop_at")
    return f"the pruner {plan.pruner}" if plan.sampler == "random" else f"the sampler {plan.sampler}"


def _find_start_point(space: SearchSpace, number: int, variables: Mapping[str, Any]) -> StartPoint:
    """Return a point to try first. Raises ConfigurationError if no alternative of the space contains it."""
    where = f"{name_parameter('start')}: point {number}"
    if not variables:
        raise ConfigurationError(f"{where} is empty: give at least one variable")
    for alternative, parameters in enumerate(space.alternatives):
        if all(name in parameters and parameters[name].contains(value) for name, value in variables.items()):
            return StartPoint(variables, alternative)
    for name, value in variables.items():
        if name not in space.names:
            raise ConfigurationError(f"{where} has {name!r}, and the space has {', '.join(space.names)}: leave it out")
        if not any(name in item and item[name].contains(value) for item in space.alternatives):
            (parameter, *_) = (item[name] for item in space.alternatives if name in item)
            raise ConfigurationError(f"{where} has {name}={value!r}, which is not in the space ({name}: {parameter})")
    raise ConfigurationError(f"{where} is in none of the alternatives of the space")


def parse_pruner(pruner: str) -> tuple[str, int]:
    """Return a pruner's name and its patience, from a text such as "median" or "patient:20".

    Raises ConfigurationError.
    """
    name, colon, patience = pruner.partition(":")
    if name not in PRUNERS or (colon and not (name == "patient" and patience.isdecimal())):
        raise ConfigurationError(
            f"unknown pruner {pruner!r}: use {', '.join(PRUNERS)}, or patient:N for N reports without improvement"
        )
    return name, int(patience or DEFAULT_PATIENCE)


def _check_pruner(plan: SearchPlan, code: str, prepare: str | None) -> None:
    parse_pruner(plan.pruner or "")
    if len(plan.objectives) > 1:
        raise ConfigurationError(
            f"the pruner {plan.pruner} needs one objective, and there are {len(plan.objectives)}: leave it out"
        )
    if "report" in plan.space.names:
        raise ConfigurationError("the variable 'report' would hide the function of that name: rename it")
    if not re.search(r"\breport\b", f"{code}\n{prepare or ''}"):
        raise ConfigurationError(
            f"the pruner {plan.pruner} needs reports, and the code never calls report(value, step): call "
            "it after each step, or leave the pruner out"
        )


def find_sampler_class(path: str) -> Any:
    """Import a sampler's class by a path such as optuna.samplers:NSGAIISampler. Raises ConfigurationError."""
    if not IMPORT_PATH.fullmatch(path):
        raise ConfigurationError(
            f"unknown sampler {path!r}: use {' or '.join(SAMPLERS)}, or an import path such as "
            "optuna.samplers:NSGAIISampler"
        )
    if is_deployment_run() and not path.startswith(OWN_SAMPLERS):
        raise ConfigurationError(f"runs of deployments may only import Optuna's own samplers, as in {OWN_SAMPLERS}NAME")
    optuna = import_optuna()
    module, _, name = path.partition(":")
    try:
        sampler = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the sampler {path} cannot be imported: {error}") from None
    if not (isinstance(sampler, type) and issubclass(sampler, optuna.samplers.BaseSampler)):
        raise ConfigurationError(f"{path} is not a subclass of optuna.samplers.BaseSampler")
    return sampler


def import_optuna() -> Any:
    """Import Optuna. Raises ConfigurationError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigurationError(
            "searching a space needs Optuna, which is not installed: pip install 'rlm-batch[search]'"
        ) from None
    return optuna
