"""The reports of flows, which print as a table, as text and as JSON."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, overload

from ..sandbox.outcomes.outcome_json import get_status, outcome_to_json
from ..sandbox.outcomes.text_escape import escape_text, render_html_table
from ..sandbox.result import Failure, MaybeNone, Outcome, Result
from ..tasks.ledger.run_record import Direction, ReportSpec
from .registry import load_flow
from .reporting.best_trials import BestTrials
from .reporting.columns import Tables
from .reporting.export import build_data_frame
from .reporting.groups import describe_repeats, group_outcomes, is_incomplete
from .reporting.pass_at_k import PassAtK, pass_at_k, pass_hat_k, share_sections
from .reporting.summary import RunSummary, describe_reduction
from .reporting.table import MAX_SHOWN_ROWS, NO_FEASIBLE_TRIAL, OutcomeTable, align_rows

MAX_REASONS = 10  # distinct reasons of failures in a summary

ItemT = TypeVar("ItemT")


def describe_outcome(outcome: Outcome, *, is_best: bool = False) -> dict[str, Any]:
    """Return an outcome as an object for JSON: its number, its status and its record in the ledger."""
    return {
        "index": outcome.meta.index,
        "status": get_status(outcome),
        **({"best": True} if is_best else {}),
        **outcome_to_json(outcome),
    }


def get_row_number(outcome: Outcome) -> int | None:
    """Return the number of an outcome's row in the table: its group's with repeats, otherwise its own."""
    return outcome.meta.index if outcome.meta.group is None else outcome.meta.group


class Report(Sequence[ItemT]):
    """The outcomes of one flow run, in order: the base class of reports. A notebook shows it as a table.

    Attributes:
        outcomes: A `Result` or `Failure` for each execution, in order.
        results_path: The ledger's directory or location.
        spec: The word for an execution, the objectives and the number of repeats.
        reduction: The outcome of `summarize` or `reduce`; None without.
    """

    results_path: str
    spec: ReportSpec = ReportSpec()
    reduction: Outcome | MaybeNone = None
    _tables = Tables.RUN  # the tables whose columns `rows` has
    _outcomes: Sequence[Outcome] = ()

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Every outcome, in order."""
        return self._outcomes

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures among the outcomes, in order."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failure)]

    @cached_property
    def groups(self) -> Sequence[Outcome]:
        """With `repeats`, a result for each input, point or chunk, in order; otherwise empty.

        A numeric field has its `aggregate` over the repeats, and its statistics are further fields, such as
        `groups[0]["loss.std"]`: `count`, `mean`, `std`, `se`, `min` and `max`.
        """
        return () if self.spec.repeats is None else list(group_outcomes(self.outcomes, self.spec))

    @property
    def summary_fields(self) -> dict[str, Any]:
        """The fields that `summarize` or `reduce` submitted; empty without, or if it failed."""
        return self.reduction.outputs if isinstance(self.reduction, Result) else {}

    @property
    def rows_outcomes(self) -> Collection[Outcome]:
        """The outcomes that have a row in the table: every one, or with repeats one for each group."""
        return self.groups or self.outcomes

    @property
    def best_trials(self) -> Sequence[Result]:
        """The best trial, or with several objectives the trials on the Pareto front; empty without an objective."""
        return ()

    def rows(
        self, limit: int | None = None, *, shows_output: bool = False, shows_usage: bool = False
    ) -> list[list[str]]:
        """Return the table as rows of escaped text, the header first: number, variables, fields, and the outcome.

        Args:
            limit: The number of rows without the header; best trials beyond it are added. Default None: all.
            shows_output: Add the last line that each execution's code printed, if any did. Default: False.
            shows_usage: Add the CPU seconds and the peak memory of each execution. Default: False.

        Returns:
            A list of cells for each row.
        """
        shown: dict[int, Outcome] = {}  # keys: numbers, which differ from positions in an interrupted run
        for position, outcome in enumerate(itertools.islice(self.rows_outcomes, limit)):
            shown[position if outcome.meta.index is None else outcome.meta.index] = outcome
        best = {result.meta.index or 0: result for result in self.best_trials}
        for number, result in best.items():
            shown.setdefault(number, result)
        tables = self._tables
        if shows_usage:
            tables |= Tables.USAGE
        if shows_output and any(outcome.meta.stdout.strip() for outcome in shown.values()):
            tables |= Tables.PRINTED
        table = OutcomeTable(self.spec, tables)
        for number, outcome in shown.items():
            table.add(number, outcome)
        return [[escape_text(cell) for cell in row] for row in table.build_rows(best)]

    def describe(self) -> str:
        """Return the text to print below the table, or instead of it. The text may be empty."""
        repeats = describe_repeats(self.spec, sum(is_incomplete(row, self.spec) for row in self.groups))
        reduction = "" if self.reduction is None else ": ".join(describe_reduction(self.reduction, self.spec))
        return "\n".join(filter(None, (repeats, escape_text(reduction))))

    def summary(self) -> str:
        """Return a text for people.

        Returns:
            A line with the counts and the best trial, then a line for each of the most frequent reasons of failures.
        """
        summary = RunSummary.from_outcomes(self.outcomes, self.spec)
        lines = [summary.describe(len(self.outcomes))]
        reasons = summary.failures.sort()
        lines += [reason.describe() for reason in reasons[:MAX_REASONS]]
        if len(reasons) > MAX_REASONS:
            lines.append(f"... and {len(reasons) - MAX_REASONS:,} more reasons")
        return "\n".join(lines)

    def list_notes(self) -> list[str]:
        """Return notes on the outcomes for a person, a sentence each."""
        if self.spec.noun == "step":  # A step needs no fields, because later steps read the state.
            return []
        silent = exited = 0
        for outcome in self.outcomes:
            if isinstance(outcome, Result) and not (outcome.meta.submitted or outcome.meta.pruned):
                exited += outcome.meta.exited
                silent += not outcome.meta.exited
        notes: list[str] = []
        for count, reason in ((silent, "did not call SUBMIT"), (exited, "called sys.exit before SUBMIT")):
            if count == 1:
                notes.append(f"1 execution {reason}, so it has no fields")
            elif count:
                notes.append(f"{count} executions {reason}, so they have no fields")
        return notes

    def pass_at_k(self, k: int, field: str = "passed", by: str | Sequence[str] | None = None) -> PassAtK:
        """Return the estimate of pass@k over the inputs.

        Args:
            k: The number of samples of which one, or for pass^k each, must pass.
            field: The field that says whether a sample passed. Default: "passed".
            by: The variable, or the variables, that name the input of a sample. Default: all variables but `repeat`.

        Returns:
            The estimate, with an interval of 95 %.

        Raises:
            ConfigurationError: An input has fewer than k samples, or a sample lacks the field or a variable.
        """
        return pass_at_k(self.outcomes, k, field, by)

    @share_sections(pass_at_k)
    def pass_hat_k(self, k: int, field: str = "passed", by: str | Sequence[str] | None = None) -> PassAtK:
        """Return the estimate of pass^k over the inputs: the chance that each of k samples passes."""
        return pass_hat_k(self.outcomes, k, field, by)

    def check(self, code: Any, **options: Any) -> "TrialsReport":
        """Judge the outcomes with another check, without running the code again. This call blocks.

        Args:
            code: The code of the check, or a function. It finds what the `check` of `batch` finds.
            **options: Further parameters of the flow `check`, such as `provider`. `on_failure` is "return" here.

        Returns:
            A report with the fields of the check, in a new ledger.

        Raises:
            ConfigurationError: A parameter is wrong, or an event loop runs in this thread: await the flow `check`.
        """
        return load_flow("check").sync(self.results_path, code, **{"on_failure": "return", **options})

    def to_json_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the outcomes as JSON objects.

        Returns:
            An iterator with a dict for each outcome: its record in the ledger, with `best` for the best trials. The
            last one is the reduction, if there is one.
        """
        best_numbers = {result.meta.index for result in self.best_trials}
        for outcome in self.outcomes:
            yield describe_outcome(outcome, is_best=get_row_number(outcome) in best_numbers)
        if self.reduction is not None:
            yield describe_outcome(self.reduction)

    def to_dataframe(self, by: str | Sequence[str] | None = None) -> Any:
        """Return a pandas DataFrame with a row for each outcome.

        Args:
            by: The variable, or the variables, whose values name an input. A row is then an input, with the statistics
                of its samples, such as `loss.std`, and `passed.sum` and `pass@2` of an evaluation. Default: None.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            ConfigurationError: pandas is not installed, or an outcome lacks a variable.
        """
        rows = list(group_outcomes(self.outcomes, self.spec.group_by(by))) if by else self.outcomes
        return build_data_frame(rows)

    def points_to_dataframe(self) -> Any:
        """Return a pandas DataFrame with a row for each input, point or chunk, which combines its repeats.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        return build_data_frame(list(self.rows_outcomes))

    def _repr_html_(self) -> str:
        header, *rows = self.rows(MAX_SHOWN_ROWS)
        table = render_html_table(header, rows)
        omitted = len(self.rows_outcomes) - MAX_SHOWN_ROWS
        return f"{table}<p>{omitted:,} more are in the report.</p>" if omitted > 0 else table

    def __str__(self) -> str:
        return align_rows(self.rows(MAX_SHOWN_ROWS))

    def _make_item(self, outcome: Outcome) -> ItemT:
        return outcome  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.outcomes)

    @overload
    def __getitem__(self, at: int) -> ItemT: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ItemT]: ...
    def __getitem__(self, at: int | slice) -> ItemT | Sequence[ItemT]:
        if isinstance(at, slice):
            return [self._make_item(outcome) for outcome in self.outcomes[at]]
        return self._make_item(self.outcomes[at])

    def __iter__(self) -> Iterator[ItemT]:
        return map(self._make_item, self.outcomes)


class OutcomesReport(Report[Outcome]):
    """The outcomes of a batch or of a sequence, in order. It prints as a table of variables and fields.

    Unless the job has shards it is also a list, with all that a list can do. With shards each outcome is read from the
    ledger when it is used.

    Attributes:
        outcomes: A `Result` or `Failure` for each execution, in order.
        results_path: The ledger's directory or location.
        spec: The word for an execution, and the number of repeats.
        reduction: The outcome of `summarize`; None without one.
    """

    def __init__(self, outcomes: Sequence[Outcome], results_path: str, spec: ReportSpec) -> None:
        self._outcomes, self.results_path, self.spec = outcomes, results_path, spec


class OutcomesList(list[Outcome], OutcomesReport):
    """The report of a job without shards, which is a list. Prefect copies it by `OutcomesList(outcomes)`."""

    def __init__(
        self, outcomes: Sequence[Outcome] = (), results_path: str = "", spec: ReportSpec | None = None
    ) -> None:
        list.__init__(self, outcomes)
        self.results_path, self.spec = results_path, spec or ReportSpec()

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Every outcome, in order."""
        return self


def report_outcomes(outcomes: Sequence[Outcome], results_path: str, spec: ReportSpec) -> OutcomesReport:
    """Return the report on outcomes. It is a list if the outcomes are in memory."""
    report_type = OutcomesList if isinstance(outcomes, list) else OutcomesReport
    return report_type(outcomes, results_path, spec)


class TrialsReport(Report[Outcome]):
    """The outcomes of a sweep, or of an earlier flow run of any kind, in order, and the best of them.

    The report is a sequence of the outcomes, and prints as a table of variables and fields.

    Attributes:
        outcomes: A `Result` or `Failure` for each execution, in order.
        results_path: The ledger's directory or location.
        spec: The objectives, the constraints and the number of repeats.
        flow: The flow's name, if the report is by `load_report`.
        name: The flow run's name, if the report is by `load_report`.
        reduction: The outcome of `reduce` or `summarize`; None without one.
    """

    def __init__(
        self, outcomes: Sequence[Outcome], results_path: str, spec: ReportSpec, flow: str = "", name: str = ""
    ) -> None:
        self._outcomes, self.results_path, self.spec, self.flow, self.name = outcomes, results_path, spec, flow, name
        self._best = BestTrials(spec)
        if spec.objectives:
            # Read one trial at a time, because memory may not hold all trials of a sharded job.
            for trial in self.rows_outcomes:
                if isinstance(trial, Result):
                    self._best.consider(trial)

    @property
    def trials(self) -> Sequence[Outcome]:
        """A `Result` or `Failure` for each trial, in order."""
        return self.outcomes

    @property
    def results(self) -> Sequence[Outcome]:
        """A `Result` or `Failure` for each execution, in order."""
        return self.outcomes

    @property
    def best(self) -> Result | MaybeNone:
        """The first result with the best objective. With `repeats` it is one of `groups`.

        It is None without an objective, with several objectives, or if no trial succeeded.
        """
        return self._best.result

    @property
    def pareto_front(self) -> Sequence[Result]:
        """With several objectives, the results that no other beats in all of them."""
        return self._best.results if len(self.spec.objectives) > 1 else ()

    @property
    def best_trials(self) -> Sequence[Result]:
        """The best trial, or with several objectives the trials on the Pareto front."""
        return self._best.results

    @property
    def objective(self) -> str | list[str] | None:
        """The field that decides, or several; None without an objective."""
        names = [item.name for item in self.spec.objectives]
        return names if len(names) > 1 else self.spec.objective

    @property
    def direction(self) -> Direction | list[Direction]:
        """ "minimize" or "maximize", or one for each objective."""
        directions: list[Direction] = [item.direction for item in self.spec.objectives]
        return directions if len(directions) > 1 else self.spec.direction

    @property
    def space(self) -> Any:
        """The space that was searched, as JSON; None without one."""
        return self.spec.space

    def list_notes(self) -> list[str]:
        """Return sentences about the outcomes that a person should read."""
        notes = super().list_notes()
        if self.best_trials or not self.spec.constraints:
            return notes
        # Read one trial at a time, because memory may not hold all trials of a sharded job.
        if any(isinstance(trial, Result) and not self.spec.is_feasible(trial.outputs) for trial in self.rows_outcomes):
            fields = " or ".join(self.spec.constraints)
            notes.append(f"{NO_FEASIBLE_TRIAL}, so none is the best: each has {fields} above 0")
        return notes

    def study(self, storage: str | None = None, name: str | None = None) -> Any:
        """Return the trials as an Optuna study, for Optuna's own tools.

        Args:
            storage: The URL of a storage such as `sqlite:///study.db`, which gets a new study; by default in memory.
            name: The name of the study. By default Optuna makes one.

        Returns:
            An `optuna.Study`.

        Raises:
            ConfigurationError: Optuna is not installed.
        """
        from .search.study import build_study

        return build_study(self.outcomes, self.spec, storage=storage, name=name)


SweepReport: TypeAlias = TrialsReport  # the report of `sweep`
RunReport: TypeAlias = TrialsReport  # the report of `load_report`
