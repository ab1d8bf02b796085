"""DSPy's `CodeInterpreter` protocol on top of rlm-batch's interpreters. Importing this module imports DSPy."""

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Self

from ..sandbox.errors import (
    CodeCrashed,
    CodeError,
    CodeSyntaxError,
    ConfigurationError,
    ExecutionTimeout,
    RlmBatchError,
    SubmitError,
)
from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_text
from ..sandbox.result import Result
from ..sandbox.sync_interpreter import SyncInterpreter
from ..sandbox.wire.names import QUERY_NAMES
from .language_model.litellm_client import INSTALL_HINT, prepare_litellm_import

try:
    from dspy.primitives.code_interpreter import CodeExecutionError, CodeInterpreterError, FinalOutput
    from dspy.utils.callback import BaseCallback, with_callbacks

    from .language_model.dspy_values import convert_returned, convert_variables
except ImportError as error:
    raise ConfigurationError(INSTALL_HINT) from error

FACADE = ("__dspy_construct__", "__dspy_call__")  # The tools of DSPy's own sub-agents.
FACADE_TOKEN = "__dspy_host_token"  # DSPy passes this variable to the code that installs these tools.
REFUSED = (
    "dspy is not offered in this sandbox, because what it asks goes around the budget and the depth: use "
    "llm_query, llm_query_batched, rlm_query and rlm_query_batched"
)

ToolDict = dict[str, Callable[..., Any]]
OutputFields = list[dict[str, Any]] | None
# A function that runs code with variables and tools in its sandbox, and raises what `Interpreter.execute` raises.
Run = Callable[[str, dict[str, Any], ToolDict, OutputFields], Result]


class DSPyInterpreter:
    """An interpreter with DSPy's protocol: `tools`, `output_fields`, `start`, `execute` and `shutdown`.

    With `asks`, rlm-batch answers the queries of code. DSPy's own `llm_query`, `llm_query_batched` and sub-agents are
    then refused, because they would bypass rlm-batch's budget and depth.
    """

    def __init__(self, run: Run, start: Callable[[], object], shutdown: Callable[[], None], *, asks: bool) -> None:
        self.tools: ToolDict = {}
        self.callbacks: list[BaseCallback] = []
        self.output_fields: OutputFields = None
        self._run = run
        self._start = start
        self._shutdown = shutdown
        self._asks = asks
        self._ended = False

    @with_callbacks
    def start(self) -> None:
        """Open the sandbox, if it is not open. Raises DSPy's CodeInterpreterError."""
        if self._ended:
            raise CodeInterpreterError("this interpreter was shut down: create a new one")
        try:
            self._start()
        except RlmBatchError as error:
            raise CodeInterpreterError(str(error)) from error

    @with_callbacks
    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run code and return a FinalOutput, the last expression's value, the printed text, or None.

        Variables and the results of tools are converted to JSON as DSPy's own interpreters do. A tool's error is a
        RuntimeError in the code. Code that calls exit() fails, but later code still sees the names that it defined.

        Raises:
            SyntaxError: The code is not valid Python.
            CodeExecutionError: The code failed; it is DSPy's class.
            CodeInterpreterError: No change of the code can help; it is DSPy's class.
        """
        variables = convert_variables({} if variables is None else variables)
        if self._asks and FACADE_TOKEN in variables:
            raise CodeExecutionError(REFUSED)
        self.start()
        context = contextvars.copy_context()  # It has DSPy's settings, which tools read in any thread.
        refused = (*QUERY_NAMES, *FACADE) if self._asks else ()  # DSPy adds its own tools before each call.
        tools = {name: self._wrap_tool(name, context) for name in self.tools if name not in refused}
        # DSPy converts the values to the fields' types itself, such as '42' to 42.
        fields = None if self.output_fields is None else [{"name": field["name"]} for field in self.output_fields]
        try:
            result = self._run(code, variables, tools, fields)
        except CodeSyntaxError as error:
            raise SyntaxError(f"Invalid Python syntax: {error}") from error
        except (CodeError, SubmitError, ExecutionTimeout) as error:
            raise CodeExecutionError(_with_output(error)) from error
        except RlmBatchError as error:
            raise CodeInterpreterError(str(error)) from error
        if result.meta.submitted:
            return FinalOutput(result.outputs)
        if result.meta.value is not None:
            return result.meta.value
        return result.meta.value_repr or (result.meta.stdout + result.meta.stderr) or None

    __call__ = execute

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @with_callbacks
    def shutdown(self) -> None:
        """Shut the interpreter down. It cannot be started again."""
        if not self._ended:
            self._ended = True
            self._shutdown()

    @with_callbacks
    def invoke_tool(self, tool_name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return a tool's result as JSON, or the awaitable that it returned. Raises RuntimeError if the tool fails."""
        try:
            tool = self.tools[tool_name]
            args, kwargs = _bind(tool, args, kwargs)
            returned = tool(*args, **kwargs)
            return returned if inspect.isawaitable(returned) else convert_returned(returned)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _wrap_tool(self, name: str, context: contextvars.Context) -> Callable[..., Any]:
        """Return a function that calls the tool in that context, as `invoke_tool` does."""

        def call(*args: Any, **kwargs: Any) -> Any:
            returned = context.copy().run(self.invoke_tool, name, list(args), kwargs)
            return finish(returned) if inspect.isawaitable(returned) else returned

        async def finish(returned: Awaitable[Any]) -> Any:
            # Await in a task with that context, so that the awaited part of the tool has the context too.
            return await asyncio.get_running_loop().create_task(_finish_call(returned), context=context.copy())

        return call


def _bind(tool: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments as the tool takes them. Raises TypeError for arguments that do not fit.

    `dspy.RLM` wraps a tool in a function that takes keywords alone, and has the tool's parameters as its signature.
    """
    if not args or not hasattr(tool, "__signature__"):
        return args, kwargs
    signature = inspect.signature(tool)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.name not in named:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            return args, kwargs
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name)
    return (), named


async def _finish_call(returned: Awaitable[Any]) -> Any:
    try:
        return convert_returned(await returned)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _with_output(error: RlmBatchError) -> str:
    """Return the text that the code printed, followed by the error."""
    text = f"{error.type}: {error}" if isinstance(error, CodeCrashed) and error.type else str(error)
    printed = escape_text(error.meta.stdout if error.meta is not None else "", keep=LINE_CHARACTERS)
    return f"{printed.rstrip()}\n{text}" if printed.strip() else text


class InterpreterFactory:
    """A factory for `dspy.RLM`'s `interpreter_factory`: each call returns an interpreter with a new sandbox.

    If the interpreter has a `language_model`, that model answers the queries of code, within the interpreter's limits.
    Otherwise code uses DSPy's own `llm_query` and sub-agents.

    Args:
        interpreter: Creates an interpreter, such as `lambda: LocalInterpreter(timeout=60)`, or an interpreter class.

    Example:
        >>> import dspy
        >>> from rlm_batch import InterpreterFactory, LocalInterpreter
        >>> rlm = dspy.RLM("context, query -> answer", interpreter_factory=InterpreterFactory(LocalInterpreter))
    """

    execution_instructions = (
        "Code runs as Python 3 in a sandbox; names persist from step to step. Host tools and SUBMIT are global "
        "functions, and may be called from threads."
    )

    def __init__(self, interpreter: Callable[[], SyncInterpreter]) -> None:
        prepare_litellm_import()
        self._make_interpreter = interpreter

    def __call__(self) -> DSPyInterpreter:
        ours = self._make_interpreter()
        ours.share_query_limits()

        def run(code: str, variables: dict[str, Any], tools: ToolDict, output_fields: OutputFields) -> Result:
            ours.tools.clear()
            ours.tools.update(tools)
            return ours.execute(code, variables, output_fields=output_fields, refuse_exit=True)

        return DSPyInterpreter(run, ours.start, ours.shutdown, asks=ours.can_query)
