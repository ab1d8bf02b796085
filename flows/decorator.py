"""What makes our flows flows: Prefect's, with hooks, and a few things more for whoever calls one from Python."""

import asyncio
import copy
import functools
import inspect
import logging
import re
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext
from prefect.exceptions import ParameterTypeError
from prefect.states import Completed
from prefect.types.entrypoint import EntrypointType

from ..sandbox import errors
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..tasks.task_log import install_task_run_log_filter, tells_of_cancellation
from ..tasks.tracing import trace_flow_run
from .cleanup.orphans import remove_sandboxes
from .docstrings import read_docstring
from .engine.events import FlowListener
from .engine.run_outcome import RunOutcome, with_reference
from .inputs.conversion import CODE, convert_parameters
from .inputs.spilling import spill_long_parameters
from .parameters import field_of, signature_of
from .prefect_server import embedded_server
from .sharding.attempt import cancel_shards
from .sharding.work_pool import require_server_url

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
FAILED_STATE = re.compile(r"Finished in state Failed\(.Flow run encountered an exception: (?P<error>\w+): ")
ERROR_TAG = re.compile(r"\.(?:constrained-\w+|literal\[[^]]*\])(?=:)")  # which of its types pydantic speaks of
REFUSAL = re.compile(r"Parameter validation failed for flow '(?P<flow>[^']*)'")
# Of a run that its worker cancels, whose state comes after its process has ended, of one that is suspended, and of a
# subflow of a run that is cancelled.
INTERRUPTED_STATES = tuple(f"Finished in state {name}(" for name in ("Running", "Suspended", "Cancelled"))
COMPLETED_STATE = "Finished in state Completed("
ERROR_NAMES = frozenset(name for name, kind in vars(errors).items() if isinstance(kind, type))


class BatchFlow(Flow[P, T]):
    """A flow whose parameters are made JSON, and written to a file where they are long, before Prefect sees them.

    Where no server is configured Prefect starts one of its own inside the program; it gets our settings. `listener` is
    told how a run goes that is called in this process.
    """

    listener: FlowListener | None = None
    results_path: str | None = None  # of a run that goes on in this process, as soon as it has a ledger
    outcome: RunOutcome | None = None  # of a run that is over in this process
    _changed_options: dict[str, Any] | None = None  # those of `with_options`

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        """Runs the flow; a coroutine, as the function's own call would be.

        Prefect's `return_state` and `wait_for` are taken too. Type checkers are not told of them: they would have to be
        overloads, and what is wrong with a call is then no longer said of one argument.
        """
        coroutine: Any = self._call(args, kwargs)
        name = self.fn.__name__
        # Where nobody awaits it Python's warning has this name, and nothing else that could say what to do.
        coroutine.__qualname__ = f"{name}(...) [write await {name}(...), or {name}.sync(...) where nothing is async]"
        return coroutine

    def sync(self: "BatchFlow[P, Coroutine[Any, Any, R]]", *args: P.args, **kwargs: P.kwargs) -> R:
        """What the flow returns, in code that is not async: a script, a sync flow or task.

        Raises ConfigurationError where an event loop runs in this thread, as in async code and in a notebook.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self(*args, **kwargs))
        name = self.fn.__name__
        raise ConfigurationError(
            f"{name}.sync(...) cannot wait here, where an event loop runs: write `await {name}(...)` instead, in a "
            "notebook's cell too"
        )

    if not TYPE_CHECKING:  # Their types are those of Prefect's own, whose flows these are not.

        def with_options(self, **options: Any) -> Self:
            """The same flow with other options of Prefect's, such as `name` or `retries`."""
            flow = copy.copy(self)
            vars(flow).update(vars(Flow.with_options(self, **options)))
            flow._changed_options = {**(self._changed_options or {}), **options}
            return flow

        # By its module: a file of this package cannot be run as a script, which Prefect's default would do.
        def to_deployment(self, *args: Any, **options: Any) -> Any:
            _check_deployment_parameters(options)
            return Flow.to_deployment(self, *args, **{**options, "entrypoint_type": EntrypointType.MODULE_PATH})

        async def ato_deployment(self, *args: Any, **options: Any) -> Any:
            _check_deployment_parameters(options)
            options["entrypoint_type"] = EntrypointType.MODULE_PATH
            return await Flow.ato_deployment(self, *args, **options)

    def __copy__(self) -> Self:
        flow = object.__new__(type(self))
        vars(flow).update(vars(self))
        return flow

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles it by its name, as a function is: cloudpickle would take its code along, and all that it refers to.

        A listener stays where it is: it is told of runs in this process.
        """
        return _load_flow, (self.fn.__module__, self.fn.__name__, self._changed_options)

    def with_listener(self, listener: FlowListener) -> Self:
        """The same flow, whose runs report to the listener as they go."""
        flow = copy.copy(self)
        flow.listener = listener
        return flow

    def check_parameters(self, parameters: dict[str, Any]) -> None:
        """Returns if these are of the flow's types and within their bounds. Raises ConfigurationError."""
        try:
            self.validate_parameters(parameters)
        except ParameterTypeError as error:
            problems = [ERROR_TAG.sub("", line.strip(" -")) for line in str(error).splitlines()[1:] if line.strip()]
            raise ConfigurationError("; ".join(problems) or str(error)) from None

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {name: kwargs.pop(name) for name in ("return_state", "wait_for") if name in kwargs}
        parameters = spill_long_parameters(convert_parameters(_bind_arguments(self.fn, args, kwargs)))
        self.check_parameters(parameters)  # rather than start a server for what is wrong
        if parameters.get("shards") is not None:
            require_server_url()  # rather than start one that has no workers
        run = copy.copy(self)  # which is told where its results are
        try:
            async with embedded_server(lambda: run.results_path):
                return await Flow.__call__(run, **options, **parameters)  # type: ignore[misc]
        except RlmBatchError as error:
            raise error.with_traceback(None) from error.__cause__  # without dozens of frames of Prefect's
        except asyncio.CancelledError as error:
            raise error.with_traceback(None) from None


def _check_deployment_parameters(options: dict[str, Any]) -> None:
    """Raises ConfigurationError where a deployment's parameters have a function in them."""
    parameters: dict[str, Any] = options.get("parameters") or {}
    for name in CODE:
        value = parameters.get(name)
        if any(map(callable, value if isinstance(value, list) else [value])):  # type: ignore[reportUnknownArgumentType]
            raise ConfigurationError(
                f"{name} is a function, and a deployment's parameters are JSON, with code as text: pass the text, or "
                "call the flow itself from Python"
            )


def _load_flow(module: str, name: str, options: dict[str, Any] | None) -> Any:
    """The flow of that name, with these options of Prefect's."""
    flow = getattr(import_module(module), name)
    return flow if options is None else flow.with_options(**options)


def _bind_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names. Raises TypeError as a call of the function would, with the flow's name in it."""
    try:
        return dict(_positional(function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None


def _positional(function: Callable[..., Any]) -> inspect.Signature:
    """The signature by which callers may pass every parameter also by its position."""
    signature = inspect.signature(function)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return signature.replace(parameters=[item.replace(kind=kind) for item in signature.parameters.values()])


def _document_parameters(function: Callable[..., Any]) -> str:
    """The docstring with a section on the parameters: Prefect's schema takes their descriptions from there."""
    lines = [inspect.cleandoc(read_docstring(function)), "", "Args:"]
    for parameter in inspect.signature(function).parameters.values():
        field = field_of(parameter.annotation)
        if field is not None and field.description:
            lines.append(f"    {parameter.name}: {field.description}.")
    return "\n".join(lines)


_flow_names: set[str] = set()  # of our flows


def _log_error_text(record: logging.LogRecord) -> bool:
    """A log filter: a flow run's log says of an error of ours its text, which is for people, once and no traceback."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, RlmBatchError):
        record.exc_info = record.exc_text = None
        record.msg, record.args = "%s: %s", (type(error).__name__, error)
    elif getattr(record, "flow_name", None) in _flow_names and tells_of_cancellation(str(record.msg)):
        return False  # the line before it has where the results are
    elif getattr(record, "flow_name", None) in _flow_names and str(record.msg).startswith(INTERRUPTED_STATES):
        return False  # likewise
    elif (told := FAILED_STATE.match(str(record.msg))) and told["error"] in ERROR_NAMES:
        record.msg, record.args = "Finished in state Failed()", ()  # the line before it has the text
    elif getattr(record, "flow_name", None) in _flow_names and str(record.msg).startswith(COMPLETED_STATE):
        record.msg, record.args = "Finished in state Completed()", ()  # likewise
    return True


def _leave_refusal_to_its_error(record: logging.LogRecord) -> bool:
    """A log filter: that a value is wrong stands in the error, without all the others that Prefect would log."""
    told = REFUSAL.match(str(record.msg))
    return told is None or told["flow"] not in _flow_names


def _tell_outcome(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The function, whose run's state says what it has come to, and of which an event tells."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        if (context := FlowRunContext.get()) is not None and isinstance(context.flow, BatchFlow):
            context.flow.outcome = None  # of a run before, in a process that has several
        try:
            value = await function(*args, **kwargs)
        except Exception:
            if (outcome := _get_outcome()) is not None:
                outcome.emit("failed")
            raise
        if (outcome := _get_outcome()) is None:
            return value
        outcome.emit("completed")
        return Completed(message=outcome.message, data=await with_reference(value, outcome.record))

    return run


def _trace(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the function with a span for each of its runs."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with trace_flow_run():
            return await function(*args, **kwargs)

    return run


def _get_outcome() -> RunOutcome | None:
    context = FlowRunContext.get()
    return None if context is None else getattr(context.flow, "outcome", None)


def batch_flow(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], BatchFlow[P, Coroutine[Any, Any, T]]]:
    """Makes an async function a `BatchFlow` of that name."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> BatchFlow[P, Coroutine[Any, Any, T]]:
        function.__signature__ = signature_of(function)  # type: ignore[attr-defined]
        function.__doc__ = _document_parameters(function)
        logging.getLogger("prefect.flow_runs").addFilter(_log_error_text)
        logging.getLogger("prefect.flows").addFilter(_leave_refusal_to_its_error)
        _flow_names.add(name)
        install_task_run_log_filter()
        # For a process that died: otherwise its lanes have removed what they had open.
        cancelled: list[Any] = [remove_sandboxes, cancel_shards]
        crashed: list[Any] = [remove_sandboxes]  # and its shards go on, for the run that goes on with the job
        run = _trace(_tell_outcome(function))
        return BatchFlow(run, name=name, persist_result=False, on_cancellation=cancelled, on_crashed=crashed)

    return decorate
