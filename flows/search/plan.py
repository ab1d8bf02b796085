"""The plan of a search: the parameters of a sweep that searches, checked before anything runs."""

import ast
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...blocks.storage.location import PathOrLocation
from ...blocks.worker_consent import is_deployment_run
from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome
from ...tasks.ledger.run_record import Direction, Objective, list_run_records
from .space import SearchSpace

SAMPLERS = ("random", "tpe")
OWN_SAMPLERS = "optuna.samplers:"  # runs of deployments may import only these
STOPS = ("stop_at", "stop_after")
CONTINUED = {"sampler": str, "seed": int, "pruner": str, "stop_at": float, "stop_after": int}  # settings, their types
DEFAULT_PATIENCE = 10  # reports without improvement


@dataclass(frozen=True, slots=True)
class Point:
    """The variables of a trial, and the index of the alternative in the space that has these variables.

    A start point may lack variables, which Optuna draws.
    """

    variables: dict[str, Any]
    alternative: int = 0


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search: the space, the number of trials, the objectives, and the settings of the sweep's parameters.

    With a pruner, `stop_at` or `stop_after` there is exactly one objective.
    """

    space: SearchSpace
    trials: int
    objectives: tuple[Objective, ...]
    sampler: str = "tpe"
    seed: int = 0
    pruner: str | None = None
    start: tuple[Point, ...] = ()
    known: tuple[Outcome, ...] = ()  # results that the sampler learns, and that are not run
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
    names = [objective] if isinstance(objective, str) else list(objective or ())
    # mypy and pyright narrow this union in different ways.
    directions: list[Any] = [direction] * len(names) if isinstance(direction, str) else list(direction)
    if len(directions) != len(names):
        raise ConfigurationError(
            f"there are {len(names)} objectives and {len(directions)} directions: give one direction for "
            "each, or one for all"
        )
    return tuple(Objective(name, item) for name, item in zip(names, directions, strict=True))


def plan_search(space: SearchSpace, trials: int, shards: object, **settings: Any) -> SearchPlan:
    """Return the search for a sweep's parameters, with `settings` of a `SearchPlan`. Raises ConfigurationError."""
    plan = SearchPlan(space, trials, **settings)
    if len(plan.start) > trials:
        raise ConfigurationError(f"`start` has {len(plan.start)} points and `trials` is {trials}: raise `trials`")
    if plan.pruner is not None and "report" in space.names:
        raise ConfigurationError("the variable 'report' would hide the function of that name: rename it")
    lacks_objective = plan.is_adaptive and not plan.objectives
    needs_one = plan.may_stop_early or plan.pruner is not None
    if lacks_objective or (needs_one and len(plan.objectives) > 1):
        raise ConfigurationError(
            "a search needs an objective, unless its sampler is random, and `stop_at`, `stop_after` and `pruner` need "
            "exactly one: name the submitted field with `objective`"
        )
    if shards is not None and plan.is_adaptive:
        raise ConfigurationError(
            "`shards` share no results of trials: use the sampler random without a pruner and without a stop"
        )
    return plan


def continue_search(
    settings: Mapping[str, Any], ledger: PathOrLocation | None, space: Any, objectives: tuple[Objective, ...]
) -> dict[str, Any]:
    """Return the settings that a call leaves out and that the ledger's last search of this space has.

    Args:
        settings: The call's settings. A setting that it leaves out is None. If it has a stop, no other stop is added.
        ledger: The ledger, which may not exist.
        space: The JSON of the space.
        objectives: The objectives.

    Raises:
        ConfigurationError: The recorded sampler is not Optuna's. Code may be able to write to the ledger, so a module
            is imported only if the caller names it.
    """
    missing = [name for name, value in settings.items() if value is None]
    if any(settings[name] is not None for name in STOPS):
        missing = [name for name in missing if name not in STOPS]
    recorded: dict[str, Any] = {}
    records = [] if ledger is None else list_run_records(ledger)  # the latest last
    for record in records:
        if record.search and record.space == space and record.report_spec.objectives == objectives:
            recorded = record.search
    added = {name: recorded[name] for name in missing if isinstance(recorded.get(name), CONTINUED[name])}
    sampler = added.get("sampler", "tpe")
    if sampler not in SAMPLERS and not sampler.startswith(OWN_SAMPLERS):
        raise ConfigurationError(f"the search in {ledger} has the sampler {sampler}: name it with `sampler`")
    return added


def parse_pruner(text: str) -> tuple[str, dict[str, Any]]:
    """Return a pruner's name and settings, for a text such as `asha`, `patient:20` or `median(n_warmup_steps=5)`.

    Raises:
        ConfigurationError: The settings are not names with numbers or other literals.
    """
    name, _, patience = text.partition(":")
    if patience.isdigit():
        return name, {"patience": int(patience)}
    name, _, arguments = text.partition("(")
    try:
        call = ast.parse(f"settings({arguments or ')'}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return name, {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError):
        pass  # The error below says what to write.
    raise ConfigurationError(
        f"the pruner {text} cannot be read: write its settings as in median(n_startup_trials=5, n_warmup_steps=2)"
    )


def find_sampler_class(path: str) -> Any:
    """Import a sampler's class by a path such as optuna.samplers:NSGAIISampler. Raises ConfigurationError."""
    if is_deployment_run() and not path.startswith(OWN_SAMPLERS):
        raise ConfigurationError(f"runs of deployments may only import Optuna's own samplers, as in {OWN_SAMPLERS}NAME")
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"the sampler {path} cannot be imported ({error}): use random or tpe, or an import path such as "
            "optuna.samplers:NSGAIISampler"
        ) from None


def import_optuna() -> Any:
    """Import Optuna. Raises ConfigurationError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigurationError(
            "searching a space needs Optuna, which is not installed: pip install 'rlm-batch[search]'"
        ) from None
    return optuna
