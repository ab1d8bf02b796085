"""The sweep flow: one piece of code over the points of a search space, and the best trial by an objective."""

import difflib
from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Any, cast

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import PathOrLocation
from ...sandbox.caller import get_caller, name_parameter
from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Result
from ...tasks.ledger.run_record import Aggregate, Direction, Objective, ReportSpec
from ..inputs.conversion import Code, GridValues, Items, PathText, SpaceValues, Variables
from ..inputs.readers import (
    Grid,
    Inputs,
    check_judge,
    check_variables,
    get_column_types,
    read_inputs,
    read_points,
    resolve_types_of,
)
from ..inputs.spilling import read_text_reference
from ..inputs.tables import Report as ProgressReport
from ..parameters import CommandLineForm, FlowParameters, Options, RepeatCount, Types
from ..plan import CodeForEach, Outcomes, Plan, count_executions, repeat_items, trial_label
from ..reporting.best_trials import is_nonfinite, is_score, read_scores
from ..reporting.groups import STATISTICS
from ..reports import TrialsReport
from ..search.plan import parse_objectives, plan_search
from ..search.search import DrawnPoints, execute_search
from ..search.settings import STOPS, SearchSettings, continue_settings
from ..search.study import check_sampler

# Names of the types of values that are not scores.
KINDS = {str: "text", list: "a list", dict: "a dict", int: "an integer too large for a float"}


@parameter_model(frozen=True)
class SweepParameters(Options, FlowParameters[TrialsReport]):
    """Run the code once for each point of the space, with the point's variables, and report the best trial.

    The points are a `grid` (every combination), a list of `points`, or drawn from a `space` by a sampler that learns
    from earlier trials.

    Returns:
        The report: the trials in order, and the best of them. With `on_failure="return"`, failed trials are `Failure`.

    Raises:
        ConfigurationError: A parameter is wrong. Nothing has run, or no trial
            submitted the objective.
        ExecutionsFailed: All trials have ended and some failed, with `on_failure="raise"` (the default).
    """

    code: Annotated[
        Code,
        Field(description="Python code that reads the trial's variables and submits the objective."),
        CommandLineForm(
            "code file",
            "Python file that reads the trial's variables and submits the objective; /dev/stdin is standard input.",
            is_argument=True,
        ),
    ]
    grid: Annotated[
        GridValues,
        Field(description="Values of each variable; every combination is a trial."),
        CommandLineForm(
            "grid",
            "Variable and its values, as in lr=0.001,0.01; every combination of all variables is a trial.",
            is_common=True,
        ),
    ] = field(default_factory=dict)
    points: Annotated[
        Items[Variables] | PathText | None,
        Field(description="Variables of each trial, or a path to JSON, CSV or Parquet."),
        CommandLineForm("path", "Variables of each trial: JSON, CSV or Parquet.", is_common=True),
    ] = None
    objective: Annotated[
        str | list[str] | None,
        Field(description="Submitted field that decides which trial is best, or a list of several."),
        CommandLineForm("objectives", is_common=True),
    ] = None
    direction: Annotated[
        Direction | list[Direction],
        Field(description="Whether to minimize or maximize the objective, or each of several."),
        CommandLineForm("hidden"),
    ] = "minimize"
    space: Annotated[
        SpaceValues | None,
        Field(
            description="Choices or bounds of each variable, from which a sampler draws. A list has alternative spaces."
        ),
        CommandLineForm(
            "space",
            "Variable and its bounds or choices, as in lr=log:1e-5..0.1, units=32..512:32 or opt=adam,sgd; or a JSON "
            "file; it needs --trials.",
            is_common=True,
        ),
    ] = None
    trials: Annotated[
        int | None,
        Field(ge=1, description="Points to draw from the space, at most 100,000."),
        CommandLineForm(is_common=True),
    ] = None
    sampler: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Sampler of the space: tpe (the default), random, or an import path such as "
            "optuna.samplers:NSGAIISampler.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Field(
            description="Seed of the sampler that draws from the space; 0 by default. It is combined with the number "
            "of each trial."
        ),
    ] = None
    pruner: Annotated[
        str | None,
        Field(
            description="Pruner that ends trials early by their reports: median, asha, hyperband, patient or patient:N."
        ),
    ] = None
    start: Annotated[
        Items[Variables] | PathText | None,
        Field(description="Points of the space to try first, or a path to JSON, CSV or Parquet."),
        CommandLineForm("path", "Points of the space to try first: JSON, CSV or Parquet."),
    ] = None
    stop_at: Annotated[float | None, Field(description="Objective that ends the search once a trial reaches it.")] = (
        None
    )
    stop_after: Annotated[
        int | None, Field(ge=1, description="Trials in a row without improvement that end the search.")
    ] = None
    constraints: Annotated[
        str | list[str] | None,
        Field(description="Submitted field that is at most 0 in a feasible trial, or a list of several."),
        CommandLineForm("names"),
    ] = None
    types: Types = None
    repeats: RepeatCount = None
    aggregate: Annotated[
        Aggregate,
        Field(
            description="Value of a point over its repeats, by which the best is found and the sampler learns: mean, "
            "median, min or max."
        ),
    ] = "mean"

    flow_name = "sweep"
    prefect_name = "rlm-sweep"

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read or draw the points. Raises ConfigurationError."""
        code = read_text_reference(cast("str", self.code))
        objectives = parse_objectives(self.objective, self.direction)
        options = self.options
        self._check_source()
        needs_all = options.preparation is None
        spec = self._make_spec(objectives)
        if spec.constraints and not objectives:
            raise ConfigurationError(
                f"{name_parameter('constraints')} needs an objective: name the submitted field that decides"
            )
        check_first = partial(check_fields, objectives, spec.constraints, self.repeats is not None)
        if self.space is None:
            types = resolve_types_of(self.points, self.types, options.locate_ledger(run_ledger))  # type: ignore[arg-type]
            points = self._list_points(types, report)
            check_variables(code, points, needs_all=needs_all, repeats=self.repeats)
            check_judge(options.check_code, points)
            spec = spec.with_repeats(self.repeats, len(points), self.aggregate)
            return Plan(
                total=count_executions(len(points), spec),
                items=repeat_items(CodeForEach(code, points), spec, options),
                label=trial_label,
                report_spec=spec,
                check_first=check_first if objectives else None,
                column_types=get_column_types(points),
            )
        settings = SearchSettings(
            self.sampler,
            self.seed,
            self.pruner,
            None if self.start is None else list(read_inputs(cast("list[dict[str, Any]] | str", self.start))),
            self.stop_at,
            self.stop_after,
            None if self.constraints is None else list(spec.constraints),
        )
        ledger = options.locate_ledger(run_ledger)
        settings, continuation = continue_settings(settings, ledger, code, self.space, objectives)
        spec = replace(spec, constraints=tuple(settings.constraints or ()))
        check_first = partial(check_fields, objectives, spec.constraints, self.repeats is not None)
        search = plan_search(self.space, self.trials, objectives, settings, code, options)
        check_sampler(search)
        check_variables(code, search.space.alternatives, needs_all=needs_all, repeats=self.repeats)
        check_judge(options.check_code, search.space.alternatives)
        if report is not None:
            for line in search.space.describe():
                report(line)
        spec = spec.with_repeats(self.repeats, search.trials, self.aggregate)
        return Plan(
            total=count_executions(search.trials, spec),
            items=repeat_items(CodeForEach(code, DrawnPoints(search)), spec, options),
            execute=None if options.shards is not None else partial(execute_search, search, code),
            label=trial_label,
            report_spec=spec,
            check_first=check_first if objectives else None,
            may_stop_early=search.may_stop_early,
            search=settings.to_record(code),
            warnings=(*search.space.list_warnings(), *([continuation] if continuation else ())),
        )

    def get_variables_source(self) -> str:
        """Return the parameter that has the trials' variables."""
        return "grid" if self.grid else "points" if self.points is not None else "space"

    def _make_spec(self, objectives: Sequence[Objective]) -> ReportSpec:
        names = self.constraints or []
        constraints = (names,) if isinstance(names, str) else tuple(names)
        return ReportSpec("trial", tuple(objectives), self.space, constraints=constraints)

    def _check_source(self) -> None:
        """Raise ConfigurationError unless there is one source of points, and the other parameters fit it."""
        given = {"grid": bool(self.grid), "points": self.points is not None, "space": self.space is not None}
        sources = [name for name, is_given in given.items() if is_given]
        if len(sources) > 1:
            raise ConfigurationError(
                f"the space is given twice: pass only one of {' and '.join(map(name_parameter, sources))}"
            )
        if self.points is None and self.types is not None:
            raise ConfigurationError(
                f"{name_parameter('types')} needs a CSV file in {name_parameter('points')}: leave it out"
            )
        if self.check is not None and self.pruner is not None:
            raise ConfigurationError(
                f"{name_parameter('pruner')} ends trials by values that the code reports about itself, and with "
                f"{name_parameter('check')} only the check judges: leave one of them out"
            )
        if self.repeats is None and self.aggregate != "mean":
            raise ConfigurationError(
                f"{name_parameter('aggregate')} needs {name_parameter('repeats')}: pass both, or leave it out"
            )
        if self.repeats is not None and self.pruner is not None:
            raise ConfigurationError(
                f"the pruner {self.pruner} compares single runs, and {name_parameter('repeats')} runs each trial "
                f"several times: leave out {name_parameter('pruner')} or {name_parameter('repeats')}"
            )
        for name in ("trials", "sampler", "seed", "pruner", "start", *STOPS):
            if self.space is None and getattr(self, name) is not None:
                raise ConfigurationError(
                    f"{name_parameter(name)} needs {name_parameter('space')}: pass both, or leave "
                    f"{name_parameter(name)} out"
                )

    def _list_points(self, types: Any, report: ProgressReport | None) -> Inputs:
        """Return the points of a grid, a list or a file. Raises ConfigurationError."""
        if self.points is not None:
            return read_points(cast("list[dict[str, Any]] | str", self.points), types, report)
        if not self.grid:
            raise ConfigurationError(
                f"the points are missing: pass {name_parameter('grid')} (values of each variable), "
                + (
                    "--points FILE, or --space with --trials"
                    if get_caller().is_command
                    else "points (a list), or space (to draw from)"
                )
            )
        return Grid(cast("dict[str, list[Any]]", self.grid))

    def build_report(self, outcomes: Outcomes) -> TrialsReport:
        """Return the trials and the best of them.

        Raises:
            ConfigurationError: None of the trials that succeeded submitted the objective.
        """
        objectives = parse_objectives(self.objective, self.direction)
        spec = self._make_spec(objectives)
        if outcomes.spec is not None:
            spec = replace(spec, constraints=outcomes.spec.constraints)  # A search may have them from its ledger.
        if self.repeats is not None:
            spec = spec.with_repeats(self.repeats, len(outcomes.results) // self.repeats, self.aggregate)
        report = TrialsReport(outcomes.results, outcomes.results_path, spec)
        if objectives and not report.best_trials:
            _check_objectives(report)
        return report


def check_fields(
    objectives: Sequence[Objective], constraints: Sequence[str], has_repeats: bool, result: Result
) -> None:
    """Raise ConfigurationError if the first result lacks an objective or a constraint, which is probably misspelt."""
    fields = list(result.outputs)
    statistics = [f"{field}.{key}" for field in fields for key in STATISTICS] if has_repeats else []
    known = {*fields, *statistics}
    for item in objectives:
        if item.name not in known:
            others = [field for field in fields if field not in {objective.name for objective in objectives}]
            similar = others if len(others) == 1 else difflib.get_close_matches(item.name, others, 1)
            remedy = f"pass {_spell_objective(item.direction, similar[0])}" if similar else "name another objective"
            raise ConfigurationError(f"no trial submitted {item.name!r}, they submitted {', '.join(fields)}: {remedy}")
    for name in constraints:
        if name not in known:
            raise ConfigurationError(
                f"no trial submitted {name!r}, they submitted {', '.join(fields)}: name another field in "
                f"{name_parameter('constraints')}"
            )
        value = result.outputs.get(name)
        if value is not None and not isinstance(value, (int, float)):
            raise ConfigurationError(
                f"the constraint {name} is {KINDS[type(value)]}: submit a number that is at most 0 in a feasible trial"
            )


def _check_objectives(report: TrialsReport) -> None:
    """Raise ConfigurationError if trials succeeded, and none of them submitted all objectives as numbers."""
    names = [item.name for item in report.spec.objectives]
    has_succeeded, fields, wrong = False, dict[str, None](), dict[str, Any]()
    # Read one trial at a time, because memory may not hold all trials of a sharded job.
    for trial in report.rows_outcomes:
        if isinstance(trial, Result) and not trial.meta.pruned:
            if read_scores(trial, report.spec) is not None:
                return
            has_succeeded = True
            fields |= dict.fromkeys(name for name in trial.outputs if "." not in name)
            values = {name: trial.outputs[name] for name in names if name in trial.outputs}
            wrong |= {name: value for name, value in values.items() if not is_score(value) and not is_nonfinite(value)}
    if not has_succeeded:
        return
    submitted = ", ".join(fields)
    if not fields:
        reason = f"any field: call SUBMIT with {names[0]}"
    elif wrong:
        field, value = next(iter(wrong.items()))
        kind = KINDS.get(type(value), "None")
        remedy = f"Submit {_find_number(field, value)}, or name another objective"
        reason = f"{', '.join(names)!r} as a number: {field} is {kind}. {remedy}"
    else:
        reason = f"{', '.join(names)!r} as a number: they submitted {submitted}. Name another objective"
    raise ConfigurationError(f"no trial submitted {reason}; the results are in {report.results_path}")


def _spell_objective(direction: str, field: str) -> str:
    """Return how the caller sets the objective."""
    return f"--{direction} {field}" if get_caller().is_command else f"objective={field!r}"


def _find_number(field: str, value: Any) -> str:
    """Return the expression that converts a field's value to a number, or "a number" if there is none."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return "a number"
    return f"float({field})"
