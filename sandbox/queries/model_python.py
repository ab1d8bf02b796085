"""The Python of a recursive model: a process in the sandbox, which is started again after its end."""

from __future__ import annotations

import inspect
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CodeCrashed, CodeError, ExecutionTimeout, QueryError, StateLost, SubmitError
from ..requests import tool_docs
from ..requests.execution_request import WorkTime
from ..requests.function_code import PROVIDED_NAMES
from .records import SHORT_CHARACTERS, shorten
from .recursion import QueryContext

if TYPE_CHECKING:
    from ..interpreter import Interpreter
    from ..model_reply import Reply
    from ..result import Result
    from .answer_type import AnswerType
    from .recursion import Queries

OUTPUT_CHARACTERS = SHORT_CHARACTERS  # characters of a turn's output that the model sees and the trajectory keeps
OUTPUT_FIELDS = [{"name": "answer"}]  # one field of any type
NO_CONTEXT = QueryContext()
JSON = "__import__('json')"  # An import statement would change a name of the model's code.
NO_CODE = (
    "Your reply has no block of Python outside of its thoughts, so nothing was run. Write code in a block that begins "
    "with ```python and ends with ```. When you have the answer, call SUBMIT(answer) in it."
)
LOST_NAMES = "The process of your code ended, so its names are gone, except for `context`. Define again what you need."
KEPT_NAMES = "The names that your code defined before are kept."
MAX_PREPARED_NAMES = 100  # names of `prepare` that the model sees; `from module import *` may define more
# Code that describes each name of `prepare`: its type, or the signature and the purpose of a function or a class.
LIST_NAMES = """
_found = [(name, value) for name, value in globals().items() if name[0] != "_" and name not in _known_names]
{describe_tool}
SUBMIT([describe_tool(name, value, hides_defaults=False).partition("\\n")[0] for name, value in _found])
"""
WRONG_TYPE = "SUBMIT did not take this answer: {problem}. The answer has to be {type}. Call SUBMIT again."


@dataclass(frozen=True, slots=True)
class Submission:
    """The answer that a model's code submitted, as a JSON value."""

    value: Any


class ModelPython:
    """The Python of one recursive model. `begin` must be called before the first turn of each question."""

    _queries: Queries  # set by `begin`

    def __init__(self, interpreter: Interpreter, turn_timeout: float | None = None) -> None:
        self.interpreter = interpreter
        self._turn_timeout = turn_timeout  # seconds that the code of a turn may work
        self.history: list[dict[str, Any]] | None = None  # value of the code's variable `history`; None for no variable
        self.output = ""  # all output of the last turn, of which the trajectory has at most OUTPUT_CHARACTERS
        self.prepared_names: list[str] = []  # descriptions of the names that `prepare` defined
        self._context = NO_CONTEXT  # value of the code's variable `context`
        self._process: str | None = None  # the process's name in the sandbox; None before it starts
        self._has_context = False  # True if the process has the variable `context`
        self._loaded_history: list[dict[str, Any]] | None = None  # the value of `history` in the process

    async def begin(self, queries: Queries, context: QueryContext) -> bool:
        """Set the query functions and the context for a question. Return True if the context is a new one."""
        is_new_context = context != self._context
        self._queries, self._context = queries, context
        self._has_context = False  # Code can have changed a list or a dict.
        if self.interpreter.preparation is not None and not self.prepared_names:
            self.prepared_names = await self._list_prepared_names()
        return is_new_context

    async def _list_prepared_names(self) -> list[str]:
        known_names = [*PROVIDED_NAMES, *self.interpreter.tools]
        try:
            result = await self.interpreter.execute(
                LIST_NAMES.replace("{describe_tool}", inspect.getsource(tool_docs)),
                {"_known_names": known_names},
                timeout=self._queries.session.check_seconds_left(),
                index=self._queries.numbers,
            )
        except (CodeError, SubmitError):  # A value of `prepare` cannot be described.
            return []
        return list(result["output"])[:MAX_PREPARED_NAMES]

    async def run_turn(self, reply: Reply, turn: dict[str, Any], answer_type: AnswerType | None) -> Submission | None:
        """Run the reply's blocks in order until one fails or submits, and record the output in the turn.

        Returns:
            The answer, or None if the code submitted none, or one of a wrong type.

        Raises:
            QueryError: The process cannot read the context.
            DeadlineExceeded: No time is left.
            SandboxLost: The sandbox is lost.
        """
        self.output = ""
        if not reply.blocks:
            turn["failed"] = True
            self._add_output(turn, NO_CODE)
            return None
        work_time = None if self._turn_timeout is None else WorkTime(self._turn_timeout)
        for _, code in reply.blocks:
            result = await self._run_block(code, turn, work_time)
            if result is None:
                break
            if result.meta.submitted:
                return self._check_answer(result["answer"], turn, answer_type)
        self._add_output(turn, reply.reason)  # why later blocks of the reply were not run
        return None

    async def _run_block(self, code: str, turn: dict[str, Any], work_time: WorkTime | None) -> Result | None:
        """Run a block, and record in the turn what the model sees. Return None if the code failed."""
        try:
            await self._prepare()
            result = await self._execute(code, work_time=work_time)
        except (CodeError, SubmitError, ExecutionTimeout, StateLost) as error:
            self._queries.session.check_seconds_left()
            turn["failed"] = True
            if error.meta is not None:
                self._add_output(turn, error.meta.printed.rstrip("\n"))
            self._add_output(turn, str(error))
            if isinstance(error, (CodeCrashed, StateLost)):
                await self.close()
                self._add_output(turn, LOST_NAMES)
            elif isinstance(error, ExecutionTimeout):
                self._add_output(turn, KEPT_NAMES)
            return None
        meta = result.meta
        self._add_output(turn, meta.printed.rstrip("\n"))
        self._add_output(turn, meta.value_repr if meta.value is None else repr(meta.value))
        return result

    def _check_answer(self, value: Any, turn: dict[str, Any], answer_type: AnswerType | None) -> Submission | None:
        """Return the answer as JSON. If it has a wrong type, tell the model why and return None."""
        if answer_type is not None:
            try:
                value = answer_type.to_jsonable(answer_type.validate(value))
            except ValueError as error:
                self._add_output(turn, WRONG_TYPE.format(problem=error, type=answer_type.describe()))
                turn["failed"] = True
                return None
        self._add_output(turn, f"FINAL: {value!r}")
        return Submission(value)

    def _add_output(self, turn: dict[str, Any], text: str | None) -> None:
        self.output = join_texts("\n", self.output, text)
        turn["output"] = shorten(self.output)

    async def close(self) -> None:
        """End the process. The next code starts a new one."""
        process, self._process = self._process, None
        self._has_context, self._loaded_history = False, None
        if process is not None:
            await self.interpreter.forget_context(process)

    async def _prepare(self) -> None:
        """Give the process its context and its history. The driver keeps variables for later turns."""
        if self._process is None:
            self._process = f"rlm-{uuid.uuid4().hex[:12]}"
        if not self._has_context:
            await self._load_context()
            self._has_context = True
        if self.history is not self._loaded_history:
            await self._execute("pass", {"history": self.history})
            self._loaded_history = self.history

    async def _load_context(self) -> None:
        """Set the variable `context`, from a text or from a file in the sandbox. Raises QueryError."""
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

    async def _execute(
        self, code: str, variables: dict[str, Any] | None = None, *, work_time: WorkTime | None = None
    ) -> Result:
        return await self.interpreter.execute(
            code,
            variables,
            timeout=self._queries.session.check_seconds_left(),
            work_time=work_time,
            context=self._process,
            output_fields=OUTPUT_FIELDS,
            queries=self._queries,
            index=self._queries.numbers,
            refuse_exit=True,
        )


def join_texts(separator: str, *texts: str | None) -> str:
    """Join the texts that are not empty."""
    return separator.join(text for text in texts if text)
