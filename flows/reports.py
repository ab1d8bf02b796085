"""The base class of the flows' reports, which print as a table, as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

from ..sandbox.outcomes.outcome_json import get_status, outcome_to_json
from ..sandbox.result import Failure, MaybeNone, Outcome, Result
from ..tasks.ledger.run_record import Direction, ReportSpec
from .reporting.export import build_data_frame
from .reporting.failure_reasons import group_failures
from .reporting.groups import describe_repeats, group_outcomes, is_incomplete, list_hidden_fields
from .reporting.pass_at_k import PassAtK, pass_at_k
from .reporting.table import (
    BEST_MARK,
    MAX_SHOWN_ROWS,
    NO_FEASIBLE_TRIAL,
    PARETO_MARK,
    align_rows,
    format_rows,
    render_outcomes,
)

MAX_REASONS = 10  # distinct reasons of failures in a summary


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


class Report:
    """The outcomes of one flow run, in order: the base class of reports. A notebook shows it as a table."""

    results_path: str
    spec: ReportSpec = ReportSpec()  # the objectives and the repeats
    # True if code without fields gets a note. Steps of a sequence need no fields, because later steps read the state.
    expects_fields: bool = True

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Every outcome, in order."""
        raise NotImplementedError

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures among the outcomes, in order."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failure)]

    @property
    def rows_outcomes(self) -> Sequence[Outcome]:
        """The outcomes that have a row in the table: every one, or with repeats one for each group."""
        return self.outcomes

    @property
    def best_trials(self) -> Sequence[Result]:
        """The results that are marked as the best; empty if the flow has no objective."""
        return ()

    @property
    def mark(self) -> str:
        """The note on the best trials."""
        return BEST_MARK

    def rows(
        self, limit: int | None = None, *, shows_output: bool = False, shows_usage: bool = False
    ) -> list[list[str]]:
        """Return the table as rows of text, the header first: number, variables, fields, and the outcome.

        Args:
            limit: The number of rows without the header; best trials beyond it are added. Default None: all.
            shows_output: Add the last line that each execution's code printed, if any did. Default: False.
            shows_usage: Add the CPU seconds and the peak memory of each execution. Default: False.

        Returns:
            A list of cells for each row.
        """
        return format_rows(
            self.rows_outcomes, self.best_trials, limit, mark=self.mark, shows_output=shows_output,
            hidden=self._list_hidden(), shows_usage=shows_usage, is_feasible=self.spec.is_feasible,
        )  # fmt: skip

    def _list_hidden(self) -> set[str]:
        return set() if self.spec.repeats is None else list_hidden_fields(self.rows_outcomes, self.spec)

    def describe(self) -> str:
        """Return the text to print below the table, or instead of it. The text may be empty."""
        return describe_repeats(self.spec, sum(is_incomplete(row, self.spec) for row in self.rows_outcomes))

    def summary(self) -> str:
        """Return a text for people: the number of successes, the best trial if there is one, and why others failed.

        Returns:
            A line with the counts, and a line for each of the most frequent reasons of failures.
        """
        from .reporting.report import describe_counts
        from .reporting.summary import RunSummary

        summary = RunSummary(self.spec)
        for outcome in self.outcomes:
            summary.add(outcome)
        summary.close_groups()
        reasons = group_failures(self.failures)
        lines = [describe_counts(self.spec, len(self.outcomes), summary)]
        lines += [reason.describe() for reason in reasons[:MAX_REASONS]]
        if len(reasons) > MAX_REASONS:
            lines.append(f"... and {len(reasons) - MAX_REASONS:,} more reasons")
        return "\n".join(lines)

    def list_notes(self) -> list[str]:
        """Return sentences about the outcomes that a person should read."""
        counts = {"did not call SUBMIT": 0, "called sys.exit before SUBMIT": 0}
        for outcome in self.outcomes if self.expects_fields else ():
            if isinstance(outcome, Result) and not (outcome.meta.submitted or outcome.meta.pruned):
                reason = "called sys.exit before SUBMIT" if outcome.meta.exited else "did not call SUBMIT"
                counts[reason] += 1
        return [
            f"{count} {'execution' if count == 1 else 'executions'} {reason}, so "
            f"{'it has' if count == 1 else 'they have'} no fields"
            for reason, count in counts.items()
            if count
        ]

    def pass_at_k(self, k: int, field: str = "passed", by: str | Sequence[str] | None = None) -> PassAtK:
        """Return the estimate of pass@k over the inputs.

        Args:
            k: The number of samples of which one must pass.
            field: The field that says whether a sample passed. Default: "passed".
            by: The variable, or the variables, that name the input of a sample. Default: all variables but `repeat`.

        Returns:
            The estimate, with an interval of 95 %.

        Raises:
            ConfigurationError: An input has fewer than k samples, or a sample lacks the field or a variable.
        """
        return pass_at_k(self.outcomes, k, field, by)

    def to_json_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the outcomes as JSON objects.

        Returns:
            An iterator with a dict for each outcome: its record in the ledger, with `best` for the best trials.
        """
        best_numbers = {result.meta.index for result in self.best_trials}
        return (describe_outcome(outcome, is_best=get_row_number(outcome) in best_numbers) for outcome in self.outcomes)

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with a row for each outcome.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        return build_data_frame(self.outcomes)

    def _repr_html_(self) -> str:
        return render_outcomes(
            self.rows_outcomes, self.best_trials, self.mark, self._list_hidden(), self.spec.is_feasible
        )

    def __str__(self) -> str:
        return align_rows(self.rows())


class SequenceOfOutcomes(Report, Sequence[Outcome]):
    """A report that is also a sequence of its outcomes, with a length, an index and iteration."""

    def __len__(self) -> int:
        return len(self.outcomes)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | Sequence[Outcome]:
        return self.outcomes[at]

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)


class TrialsReport(SequenceOfOutcomes):
    """A report on trials, which marks the best of them."""

    best: Result | MaybeNone
    objective: str | list[str] | None
    direction: Direction | list[Direction]
    pareto_front: Sequence[Result]
    space: Any
    groups: Sequence[Outcome]

    @property
    def rows_outcomes(self) -> Sequence[Outcome]:
        """The outcomes that have a row in the table: every one, or with repeats one for each group."""
        return self.groups or self.outcomes

    @property
    def best_trials(self) -> Sequence[Result]:
        """The best trial, or with several objectives the trials on the Pareto front."""
        return self.pareto_front if self.best is None else [self.best]

    @property
    def mark(self) -> str:
        """The table's note on the best trial, or on the trials of the Pareto front."""
        return PARETO_MARK if self.pareto_front else BEST_MARK

    def list_notes(self) -> list[str]:
        """Return sentences about the outcomes that a person should read."""
        trials = () if self.best_trials or not self.spec.constraints else self.rows_outcomes
        if any(isinstance(trial, Result) and not self.spec.is_feasible(trial.outputs) for trial in trials):
            note = f"{NO_FEASIBLE_TRIAL}, so none is the best: each has {' or '.join(self.spec.constraints)} above 0"
            return [*Report.list_notes(self), note]
        return Report.list_notes(self)

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
        from .search.plan import parse_objectives
        from .search.study import build_study

        objectives = parse_objectives(self.objective, self.direction)
        constraints = self.spec.constraints
        trials = self.rows_outcomes
        return build_study(trials, objectives, self.space, constraints=constraints, storage=storage, name=name)


class OutcomesReport(SequenceOfOutcomes):
    """The outcomes of a batch or of a sequence, in order. It prints as a table of variables and fields.

    Unless the job has shards it is also a list, with all that a list can do. With shards each outcome is read from the
    ledger when it is used.

    Attributes:
        results_path: The ledger's directory or location.
        spec: The noun for an execution, and the number of repeats.
    """

    results_path: str = ""
    _outcomes: Sequence[Outcome] = ()

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Every outcome, in order."""
        return self._outcomes

    @property
    def rows_outcomes(self) -> Sequence[Outcome]:
        """The outcomes that have a row in the table: every one, or with repeats one for each group."""
        return self.outcomes if self.spec.repeats is None else list(group_outcomes(self.outcomes, self.spec))

    def __str__(self) -> str:
        return align_rows(self.rows(MAX_SHOWN_ROWS))


class OutcomesList(list[Outcome], OutcomesReport):
    """The report of a job without shards, which is a list. Prefect copies it by `OutcomesList(outcomes)`."""

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Every outcome, in order."""
        return self


def report_outcomes(
    outcomes: Sequence[Outcome], results_path: str, spec: ReportSpec, *, expects_fields: bool = True
) -> OutcomesReport:
    """Return the report on outcomes. It is a list if the outcomes are in memory."""
    report = OutcomesList(outcomes) if isinstance(outcomes, list) else OutcomesReport()
    report._outcomes = () if isinstance(outcomes, list) else outcomes
    report.results_path, report.spec, report.expects_fields = results_path, spec, expects_fields
    return report
