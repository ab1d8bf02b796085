"""The sequence flow: pieces of code that share one sandbox and its state, one after the other."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import PathOrLocation
from ...tasks.execution import Execution, compute_key
from ...tasks.ledger.run_record import ReportSpec
from ..inputs.conversion import Code, Items
from ..inputs.readers import check_variables
from ..inputs.spilling import read_codes
from ..inputs.tables import ProgressReport
from ..parameters import CodeParameters, CommandLineForm, FlowParameters
from ..plan import Outcomes, Plan, label_execution
from ..reports import OutcomesReport, report_outcomes

if TYPE_CHECKING:
    from ..engine.run import Run


@parameter_model(frozen=True)
class SequenceParameters(CodeParameters, FlowParameters[OutcomesReport]):
    """Run the steps in order in one sandbox.

    Later steps see the names that a step defines. The effects of a failed step remain, and with `stop_on_error=False`
    the next step continues from there. If a step ends its process or loses its sandbox, the state is lost, and all
    later steps fail with StateLost. State cannot be restored, so a retried sequence starts again with the first step,
    unless all steps have results.

    Returns:
        A list with a `Result` for each step, in order. With `on_failure="return"`, a `Failure` for each step that
        failed or did not run. The list is a report, too: see `OutcomesReport`.

    Raises:
        ConfigurationError: A parameter is wrong. Nothing has run.
        ExecutionsFailed: A step failed, with `on_failure="raise"` (the default).
    """

    steps: Annotated[
        Items[Code] | Code,
        Field(description="Pieces of Python code that share the state of one sandbox."),
        CommandLineForm("code files", "Python files, one step each; /dev/stdin is standard input.", is_argument=True),
    ]
    stop_on_error: Annotated[bool, Field(description="Skip the remaining steps after a failure.")] = True

    flow_name = "sequence"
    prefect_name = "rlm-sequence"
    fixed_options = {"max_workers": 1, "reuse_sandboxes": True, "executions_per_task": 1}  # noqa: RUF012

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read the steps and return the plan to execute them. Raises ConfigurationError."""
        codes = read_codes(self.steps)
        no_variables = ()
        check_variables(codes[0], [no_variables], self.options)  # Later steps may use names that earlier ones define.
        return Plan(
            total=len(codes),
            items=[(code, {}) for code in codes],
            execute=execute_steps,
            label=partial(label_execution, "step"),
            report_spec=ReportSpec("step"),
            runs_each_code=True,
            state_context="main",
            stop_on_failure=self.stop_on_error,
        )

    def build_report(self, outcomes: Outcomes) -> OutcomesReport:
        """Return the outcomes of the steps, in order."""
        return report_outcomes(outcomes.results, outcomes.results_path, outcomes.spec)


async def execute_steps(run: "Run") -> None:
    """Execute the steps in order, or take all of their results from the ledger."""
    fingerprint = await run.compute_fingerprint()
    executions: list[Execution] = []
    key = ""  # A step's key depends on the keys of all earlier steps, as its result does.
    for index, (code, _) in enumerate(run.plan.items):
        key = compute_key(code, {}, {}, {**fingerprint, "before": key})
        executions.append(Execution(index, code, {}, key))
    # Results of only some steps are of no use: the other steps need the state, which is not in the ledger.
    results = [run.cache.find_result(execution) for execution in executions]
    if None in results:
        results = [None] * len(executions)
    await run.executor.execute_all(iter(executions), lambda execution: results[execution.index])
    failures = run.store.failures
    if failures:
        run.skip(executions, f"step {failures[0].meta.index} failed, and this step depends on it")
