"""The Python of a recursive model: a context of the sandbox, which is created again if its process ends."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CodeCrashed, CodeError, ExecutionTimeout, QueryError, StateLost, SubmitError
from .recursion import QueryContext

if TYPE_CHECKING:
    from ..interpreter import Interpreter
    from ..model_reply import Reply
    from ..result import Result
    from .answer_type import AnswerType
    from .recursion import Queries

OUTPUT_CHARACTERS = 10_000  # characters of a turn's output that the model sees and the trajectory keeps
OUTPUT_FIELDS = [{"name": "answer"}]  # one field of any type
NO_CONTEXT = QueryContext()
JSON = "__import__('json')"  # An import statement would change a name of the model's code.
NO_CODE = (
    "Your reply has no block of Python outside of its thoughts, so nothing was run. Write code in a block that begins "
    "with ```python and ends with ```. When you have the answer, call SUBMIT(answer) in it."
)
LOST_NAMES = "The process of your code ended, so its names are gone, except for `context`. Define again what you need."
WRONG_TYPE = "SUBMIT did not take this answer: {problem}. The answer has to be {type}. Call SUBMIT again."


@dataclass(frozen=True, slots=True)
class Submission:
    """The answer that a model's code submitted, as a JSON value."""

    value: Any


class ModelPython:
    """The Python of one recursive model. `begin` comes before the first turn of each question."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.history: list[dict[str, Any]] | None = None  # value of the code's variable `history`; None for no variable
        self.output = ""  # all output of the last turn, of which the turn has at most OUTPUT_CHARACTERS
        self._queries: Queries
        self._context = NO_CONTEXT
        self._name = ""  # name of the context in the sandbox
        self._has_context = False  # the process has the variable `context`
        self._known_history: list[dict[str, Any]] | None = None  # the value that the process has

    def begin(self, queries: Queries, context: QueryContext) -> bool:
        """Set the query functions and the context for a question. Return True if the context is a new one."""
        self._queries = queries
        is_new, self._context = context != self._context, context
        self._has_context = False  # Code can have changed a list or a dict.
        return is_new

    async def run_turn(self, reply: Reply, turn: dict[str, Any], answer_type: AnswerType | None) -> Submission | None:
        """Run the reply's blocks in order until one fails or submits, and record the output in the turn.

        Return the answer, or None if the code did not submit one of the type. Raises the errors of `run`.
        """
        self.output = ""
        for _, block in reply.blocks:
            output, result = await self.run(block)
            self._add_output(turn, output)
            if result is None:
                turn["failed"] = True
                break
            if result.meta.submitted:
                return self._take_answer(result["answer"], turn, answer_type)
        if not reply.blocks:
            turn["failed"] = True
        self._add_output(turn, reply.reason if reply.blocks else NO_CODE)
        return None

    def _take_answer(self, value: Any, turn: dict[str, Any], answer_type: AnswerType | None) -> Submission | None:
        try:
            if answer_type is not None:
                value = answer_type.to_jsonable(answer_type.validate(value))
        except ValueError as error:
            self._add_output(turn, WRONG_TYPE.format(problem=error, type=answer_type.describe()))  # type: ignore[union-attr]
            turn["failed"] = True
            return None
        self._add_output(turn, f"FINAL: {value!r}")
        return Submission(value)

    def _add_output(self, turn: dict[str, Any], text: str) -> None:
        self.output = "\n".join(filter(None, (self.output, text)))
        turn["output"] = shorten(self.output)

    async def run(self, code: str) -> tuple[str, Result | None]:
        """Run a block. Return the text that the model sees, and the result, or None if the code failed.

        Raises RlmBatchError if the sandbox is lost, or no time is left.
        """
        lost = ""
        try:
            await self._prepare()
            result = await self._execute(code)
        except (CodeError, SubmitError, ExecutionTimeout, StateLost) as error:
            self._queries.session.check_seconds_left()
            if isinstance(error, (CodeCrashed, StateLost)):
                await self.close()
                lost = LOST_NAMES
            printed = "" if error.meta is None else error.meta.printed
            return "\n".join(filter(None, (printed.rstrip("\n"), str(error), lost))), None
        meta = result.meta
        value = meta.value_repr if meta.value is None else repr(meta.value)
        return "\n".join(filter(None, (meta.printed.rstrip("\n"), value))), result

    async def close(self) -> None:
        """End the process. The next code starts a new one."""
        name, self._name = self._name, ""
        self._has_context, self._known_history = False, None
        if name:
            await self.interpreter.forget_context(name)

    async def _prepare(self) -> None:
        """Give the process its context and its history. The driver keeps variables for later turns."""
        if not self._name:
            self._name = f"rlm-{uuid.uuid4().hex[:12]}"
        if not self._has_context:
            await self._load_context()
            self._has_context = True
        if self.history is not self._known_history:
            await self._execute("pass", {"history": self.history})
            self._known_history = self.history

    async def _load_context(self) -> None:
        context = self._context
        try:
            if context.path:
                read = f"{JSON}.load(_file)" if context.is_json else "_file.read()"
                opened = f"open({context.path!r}, encoding='utf-8', errors='surrogatepass', newline='')"
                await self._execute(f"with {opened} as _file:\n    context = {read}\ndel _file", {"context": ""})
            elif context.shape:
                parse = f"context = {JSON}.loads(context)" if context.is_json else "pass"
                await self._execute(parse, {"context": context.text})
        except CodeError as error:  # Without the context, further turns would be wasted money.
            await self.close()
            raise QueryError(f"the context of the recursive query cannot be read: {error.summary}") from error

    async def _execute(self, code: str, variables: dict[str, Any] | None = None) -> Result:
        left = self._queries.session.check_seconds_left()
        return await self.interpreter.execute(
            code,
            variables,
            timeout=math.inf if left is None else left,
            context=self._name,
            output_fields=OUTPUT_FIELDS,
            queries=self._queries,
            index=self._queries.numbers,
            refuse_exit=True,
        )


def shorten(text: str, limit: int = OUTPUT_CHARACTERS) -> str:
    """Return the text, or its beginning and its end if it has more characters than the limit."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
