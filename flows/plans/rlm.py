"""The rlm flow: questions over long contexts, each answered by a recursive language model in a sandbox."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.queries.answer_type import AnswerType
from ...sandbox.queries.recursive_model import RecursionSettings
from ...tasks.execution import Execution, Upload
from ...tasks.host_tools import check_tool_name
from ...tasks.ledger.run_record import ReportSpec
from ..inputs.contexts import CONTEXT_COLUMNS, ContextReader, find_context
from ..inputs.conversion import AnswerTypeText, ContextValue, Items, ModelText, PathText, TurnFunction, Variables
from ..inputs.readers import Inputs as InputRows
from ..inputs.readers import read_inputs, read_lines
from ..inputs.spilling import read_spilled_parameters
from ..inputs.tables import ProgressReport
from ..parameters import CommandLineForm, CommonParameters, FlowParameters, LaneParameters, Types
from ..plan import Item, Outcomes, Plan
from ..rlm_answers import RlmAnswer, RlmAnswers

NOUN = "question"
PATH_TYPES: dict[str, Any] = {"context_file": (str, list), "context_volume_path": str}  # types of a row's columns


@dataclass(frozen=True, slots=True)
class QuestionRows:
    """The questions of rows, as code with its variables. They can be read again if Prefect retries the flow run.

    `shared` has the parameters of a context, which rows without their own have.
    """

    rows: Iterable[Mapping[str, Any]]
    shared: dict[str, Any]
    reader: ContextReader

    def __iter__(self) -> Iterator[Item]:
        for number, row in enumerate(self.rows, 1):
            query = row.get("query")
            if not isinstance(query, str) or not query.strip():
                raise ConfigurationError(f"question {number} is not a text: give each row a text as its query")
            context = find_context(row)
            for name, types in PATH_TYPES.items():
                if name in context and not isinstance(context[name], types):
                    raise ConfigurationError(f"question {number} has {name} {context[name]!r}: give a path")
            code, variables = self.reader.read(query, context or find_context(self.shared))
            other_columns = {name: value for name, value in row.items() if name not in ("query", *CONTEXT_COLUMNS)}
            yield code, {**other_columns, **variables}


@parameter_model(frozen=True, kw_only=True)
class RlmOptions(CommonParameters, LaneParameters):
    """The parameters of one question and of many."""

    context_file: Annotated[
        list[PathText] | PathText | None,
        Field(description="File with the context, in UTF-8 and of any length. Several are a dict of texts by name."),
        CommandLineForm("paths"),
    ] = None
    context_volume_path: Annotated[
        PathText | None,
        Field(description="Path of the context on the provider's volume."),
    ] = None
    instructions: Annotated[str, Field(description="Text to add to the model's instructions.")] = ""
    system_prompt: Annotated[str, Field(description="Text in the place of the model's built-in instructions.")] = ""
    output_type: Annotated[
        AnswerTypeText | None,
        Field(
            description="JSON schema of an answer. Python callers may pass a type, such as int, list[str] or a "
            "pydantic model."
        ),
        CommandLineForm("output type"),
    ] = None
    max_turns: Annotated[int, Field(ge=1, description="Turns of a recursive model, which are replies with code.")] = 20
    max_errors: Annotated[
        int | None,
        Field(ge=1, description="Failed turns in a row at which to stop; no limit by default."),
    ] = None
    on_depth: Annotated[
        Literal["error", "plain"],
        Field(description="Refuse a recursive query beyond max_depth, or ask the model once without code."),
    ] = "error"
    compact_tokens: Annotated[
        int | None,
        Field(ge=1, description="Tokens of a prompt from which earlier turns are summarized; never by default."),
    ] = None
    turn_timeout: Annotated[
        float | None,
        Field(
            gt=0,
            description="Seconds that the code of a turn may work; none for no limit. Seconds in which it waits for "
            "queries and tools do not count. Code that takes longer is interrupted, and its names are kept.",
        ),
    ] = 60
    on_turn: Annotated[
        TurnFunction | None,
        Field(
            description="Function of the host to call when a turn of a model ends. It takes the turn's RlmEvent. If it "
            "raises an exception, the run ends with it."
        ),
        CommandLineForm("hidden"),
    ] = None
    # A conversation takes longer than an execution of plain code.
    timeout: Annotated[float, Field(gt=0, description="Seconds for each question.")] = 600
    # Questions share a sandbox, so that it gets a context once.
    reuse_sandboxes: Annotated[
        bool, Field(description="Answer several questions in each sandbox. Each has a separate process.")
    ] = True


Query = Annotated[str | None, Field(min_length=1, description="Question to answer."), CommandLineForm(is_argument=True)]
Model = Annotated[
    ModelText,
    Field(
        description="Model to ask, such as openai/gpt-4o-mini. It is a name in LiteLLM, or a saved block "
        "(rlm-language-model/NAME)."
    ),
]
Context = Annotated[
    ContextValue,
    Field(description="Text that the question is about, or a list or dict."),
    CommandLineForm("text"),
]
Queries = Annotated[
    Items[str] | PathText | None,
    Field(description="Questions to answer, or the path of a file with one in each line."),
    CommandLineForm("path"),
]
Inputs = Annotated[
    Items[Variables] | PathText | None,
    Field(
        description="Rows with a query, and a context, context_file or context_volume_path of their own; or a path to "
        "JSON, CSV or Parquet. Other columns are in the results."
    ),
    CommandLineForm("path"),
]


@parameter_model(frozen=True)
class RlmParameters(RlmOptions, FlowParameters[RlmAnswer | RlmAnswers]):
    """Answer questions over contexts of any length, with a recursive language model in a sandbox.

    The model does not read the context. It writes Python code that reads the context in the sandbox, and that asks
    models about parts of the context. Pass one `query`, or many as `queries` or `inputs`.

    Returns:
        An `RlmAnswer` for one query, and `RlmAnswers` for many. With `on_failure="return"` an answer can be missing:
        `answered` is False, and `answer` is the last output.

    Raises:
        ConfigurationError: A parameter is wrong. Nothing has run.
        ExecutionsFailed: The model gave no answer to a question, with `on_failure="raise"` (the default).
    """

    query: Query = None
    language_model: Model = ""
    context: Context = ""
    _: KW_ONLY
    queries: Queries = None
    inputs: Inputs = None
    types: Types = None

    flow_name = "rlm"
    prefect_name = "rlm-query"
    one_of = ("query", "queries", "inputs")
    needs = {"types": "inputs"}  # noqa: RUF012

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Convert and check the parameters. A path as `context` becomes `context_file`, and a type its JSON."""
        values = read_spilled_parameters(values)
        context = values.get("context")
        items: list[Any] = context if isinstance(context, list) else [context]  # type: ignore[reportUnknownVariableType]
        has_paths = bool(items) and all(isinstance(item, PurePath) for item in items)
        if has_paths and not values.get("context_file"):
            values |= {"context": "", "context_file": context}
        files = values.get("context_file")
        if isinstance(files, Sequence) and not isinstance(files, str):
            values["context_file"] = [str(file) for file in files]  # type: ignore[reportUnknownVariableType]
        answer_type: AnswerType | None = None
        if values.get("output_type") is not None:
            answer_type = AnswerType.read(values["output_type"])
            values["output_type"] = answer_type.schema
        parameters = super().parse(values)
        for name in parameters.tools or ():
            check_tool_name(name, taken=("query", "context"))  # variables of the code that asks the questions
        # JSON has only the schema of a class. In this process answers become instances of it.
        object.__setattr__(parameters, "_answer_type", answer_type)
        return parameters

    @property
    def answer_type(self) -> AnswerType | None:
        """Return the type of the answers, or None. Raises ConfigurationError."""
        parsed_type = vars(self).get("_answer_type")
        if parsed_type is None and self.output_type is not None:
            return AnswerType.read(self.output_type)
        return parsed_type

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read the questions and their contexts, and return the plan to ask them. Raises ConfigurationError."""
        if not self.language_model:
            raise ConfigurationError("`language_model` is missing: name a model, such as openai/gpt-4o-mini")
        reader = ContextReader()
        rows = self._read_questions()
        shared = {name: getattr(self, name) for name in CONTEXT_COLUMNS}
        items = QuestionRows(rows, shared, reader)
        for _ in items:  # Check each row, and find each file, before anything runs.
            pass

        def find_uploads(execution: Execution) -> Mapping[str, Upload]:
            return {path: Upload(file) for path, file in reader.files.get(execution.code, {}).items()}

        def label(execution: Execution) -> str:
            query = execution.variables["query"]
            if len(query) > 100:
                query = query[:97] + "..."
            return f"rlm: {query}" if self.query is not None else f"rlm {execution.index}: {query}"

        return Plan(
            total=len(rows),
            items=items,
            label=label,
            report_spec=ReportSpec(NOUN),
            find_uploads=find_uploads,
            on_turn=self.on_turn,
            recursion=RecursionSettings(**{item.name: getattr(self, item.name) for item in fields(RecursionSettings)}),
        )

    def _read_questions(self) -> InputRows:
        """Return rows with a query and perhaps a context. Raises ConfigurationError."""
        if self.inputs is not None:
            return read_inputs(self.inputs, self.types, texts=("query", *CONTEXT_COLUMNS))
        queries: Any = [self.query] if self.query is not None else self.queries
        if isinstance(queries, str):
            queries = read_lines(queries)
        if not queries:
            raise ConfigurationError("`queries` is empty: give at least one question")
        return [{"query": query} for query in queries]

    def build_report(self, outcomes: Outcomes) -> RlmAnswer | RlmAnswers:
        """Return the answer to one query, or the answers to many."""
        if self.query is None:
            return RlmAnswers.from_outcomes(outcomes.results, outcomes.results_path, self.answer_type)
        (outcome,) = outcomes.results
        return RlmAnswer.from_outcome(outcome, outcomes.results_path, self.answer_type)
