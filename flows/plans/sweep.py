"""The sweep flow: one piece of code over the points of a search space, and the best trial by an objective."""

from collections.abc import Iterable
from dataclasses import field
from functools import partial
from typing import Annotated, Any, cast

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Result
from ...tasks.ledger.run_record import Aggregate, Direction, ReportSpec
from ..inputs.conversion import Code, GridValues, Items, PathText, PrunerText, SpaceValues, Variables
from ..inputs.readers import Grid, Inputs, check_variables, read_inputs
from ..inputs.spilling import read_text_reference
from ..inputs.tables import ProgressReport
from ..parameters import CommandLineForm, FlowParameters, Options, RepeatCount, Summarize, Types
from ..plan import CodeForEach, Outcomes, Plan, label_execution, plan_items
from ..reporting.best_trials import read_scores
from ..reporting.groups import STATISTICS
from ..reports import TrialsReport
from ..search.plan import CONTINUED, continue_search, parse_objectives, plan_search
from ..search.search import DrawnPoints, execute_search
from ..search.space import parse_space
from ..search.start_rows import StartRows, read_start
from ..search.study import check_search

NotEmpty = Annotated[str, Field(min_length=1)]


@parameter_model(frozen=True)
class SweepParameters(Options, FlowParameters[TrialsReport]):
    """Run the code once for each point of the space, with the point's variables, and report the best trial.

    The points are a `grid` (every combination), a list of `points`, or drawn from a `space` by a sampler that learns
    from earlier trials.

    Returns:
        The report: the trials in order, and the best of them. With `on_failure="return"`, failed trials are `Failure`.

    Raises:
        ConfigurationError: A parameter is wrong, and nothing has run; or no trial submitted the objective.
        ExecutionsFailed: All trials have ended and some failed, with `on_failure="raise"` (the default).
    """

    code: Annotated[
        Code,
        Field(description="Python code that reads the trial's variables and submits the objective."),
        CommandLineForm("code file", is_argument=True),
    ]
    grid: Annotated[
        GridValues,
        Field(description="Values of each variable; every combination is a trial."),
        CommandLineForm(
            "grid", "Variable and its values, as in lr=0.001,0.01; every combination of all variables is a trial."
        ),
    ] = field(default_factory=dict)
    points: Annotated[
        Items[Variables] | PathText | None,
        Field(description="Variables of each trial, or a path to JSON, CSV or Parquet."),
        CommandLineForm("path"),
    ] = None
    objective: Annotated[
        NotEmpty | Annotated[list[NotEmpty], Field(min_length=1)] | None,
        Field(description="Submitted field that decides which trial is best, or a list of several."),
        CommandLineForm("objectives"),
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
        ),
    ] = None
    trials: Annotated[
        int | None,
        # All are in memory, and an adaptive sampler reads all of them for the next point.
        Field(ge=1, le=100_000, description="Points to draw from the space, at most 100,000."),
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
        PrunerText | None,
        Field(
            pattern=r"^((median|asha|hyperband|patient)(\(.*\))?|patient:[0-9]+)$",
            description="Pruner that ends trials early by their reports: median, asha, hyperband, patient, patient:N; "
            "or with Optuna's settings, as in median(n_warmup_steps=5).",
        ),
    ] = None
    start: Annotated[
        Items[Variables] | PathText | None,
        Field(
            description="Points of the space to try first, or a path to JSON, CSV or Parquet. A row that has the "
            "objective is a known result: the sampler learns it, and it is not run."
        ),
        CommandLineForm("path"),
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
    summarize: Summarize = None

    flow_name = "sweep"
    prefect_name = "rlm-sweep"
    one_of = ("grid", "points", "space")
    needs = {  # noqa: RUF012
        "types": "points", "aggregate": "repeats", "constraints": "objective", "space": "trials", "trials": "space",
        **dict.fromkeys(("sampler", "seed", "pruner", "start", "stop_at", "stop_after"), "space"),
    }  # fmt: skip
    excludes = {  # noqa: RUF012
        ("pruner", "check"): "a pruner reads the code's reports about itself, and with a check only the check judges",
        ("pruner", "repeats"): "a pruner compares single runs",
    }

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read or draw the points, and return the plan to execute them. Raises ConfigurationError."""
        if self.space is not None:
            return self._plan_search(report, self.options.locate_ledger(run_ledger))
        points: Inputs = Grid(cast("dict[str, list[Any]]", self.grid))
        if self.points is not None:
            points = read_inputs(self.points, self.types, noun="points")
        code = read_text_reference(self.code)
        check_variables(code, points, self.options, self.repeats)
        return self._plan_trials(code, points, len(points))

    def _plan_search(self, report: ProgressReport | None, ledger: PathOrLocation | None) -> Plan:
        code, spec, trials = read_text_reference(self.code), self._make_spec(), self.trials or 0
        passed = {name: getattr(self, name) for name in CONTINUED}
        continued = continue_search(passed, ledger, self.space, spec.objectives)
        settings = {**passed, **continued, "constraints": spec.constraints}
        settings["sampler"] = settings["sampler"] or "tpe"
        settings["seed"] = settings["seed"] or 0
        space = parse_space(self.space)
        start = StartRows() if self.start is None else read_start(self.start, space, spec, self.aggregate)
        search = plan_search(
            space, trials, self.shards,
            start=start.points, known=start.known, objectives=spec.objectives, **settings,
        )  # fmt: skip
        check_search(search)
        check_variables(code, search.space.alternatives, self.options, self.repeats)
        if report is not None and continued:
            described = ", ".join(f"{name} {value}" for name, value in continued.items())
            report(f"the search continues with {described}: pass other values to change that")
        if report is not None:
            for line in [*search.space.describe(), *start.describe()]:
                report(line)
        return self._plan_trials(
            code,
            DrawnPoints(search),
            trials,
            execute=None if self.shards is not None else partial(execute_search, search, code),
            may_stop_early=search.may_stop_early,
            search=settings,
        )

    def _plan_trials(self, code: str, points: Iterable[dict[str, Any]], count: int, **settings: Any) -> Plan:
        """Return the plan to run the code with each of `count` points. `settings` are further fields of the plan."""
        spec = self._make_spec()
        if spec.objectives:
            settings["check_first"] = partial(check_fields, spec, self.repeats is not None)
        return plan_items(
            CodeForEach(code, points),
            count,
            spec.with_repeats(self.repeats, count, self.aggregate),
            label=partial(label_execution, "trial"),
            **settings,
        )

    def _make_spec(self) -> ReportSpec:
        objectives = parse_objectives(self.objective, self.direction)
        names = self.constraints or []  # An empty text is no constraint.
        constraints = (names,) if isinstance(names, str) else tuple(names)
        return ReportSpec("trial", objectives, self.space, constraints=constraints)

    def build_report(self, outcomes: Outcomes) -> TrialsReport:
        """Return the trials and the best of them. Raises ConfigurationError if none submitted the objective."""
        spec, results_path = outcomes.spec, outcomes.results_path
        trials, reduction = outcomes.split()
        report = TrialsReport(trials, results_path, spec)
        report.reduction = reduction
        if report.best_trials or not spec.objectives:
            return report
        # Read one trial at a time, because memory may not hold all trials of a sharded job.
        for trial in report.rows_outcomes:
            if isinstance(trial, Result) and not trial.meta.pruned and read_scores(trial, spec) is None:
                names = ", ".join(repr(item.name) for item in spec.objectives)
                raise ConfigurationError(
                    f"no trial submitted {names} as a number: call SUBMIT with it, or name another objective; the "
                    f"results are in {results_path}"
                )
        return report


def check_fields(spec: ReportSpec, has_repeats: bool, result: Result) -> None:
    """Raise ConfigurationError if the first result lacks an objective or a constraint, which is probably misspelt."""
    fields = list(result.outputs)
    known = set(fields)
    if has_repeats:
        known |= {f"{field}.{key}" for field in fields for key in STATISTICS}
    for name in [*(item.name for item in spec.objectives), *spec.constraints]:
        if name not in known:
            raise ConfigurationError(
                f"no trial submitted {name!r}, they submitted {', '.join(fields)}: name another field"
            )
    for name in spec.constraints:
        value = result.outputs.get(name)
        if value is not None and not isinstance(value, (int, float)):
            raise ConfigurationError(f"the constraint {name} is no number: submit one that is at most 0 if feasible")
