"""DSPy's `CodeInterpreter` protocol on top of rlm-batch's interpreters. Importing this module imports DSPy."""

import asyncio
import contextvars
import inspect
import keyword
from collections.abc import Callable, Collection
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
RESERVED_NAMES = ("SUBMIT", "__builtins__")  # DSPy refuses these for tools and variables.


class DSPyInterpreter:
    """An interpreter with DSPy's protocol: `tools`, `output_fields`, `start`, `execute` and `shutdown`.

    With a language model in `interpreter`, rlm-batch answers the queries of code. DSPy's own `llm_query`,
    `llm_query_batched` and sub-agents are then refused, because they would bypass rlm-batch's budget and depth.

    DSPy's callbacks, those in `callbacks` and DSPy's global ones, get the events `on_interpreter_*`.

    Raises:
        ValueError: A tool or an output field has a name that code cannot use. `execute` raises it for later changes.
    """

    def __init__(
        self,
        interpreter: SyncInterpreter,
        tools: ToolDict | None,
        output_fields: OutputFields,
        callbacks: list[BaseCallback] | None,
    ) -> None:
        self.tools: ToolDict = dict(tools or {})
        self.callbacks: list[BaseCallback] = list(callbacks or [])
        self.output_fields: OutputFields = output_fields
        self._interpreter = interpreter
        self._is_open = False
        self._ended = False
        self._check_names()

    def _check_names(self) -> None:
        """Raise ValueError for tools and output fields with names that code cannot use."""
        invalid = _find_invalid_names(self.tools, RESERVED_NAMES)
        if invalid:
            raise ValueError(f"tool names must be non-reserved Python identifiers; invalid names: {invalid!r}")
        invalid = _find_invalid_names([field.get("name") for field in self.output_fields or []])
        if invalid:
            raise ValueError(f"output field names must be non-keyword Python identifiers; invalid names: {invalid!r}")

    @with_callbacks
    def start(self) -> None:
        """Open the sandbox, if it is not open. Raises DSPy's CodeInterpreterError."""
        if self._ended:
            raise CodeInterpreterError("this interpreter was shut down: create a new one")
        try:
            self._interpreter.start()
        except RlmBatchError as error:
            raise CodeInterpreterError(str(error)) from error
        self._is_open = True

    @with_callbacks
    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run code and return a FinalOutput, the last expression's value, the printed text, or None.

        Variables and the results of tools are converted to JSON as DSPy's own interpreters do. A tool's error is a
        RuntimeError in the code. Code that calls exit() fails, but later code still sees the names that it defined.

        Raises:
            SyntaxError: The code is not valid Python.
            CodeExecutionError: The code failed; it is DSPy's class.
            CodeInterpreterError: No change of the code can help; it is DSPy's class.
            ValueError: A tool or an output field has a name that code cannot use.
        """
        self._check_names()
        variables = variables or {}
        invalid = _find_invalid_names(variables, (*RESERVED_NAMES, *self.tools))
        if invalid:
            raise CodeInterpreterError(
                "Invalid variable name: use Python identifiers that are not reserved and not names of tools; invalid "
                f"names: {invalid!r}"
            )
        variables = convert_variables(variables)
        if self._interpreter.can_query and FACADE_TOKEN in variables:
            raise CodeExecutionError(REFUSED)
        if not self._is_open:
            self.start()
        self._pass_tools()
        fields = None
        if self.output_fields is not None:  # DSPy converts the values to the fields' types itself.
            fields = [{"name": field["name"]} for field in self.output_fields]
        try:
            result = self._interpreter.execute(code, variables, output_fields=fields, refuse_exit=True)
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
        return result.meta.value_repr or result.meta.printed or None

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
            self._ended, self._is_open = True, False
            self._interpreter.shutdown()

    @with_callbacks
    def invoke_tool(self, tool_name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a tool and return its result unchanged. An error of the tool is raised unchanged.

        Raises:
            CodeInterpreterError: No tool has that name.
        """
        if tool_name not in self.tools:
            raise CodeInterpreterError(f"Unknown tool: {tool_name}")
        tool = self.tools[tool_name]
        bound_args, bound_kwargs = _bind(tool, args, kwargs)
        result = tool(*bound_args, **bound_kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def _pass_tools(self) -> None:
        """Give the sandbox's interpreter the current tools. DSPy adds its own tools before each call."""
        refused = (*QUERY_NAMES, *FACADE) if self._interpreter.can_query else ()
        context = contextvars.copy_context()  # It has DSPy's settings, which tools read in any thread.
        self._interpreter.tools.clear()
        for name in self.tools:
            if name not in refused:
                self._interpreter.tools[name] = self._wrap_tool(name, context)

    def _wrap_tool(self, name: str, context: contextvars.Context) -> Callable[..., Any]:
        """Return a function for the sandbox's interpreter. It calls the tool with a copy of the context variables."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return convert_returned(context.copy().run(self.invoke_tool, name, list(args), kwargs))
            except Exception as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error  # The code gets this error.

        return call


def _find_invalid_names(names: Collection[Any], reserved: Collection[str] = ()) -> list[Any]:
    """Return the names that are not Python identifiers, or are keywords or reserved."""
    return [
        name
        for name in names
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in reserved
    ]


def _bind(tool: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments for a tool. `dspy.RLM` accepts only keywords for the tools that it has wrapped."""
    if not args or not hasattr(tool, "__signature__"):  # `dspy.RLM` sets the attribute.
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


def _with_output(error: RlmBatchError) -> str:
    """Return the text that the code printed, followed by the error."""
    text = f"{error.type}: {error}" if isinstance(error, CodeCrashed) and error.type else str(error)
    printed = escape_text(error.meta.printed if error.meta is not None else "", keep=LINE_CHARACTERS)
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

    def __call__(
        self,
        tools: ToolDict | None = None,
        output_fields: OutputFields = None,
        *,
        callbacks: list[BaseCallback] | None = None,
    ) -> DSPyInterpreter:
        """Return an interpreter; `dspy.RLM` calls this without arguments.

        Args:
            tools: Functions of the host that code may call by name. Default: none.
            output_fields: The fields that SUBMIT accepts: dicts with `name` and an optional `type`. Default: any.
            callbacks: DSPy's callbacks for this interpreter, beside DSPy's global ones. Default: none.

        Raises:
            ValueError: A tool or an output field has a name that code cannot use.
        """
        ours = self._make_interpreter()
        ours.share_query_limits()
        return DSPyInterpreter(ours, tools, output_fields, callbacks)
