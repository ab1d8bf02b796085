"""DSPy's `CodeInterpreter` protocol over our interpreters. Importing this imports DSPy."""

import contextvars
from collections.abc import Callable
from typing import Any

from ..sandbox.errors import (
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
from .language_model.litellm_client import INSTALL_HINT, use_bundled_prices

try:
    from dspy.primitives.code_interpreter import CodeExecutionError, CodeInterpreterError, FinalOutput
except ImportError as error:
    raise ConfigurationError(INSTALL_HINT) from error

FACADE = ("__dspy_construct__", "__dspy_call__")  # the tools of DSPy's own sub-agents,
FACADE_TOKEN = "__dspy_host_token"  # and the variable that the code which installs them is handed
REFUSED = (
    "dspy is not offered in this sandbox, because what it asks goes around the budget and the depth: use "
    "llm_query, llm_query_batched, rlm_query and rlm_query_batched"
)

ToolDict = dict[str, Callable[..., Any]]
OutputFields = list[dict[str, Any]] | None
# Runs code with its variables where its state is kept, and waits for it. Raises what `Interpreter.execute` raises.
Run = Callable[[str, dict[str, Any], ToolDict, OutputFields], Result]


class DSPyInterpreter:
    """An interpreter as DSPy wants it: `tools`, `output_fields`, `start`, `execute` and `shutdown`.

    With `asks`, code asks its queries of us: DSPy's own `llm_query` and `llm_query_batched`, and its sub-agents,
    which would go around our budget and depth, are not taken.
    """

    def __init__(self, run: Run, start: Callable[[], object], shutdown: Callable[[], None], *, asks: bool) -> None:
        self.tools: ToolDict = {}
        self.output_fields: OutputFields = None
        self._run = run
        self._start = start
        self._shutdown = shutdown
        self._asks = asks
        self._ended = False

    def start(self) -> None:
        """Opens the sandbox; the second time does nothing. Raises DSPy's CodeInterpreterError."""
        if self._ended:
            raise CodeInterpreterError("this interpreter was shut down: make a new one")
        try:
            self._start()
        except RlmBatchError as error:
            raise CodeInterpreterError(str(error)) from error

    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Runs the code, and returns a FinalOutput, what was printed, or None.

        Raises SyntaxError, and DSPy's CodeExecutionError for code that failed and CodeInterpreterError for what no
        code can mend.
        """
        variables = {} if variables is None else variables
        if self._asks and FACADE_TOKEN in variables:
            raise CodeExecutionError(REFUSED)
        self.start()
        context = contextvars.copy_context()  # DSPy's settings, which its tools look at in whatever thread they run

        def in_context(tool: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: context.copy().run(tool, *args, **kwargs)

        refused = (*QUERY_NAMES, *FACADE) if self._asks else ()  # DSPy puts its own there each time
        tools = {name: in_context(tool) for name, tool in self.tools.items() if name not in refused}
        try:
            result = self._run(code, variables, tools, self.output_fields)
        except CodeSyntaxError as error:
            raise SyntaxError(str(error)) from error
        except (CodeError, SubmitError, ExecutionTimeout) as error:
            raise CodeExecutionError(_with_output(error)) from error
        except RlmBatchError as error:
            raise CodeInterpreterError(str(error)) from error
        if result.meta.submitted:
            return FinalOutput(result.outputs)
        return (result.meta.stdout + result.meta.stderr) or None

    def shutdown(self) -> None:
        """Ends it for good."""
        if not self._ended:
            self._ended = True
            self._shutdown()


def _with_output(error: RlmBatchError) -> str:
    """The error, after what the code had printed before it failed."""
    printed = escape_text(error.meta.stdout if error.meta is not None else "", keep=LINE_CHARACTERS)
    return f"{printed.rstrip()}\n{error}" if printed.strip() else str(error)


class InterpreterFactory:
    """What `dspy.RLM` takes as its `interpreter_factory`: each call gives an interpreter in a sandbox of its own.

    `interpreter` makes one of ours, such as `lambda: LocalInterpreter(timeout=60)` or the class itself. Where it was
    given a `language_model`, code asks its queries of that, within the limits that the interpreter was given; otherwise
    DSPy's own `llm_query` and sub-agents are there as ever.

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
        use_bundled_prices()
        self._make_interpreter = interpreter

    def __call__(self) -> DSPyInterpreter:
        ours = self._make_interpreter()
        ours.share_query_limits()

        def run(code: str, variables: dict[str, Any], tools: ToolDict, output_fields: OutputFields) -> Result:
            ours.tools.clear()
            ours.tools.update(tools)
            return ours.execute(code, variables, output_fields=output_fields)

        return DSPyInterpreter(run, ours.start, ours.shutdown, asks=ours.can_query)
