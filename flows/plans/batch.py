"""The batch flow: many pieces of code, or one piece over many inputs, each in a sandbox."""

from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.run_record import ReportSpec
from ..inputs.conversion import Code, Items, PathText, Variables
from ..inputs.file_patterns import MatchedFiles, is_pattern
from ..inputs.readers import Inputs, check_variables, read_inputs, refuse_types
from ..inputs.spilling import read_codes
from ..inputs.tables import ProgressReport
from ..parameters import CommandLineForm, FlowParameters, Options, RepeatCount, Summarize, Types
from ..plan import CodeForEach, Outcomes, Plan, plan_items
from ..reports import OutcomesReport, report_outcomes


@parameter_model(frozen=True)
class BatchParameters(Options, FlowParameters[OutcomesReport]):
    """Run each piece of code in a sandbox.

    `code` is a list of texts, or one text that runs once for each item of `inputs`. Python callers may pass a function
    instead of a text: its source is sent, its parameters are the variables, and its return value is submitted.

    Returns:
        A list with a `Result` for each execution, in order. With `on_failure="return"`, a `Failure` for each that
        failed. With `repeats`, the results of one input follow each other. The list is a report, too: see
        `OutcomesReport`.

    Raises:
        ConfigurationError: A parameter is wrong. Nothing has run.
        ExecutionsFailed: All executions have ended and some failed, with `on_failure="raise"` (the default).
    """

    code: Annotated[
        Items[Code] | Code,
        Field(description="Pieces of Python code, or one piece with inputs."),
        CommandLineForm(
            "code files",
            "Python files, one execution each, or one file with --inputs; /dev/stdin is standard input.",
            is_argument=True,
        ),
    ]
    inputs: Annotated[
        Items[Variables] | PathText | None,
        Field(
            description="Variables of each execution of one piece of code, or a path to JSON, CSV or Parquet. A "
            "pattern such as csv/*.csv gives an execution for each file, with the variable path."
        ),
        CommandLineForm("path"),
    ] = None
    types: Types = None
    repeats: RepeatCount = None
    summarize: Summarize = None

    flow_name = "batch"
    prefect_name = "rlm-batch"
    needs = {"types": "inputs"}  # noqa: RUF012

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read the inputs, check them with the code, and return the plan to execute them. Raises ConfigurationError."""
        codes = read_codes(self.code)
        if self.inputs is not None:
            if isinstance(self.code, list) or len(codes) > 1:
                raise ConfigurationError("`inputs` needs one piece of code, and there is a list")
            return self._plan_inputs(codes[0], report)
        for code in codes:
            check_variables(code, [()], self.options, self.repeats)
        spec = ReportSpec().with_repeats(self.repeats, len(codes))
        return plan_items([(code, {}) for code in codes], len(codes), spec, runs_each_code=True)

    def _plan_inputs(self, code: str, report: ProgressReport | None) -> Plan:
        """Return the plan to execute one piece of code with each of the inputs."""
        inputs: Inputs
        file_settings: dict[str, Any] = {}
        source: Any = self.inputs
        if isinstance(source, str) and is_pattern(source):
            refuse_types(self.types)
            if self.shards is not None:
                raise ConfigurationError(
                    "`inputs` is a pattern of files of this machine, and shards run on others: put "
                    "the files on a volume and pass their paths"
                )
            inputs = MatchedFiles(source, report)
            file_settings = {"find_uploads": inputs.find_uploads, "digests": inputs.digests}
        else:
            inputs = read_inputs(source, self.types)
        check_variables(code, inputs, self.options, self.repeats)
        spec = ReportSpec().with_repeats(self.repeats, len(inputs))
        return plan_items(CodeForEach(code, inputs), len(inputs), spec, **file_settings)

    def build_report(self, outcomes: Outcomes) -> OutcomesReport:
        """Return the outcomes, in order."""
        results, reduction = outcomes.split()
        report = report_outcomes(results, outcomes.results_path, outcomes.spec)
        report.reduction = reduction
        return report
