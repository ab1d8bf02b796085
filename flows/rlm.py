"""The rlm flow: a question over a long context, answered by a recursive language model in a sandbox."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, Unpack

from pydantic import Field

from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..sandbox.meta import QuerySummary
from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_text
from ..sandbox.result import Outcome, Result
from ..tasks.ledger.run_record import ReportSpec
from .decorator import batch_flow
from .engine.failures import raise_failures
from .engine.job import execute_items
from .inputs.conversion import PathText
from .inputs.host_paths import check_input_path
from .parameters import Options, RlmParameters

# Its queries begin at depth 1, as those of any code do: the answer is that of one recursive query.
ASK = "SUBMIT(answer=rlm_query(query, context=context))"
ASK_WITHOUT = "SUBMIT(answer=rlm_query(query))"
ASK_FILE = f"""
with open(context_file, encoding="utf-8", errors="replace", newline="") as file:
    context = file.read()
{ASK}
"""
ASK_VOLUME = f"context = load_from_volume(context_path, binary=False)\n{ASK}"
UPLOADED = "context.txt"  # where the code finds a context that came from the host


@dataclass(frozen=True, slots=True)
class RlmAnswer:
    """A recursive language model's answer. Printed, it is the answer alone, as a terminal can show it.

    `trajectory` has a dict for each of its turns: reasoning, code and output. `queries` counts what was asked of the
    model, with tokens and cost, and has all queries as a tree. Where the model came to no answer, out of budget, depth
    or time, `answered` is False, `error` says why and which parameter to raise (a CodeError, whose `type` is such as
    "BudgetExceeded"), and `answer` is what the last of its turns that printed something printed: the best that was paid
    for. `result` is a Failure then.
    """

    answer: str
    trajectory: list[dict[str, Any]]
    queries: QuerySummary
    result: Outcome
    results_path: str
    answered: bool = True
    error: RlmBatchError | None = None

    @classmethod
    def from_outcome(cls, outcome: Outcome, results_path: str) -> Self:
        """What an execution of this flow's has come to."""
        queries = outcome.meta.queries
        trajectory = queries.tree[0].get("trajectory", []) if queries.tree else []
        if isinstance(outcome, Result):
            return cls(outcome["answer"], trajectory, queries, outcome, results_path)
        printed = [turn["output"] for turn in trajectory if turn.get("output") and not turn.get("failed")]
        partial = printed[-1] if printed else ""
        return cls(partial, trajectory, queries, outcome, results_path, answered=False, error=outcome.error)

    def __str__(self) -> str:
        return escape_text(self.answer, keep=LINE_CHARACTERS)


@batch_flow("rlm")
async def rlm(
    query: Annotated[str, Field(min_length=1, description="The question")],
    language_model: Annotated[
        str, Field(description="A model in LiteLLM's naming, or a saved block such as language-model/NAME")
    ],
    context: Annotated[str, Field(description="The text that the question is about")] = "",
    context_file: Annotated[PathText | None, Field(description="A file that has it instead")] = None,
    context_volume_path: Annotated[
        PathText | None, Field(description="Its path on the provider's volume instead")
    ] = None,
    **parameters: Unpack[RlmParameters],
) -> RlmAnswer:
    """Answers a question over a context of any length, with a recursive language model in a sandbox.

    The model does not read the context: it writes Python that does, in the sandbox, and that asks models about parts
    of it. docs/reference.md says what the parameters mean.

    Raises ExecutionsFailed where there is no answer (with `on_failure="return"` the RlmAnswer has the best that there
    is, and `answered` is False), and ConfigurationError before anything runs.
    """
    code, variables, uploads = question(query, context, context_file, context_volume_path)  # type: ignore[arg-type]  # text by now
    options = Options.from_parameters(parameters, max_workers=1, language_model=language_model)
    title = query if len(query) <= 100 else query[:97] + "..."
    outcomes = await execute_items(
        [(code, variables)],
        total=1,
        options=options,
        label=lambda _: f"rlm: {title}",
        uploads=uploads,
        report_spec=ReportSpec("question"),
        is_recursive=True,
    )
    if options.on_failure == "raise":
        raise_failures(outcomes, "questions")
    (outcome,) = outcomes.results
    return RlmAnswer.from_outcome(outcome, outcomes.results_path)


def question(
    query: str, context: str, context_file: str | None, context_volume_path: str | None
) -> tuple[str, dict[str, Any], dict[str, Path]]:
    """The code, its variables, and the files that it finds. Raises ConfigurationError."""
    given = [name for name in (context, context_file, context_volume_path) if name]
    if len(given) > 1:
        raise ConfigurationError(
            "the context was given twice: pass one of context, context_file and context_volume_path"
        )
    if context_volume_path:
        return ASK_VOLUME, {"query": query, "context_path": context_volume_path}, {}
    if context_file:
        path = check_input_path(Path(context_file).expanduser().absolute())
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # for the key: the path says nothing
        except OSError as error:
            raise ConfigurationError(f"the context {path} cannot be read: {error.strerror}") from None
        return ASK_FILE, {"query": query, "context_file": UPLOADED, "context_sha256": digest}, {UPLOADED: path}
    if context:
        return ASK, {"query": query, "context": context}, {}
    return ASK_WITHOUT, {"query": query}, {}
