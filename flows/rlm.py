"""The rlm flow: a question over a long context, answered by a recursive language model in a sandbox."""

import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ..blocks.storage.location import PathOrLocation
from ..sandbox.caller import name_parameter
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..sandbox.meta import QuerySummary
from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_text
from ..sandbox.queries.recursive_model import RecursionSettings
from ..sandbox.result import Outcome, Result
from ..sandbox.wire.nonfinite import restore_numbers
from ..tasks.ledger.run_record import ReportSpec
from .inputs.conversion import LongText, PathText, TurnFunction
from .inputs.host_paths import check_input_path
from .inputs.tables import Report as ProgressReport
from .parameters import CacheResults, CommandLineForm, CommonParameters, FlowParameters
from .plan import Outcomes, Plan
from .reporting.report import describe_usage
from .reports import Report

# The code asks one recursive query, which has depth 1 as in all code, and submits the answer.
ASK = "SUBMIT(answer=rlm_query(query, context=context))"
ASK_WITHOUT = "SUBMIT(answer=rlm_query(query))"
ASK_FILE = f"""
with open(context_file, encoding="utf-8", errors="replace", newline="") as file:
    context = file.read()
{ASK}
"""
ASK_VOLUME = f"context = load_from_volume(context_path, binary=False)\n{ASK}"
NOUN = "question"
UPLOADED = "context.txt"  # the sandbox path of a context that comes from a file of the host


@dataclass(frozen=True, slots=True)
class RlmAnswer(Report):
    """A recursive language model's answer. It prints as the answer alone, without commands for a terminal.

    Attributes:
        answer: The answer as text. Without an answer, the output of the last turn that printed something.
        trajectory: A dict with reasoning, code and output for each turn.
        queries: Number, tokens and cost of the queries to the model, and all queries as a tree.
        result: The flow's one outcome: a `Result`, or a `Failure` without an answer.
        results_path: The ledger's directory or location.
        answered: False if a budget, depth or time limit ended the model without an answer.
        error: Without an answer, a `CodeError` with a `type` such as "BudgetExceeded", which names the parameter to
            raise.
        value: The answer as the code submitted it: a text, or another JSON value, which `answer` has as text.
    """

    answer: str
    trajectory: list[dict[str, Any]]
    queries: QuerySummary
    result: Outcome
    results_path: str
    answered: bool = True
    error: RlmBatchError | None = None
    value: Any = None

    @classmethod
    def from_outcome(cls, outcome: Outcome, results_path: str) -> Self:
        """Return the answer that the flow's one execution gave."""
        queries = outcome.meta.queries
        root = queries.tree[0] if queries.tree else {}
        trajectory = root.get("trajectory", [])
        if isinstance(outcome, Result):
            answer = outcome["answer"]
            value = {"value": deepcopy(root.get("value", answer))}
            restore_numbers(value, root.get("nonfinite", {}))
            return cls(answer, trajectory, queries, outcome, results_path, value=value["value"])
        printed = [turn["output"] for turn in trajectory if turn.get("output") and not turn.get("failed")]
        partial_answer = printed[-1] if printed else ""
        return cls(partial_answer, trajectory, queries, outcome, results_path, answered=False, error=outcome.error)

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Return a list of the one outcome."""
        return [self.result]

    def rows(self, limit: int | None = None, *, shows_output: bool = False) -> list[list[str]]:
        """Return no table: an answer is printed as text."""
        return []

    def describe(self) -> str:
        """Return the answer, or the model's last output if there is no answer."""
        if self.answered:
            return str(self)
        return f"No answer. The model's last output:\n{self}" if self.answer else ""

    def list_notes(self) -> list[str]:
        """Return a sentence about the turns and the calls of the model."""
        calls = describe_usage(self.queries, self.queries.cached)
        return [f"{len(self.trajectory)} turns; the model was called {calls}"]

    def to_json_lines(self) -> Iterator[dict[str, Any]]:
        """Yield one object: the answer with its trajectory and its queries."""
        error = None if self.error is None else self.error.summary
        answer = {"answer": self.answer, "answered": self.answered, "error": error}
        yield {**answer, "trajectory": self.trajectory, "queries": asdict(self.queries)}

    def __str__(self) -> str:
        return escape_text(self.answer, keep=LINE_CHARACTERS)


@parameter_model(frozen=True)
class RlmParameters(CommonParameters, FlowParameters[RlmAnswer]):
    """Answer a question over a context of any length, with a recursive language model in a sandbox.

    The model does not read the context. It writes Python code that reads the context in the sandbox, and that asks
    models about parts of the context.

    Returns:
        The answer. With `on_failure="return"` it can be missing: `answered` is False, and `answer` is the last output.

    Raises:
        ConfigurationError: A parameter is wrong. Nothing has run.
        ExecutionsFailed: The model gave no answer, with `on_failure="raise"` (the default).
    """

    query: Annotated[str, Field(min_length=1, description="Question to answer."), CommandLineForm(is_argument=True)]
    language_model: Annotated[
        str,
        Field(
            description="Model to ask, such as openai/gpt-4o-mini. It is a name in LiteLLM, or a saved block "
            "(language-model/NAME)."
        ),
        CommandLineForm(is_common=True),
    ]
    context: Annotated[
        LongText, Field(description="Text that the question is about."), CommandLineForm(is_common=True)
    ] = ""
    context_file: Annotated[
        PathText | None,
        Field(description="File with the text, in UTF-8 and of any length."),
        CommandLineForm("path", is_common=True),
    ] = None
    context_volume_path: Annotated[
        PathText | None,
        Field(description="Path of the text on the provider's volume."),
        CommandLineForm(is_common=True),
    ] = None
    instructions: Annotated[
        str, Field(description="Text to add to the model's instructions."), CommandLineForm(is_common=True)
    ] = ""
    max_turns: Annotated[int, Field(ge=1, description="Turns of a recursive model, which are replies with code.")] = 20
    max_errors: Annotated[
        int | None,
        Field(ge=1, description="Failed turns in a row at which to stop; no limit by default."),
    ] = None
    _: KW_ONLY
    on_turn: Annotated[
        TurnFunction | None,
        Field(
            description="Function of the host to call when a turn of a model ends. It takes the turn's RlmEvent. If it "
            "raises an exception, the run ends with it."
        ),
        CommandLineForm("hidden"),
    ] = None
    # A conversation takes longer than an execution of plain code.
    timeout: Annotated[
        float, Field(gt=0, description="Seconds for each execution."), CommandLineForm(is_common=True)
    ] = 600
    cache_results: CacheResults = False

    flow_name = "rlm"
    summary = "Ask a recursive language model about a text of any length."
    fixed_options = {"max_workers": 1}  # noqa: RUF012

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Find the context. Raises ConfigurationError."""
        code, variables, uploads = self._find_context()
        title = self.query if len(self.query) <= 100 else self.query[:97] + "..."
        return Plan(
            options=self.make_options(),
            total=1,
            items=[(code, variables)],
            label=lambda _execution: f"rlm: {title}",
            noun="questions",
            report_spec=ReportSpec(NOUN),
            uploads=uploads,
            on_turn=self.on_turn,
            recursion=RecursionSettings(self.max_turns, self.max_errors, self.instructions),
        )

    def _find_context(self) -> tuple[str, dict[str, Any], dict[str, Path]]:
        """Return the code, its variables, and the files to upload. Raises ConfigurationError."""
        sources = [source for source in (self.context, self.context_file, self.context_volume_path) if source]
        if len(sources) > 1:
            raise ConfigurationError(
                f"the context is given twice: pass only one of {name_parameter('context')}, "
                f"{name_parameter('context_file')} and {name_parameter('context_volume_path')}"
            )
        if self.context_volume_path:
            return ASK_VOLUME, {"query": self.query, "context_path": self.context_volume_path}, {}
        if self.context_file:
            path = check_input_path(Path(self.context_file).expanduser().absolute())
            try:
                with path.open("rb") as file:
                    # The digest goes into the key, because the path does not identify the text.
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise ConfigurationError(f"the context {path} cannot be read: {error.strerror}") from None
            variables = {"query": self.query, "context_file": UPLOADED, "context_sha256": digest}
            return ASK_FILE, variables, {UPLOADED: path}
        if self.context:
            return ASK, {"query": self.query, "context": self.context}, {}
        return ASK_WITHOUT, {"query": self.query}, {}

    def build_report(self, outcomes: Outcomes) -> RlmAnswer:
        """Return the answer."""
        (outcome,) = outcomes.results
        return RlmAnswer.from_outcome(outcome, outcomes.results_path)


if TYPE_CHECKING:
    from .prefect_flow import define_flow

    rlm = define_flow(RlmParameters)
else:
    from .parameters import define_lazily

    __getattr__ = define_lazily(RlmParameters)
