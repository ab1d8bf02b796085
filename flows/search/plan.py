"""The plan of a search: the parameters of a sweep that searches, checked before anything runs."""

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ...blocks.worker_consent import is_deployment_run
from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.run_record import Direction, Objective
from .space import SearchSpace, parse_space

SAMPLERS = ("random", "tpe")
PRUNERS = ("median", "asha")
OWN_SAMPLERS = "optuna.samplers:"  # runs of deployments may import only these
MAX_TRIALS = 100_000  # all are in memory, and an adaptive sampler reads all of them for the next point
IMPORT_PATH = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search: the space, the number of trials, and the objectives. With a pruner there is exactly one objective."""

    space: SearchSpace
    trials: int
    objectives: tuple[Objective, ...]
    sampler: str = "tpe"
    seed: int = 0
    pruner: str | None = None

    @property
    def is_adaptive(self) -> bool:
        """The search is adaptive: a trial's outcome influences later points, or the pruning of other trials."""
        return self.sampler != "random" or self.pruner is not None

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
    *,
    trials: int | None,
    objectives: tuple[Objective, ...],
    sampler: str,
    seed: int,
    pruner: str | None,
    code: str,
    prepare: str | None = None,
    is_sharded: bool = False,
) -> SearchPlan:
    """Return the search for these parameters of a sweep. Raises ConfigurationError."""
    if trials is None:
        raise ConfigurationError(f"{name_parameter('trials')} is missing: give the number of points to try")
    if trials > MAX_TRIALS:
        raise ConfigurationError(f"{name_parameter('trials')} is {trials:,}, and at most {MAX_TRIALS:,} are allowed")
    plan = SearchPlan(parse_space(space), trials, objectives, sampler, seed, pruner)
    if sampler not in SAMPLERS:
        find_sampler_class(sampler)
    adaptive = f"the pruner {pruner}" if sampler == "random" else f"the sampler {sampler}"
    if not objectives and plan.is_adaptive:
        raise ConfigurationError(
            f"{adaptive} needs an objective: name the submitted field with {name_parameter('objective')}"
        )
    if pruner is not None:
        _check_pruner(plan, code, prepare)
    if is_sharded and plan.is_adaptive:
        raise ConfigurationError(
            f"{adaptive} needs the results of other trials, which shards do not share: leave "
            f"{name_parameter('shards')} out, or use the sampler random without a pruner"
        )
    import_optuna()
    return plan


def _check_pruner(plan: SearchPlan, code: str, prepare: str | None) -> None:
    if plan.pruner not in PRUNERS:
        raise ConfigurationError(f"unknown pruner {plan.pruner!r}: use median or asha")
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
