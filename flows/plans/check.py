"""The check flow: judges what the executions of an earlier run did, and runs no code of that run."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import Location, PathOrLocation
from ...sandbox.errors import CheckError, ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_to_json
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.check import Check, archive_collected, restore_ended
from ...tasks.execution import Execution, compute_key
from ...tasks.repeats import Place
from ..inputs.conversion import Code
from ..inputs.host_paths import locate_ledger
from ..inputs.tables import ProgressReport
from ..parameters import CommandLineForm, FlowParameters, LaneParameters, Summarize
from ..plan import Outcomes, Plan
from ..reporting.ledger_reader import LedgerReader, open_run_ledger
from ..reports import TrialsReport

if TYPE_CHECKING:
    from ..engine.run import Run


@parameter_model(frozen=True)
class CheckParameters(LaneParameters, FlowParameters[TrialsReport]):
    """Judge the outcomes of an earlier run with a check, in sandboxes, without running its code again.

    The check finds the same variables as the `check` of `batch`. It finds files if the run collected them. The run's
    own results stay as they are.

    Returns:
        The report: the outcomes in order, with the fields of the check. With `on_failure="return"`, a `Failure` for
        each execution that did not run to the end, and for each check that failed.

    Raises:
        ConfigurationError: There is no such run, or a parameter is wrong. Nothing has run.
        ExecutionsFailed: Some executions have no verdict, with `on_failure="raise"` (the default).
    """

    run: Annotated[
        str,
        Field(min_length=1, description="Id or name of the flow run, or the path or location of its results."),
        CommandLineForm(is_argument=True),
    ]
    check: Annotated[
        Code,
        Field(
            description="Code that judges each execution. Its fields are the result. It gets submitted, stdout, error, "
            "seconds, folder and the variables."
        ),
        CommandLineForm("code file", is_argument=True),
    ]
    summarize: Summarize = None

    flow_name = "check"
    prefect_name = "rlm-check"

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read the outcomes of the run, and return the plan to judge them. Raises ConfigurationError."""
        reader = open_run_ledger(self.run, locate_ledger)  # A worker reads nothing at a path that it does not allow.
        ledger = reader.ledger.path
        if self.options.locate_ledger(run_ledger) == ledger:
            raise ConfigurationError(f"`results_path` is the judged run's own, {ledger}: name another place")
        code = self.options.check_code
        assert code is not None
        count, total, has_files = 0, 0, False
        for outcome in reader.read_outcomes():
            count += 1
            total = (outcome.meta.index or 0) + 1
            has_files = has_files or bool(outcome.meta.collected)
        if not total:
            raise ConfigurationError(f"{ledger} has no outcomes to judge: name another run")
        if total > reader.records[-1].total + count:
            raise ConfigurationError(f"{ledger} is damaged: it has an execution with the number {total - 1:,}")
        if Check(code).needs_files and (not has_files or isinstance(ledger, Location)):
            raise ConfigurationError(
                f"the check reads `folder`, and {ledger} has no collected files on this machine: run it with `collect`"
            )
        return Plan(
            total=total,
            execute=partial(execute_checks, reader, Check(code)),
            report_spec=reader.records[-1].report_spec,
            may_stop_early=True,  # An interrupted run has fewer outcomes.
            judged_run=str(ledger),
        )

    def build_report(self, outcomes: Outcomes) -> TrialsReport:
        """Return the outcomes with the fields of the check, in order."""
        results, reduction = outcomes.split()
        report = TrialsReport(results, outcomes.results_path, outcomes.spec)
        report.reduction = reduction
        return report


async def execute_checks(reader: LedgerReader, check: Check, run: "Run") -> None:
    """Judge the outcomes of the reader's ledger."""
    fingerprint = await run.compute_fingerprint()
    await run.executor.execute_all(_build_executions(reader, check, fingerprint, run), run.cache.find_result)


def _build_executions(
    reader: LedgerReader, check: Check, fingerprint: dict[str, Any], run: "Run"
) -> Iterator[Execution]:
    """Yield an execution for each outcome that waits for its check. Record the failures that no check judges."""
    for outcome in reader.read_outcomes():
        meta = outcome.meta
        execution = Execution(
            meta.index or 0, "", meta.variables, "", place=Place(meta.group, meta.repeat), ended_earlier=True
        )
        try:
            ended = restore_ended(outcome)
            if ended is not None and check.needs_files:
                execution.archive = archive_collected(reader.ledger.path, ended.meta)  # type: ignore[arg-type]
                execution.archive_problems = ended.meta.not_collected
        except (OSError, ValueError) as error:
            outcome, ended = Failure(CheckError(f"the collected files cannot be read: {error}"), meta), None
        if ended is None:
            run.sink.record(execution, _build_failure(outcome))
            continue
        # The meta has the number of the execution, which tells equal outcomes apart.
        execution.key = compute_key("", {"outcome": outcome_to_json(ended)}, {}, fingerprint)
        execution.ended = ended
        yield execution


def _build_failure(outcome: Outcome) -> Failure:
    """Return the failure of an execution that no check judges. A result is never one, because no check has run."""
    if isinstance(outcome, Result):
        text = "there is nothing to judge: the execution was pruned, or its line in the ledger is damaged"
        return Failure(CheckError(text), outcome.meta)
    return outcome
