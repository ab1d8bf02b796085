"""A sweep's trials as an Optuna study of whoever wants its tools."""

from collections.abc import Iterable
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.run_record import Objective
from .plan import import_optuna
from .space import SearchSpace, infer_space, parse_space
from .study import StudyParameters, keep_quiet, read_scores


def build_study(
    outcomes: Iterable[Outcome],
    objectives: tuple[Objective, ...],
    space: Any = None,
    *,
    storage: str | None = None,
    name: str | None = None,
) -> Any:
    """A study with these trials, in their order; with a `storage` a new one there, of that name.

    `space` is the JSON of the space that was searched; without one it is made of the variables' values. A trial that
    failed, or whose objective is no number, is one that failed; one whose point is not of the space is left out.
    Raises ConfigurationError.
    """
    optuna = import_optuna()
    if not objectives:
        raise ConfigurationError("a study has an objective, and this sweep has none: run it with objective=")
    trials = list(outcomes)
    whole = infer_space([trial.meta.variables for trial in trials]) if space is None else parse_space(space)
    with keep_quiet(optuna):
        try:
            study = optuna.create_study(
                storage=storage, study_name=name, directions=[objective.direction for objective in objectives]
            )
        except Exception as error:  # of whatever is behind the storage
            first = next(iter(str(error).splitlines()), "")
            raise ConfigurationError(f"the study cannot be made in {storage}: {escape_text(first)}") from error
        parameters = StudyParameters(whole)
        frozen = (_freeze_trial(optuna, trial, objectives, whole, parameters) for trial in trials)
        study.add_trials([trial for trial in frozen if trial is not None])
    return study


def _freeze_trial(
    optuna: Any, outcome: Outcome, objectives: tuple[Objective, ...], space: SearchSpace, parameters: StudyParameters
) -> Any:
    """The trial as Optuna has it; None where it has no point of the space."""
    alternative = space.find_alternative(outcome.meta.variables)
    if alternative is None:
        return None
    params, distributions = parameters.encode(outcome.meta.variables, alternative)
    states, reports = optuna.trial.TrialState, dict(outcome.meta.reports)
    values: list[float] | None = None
    if isinstance(outcome, Result) and outcome.meta.pruned:
        state, last = states.PRUNED, reports[max(reports)] if reports else float("nan")
        values = [last] if last == last else None  # as Optuna has it: none for one that is NaN
    else:
        values = read_scores(outcome, objectives)
        state = states.FAIL if values is None else states.COMPLETE
    return optuna.create_trial(
        state=state, values=values, params=params, distributions=distributions, intermediate_values=reports,
        user_attrs={"index": outcome.meta.index},
    )  # fmt: skip


def compute_importances(outcomes: Iterable[Outcome], objective: Objective, space: Any) -> dict[str, float]:
    """How much of the objective each variable of the space accounts for, as Optuna has it: shares of one.

    None where Optuna finds none, as among trials that are all alike. Raises ConfigurationError.
    """
    optuna = import_optuna()
    study = build_study(outcomes, (objective,), space)
    with keep_quiet(optuna):
        try:
            return {str(name): float(share) for name, share in optuna.importance.get_param_importances(study).items()}
        except (ValueError, RuntimeError):
            return {}
