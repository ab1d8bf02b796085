"""Prefect flows built from parameter models."""

import asyncio
import copy
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from prefect import Flow, State, get_run_logger
from prefect.context import FlowRunContext
from prefect.exceptions import MissingResult
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from prefect.states import Completed
from prefect.types.entrypoint import EntrypointType
from pydantic import ValidationError, create_model
from pydantic_core import to_jsonable_python

from ..blocks.problems import describe_problems
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..tasks.engine_log import shorten_engine_log
from ..tasks.ledger.result_index import get_results_root
from ..tasks.tracing import trace_flow_run
from .engine.failures import raise_failures
from .engine.opening import execute_items, open_run
from .engine.run import Run, needs_server, prepare_run
from .engine.run_outcome import emit_run_event, with_reference
from .engine.termination import cancel_at_termination
from .event_stream import EventStream
from .inputs.conversion import convert_parameters
from .inputs.spilling import spill_long_parameters
from .listener import FlowListener
from .orphans import remove_sandboxes
from .parameters import FlowParameters, build_signature, find_contents, find_field
from .plan import Plan
from .prefect_patches import read_no_result_for_engine
from .prefect_server import provide_server
from .reduction import summarize_outcomes
from .sharding.shard_runs import cancel_shards
from .sharding.work_pool import require_server_url

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
if "PREFECT__FLOW_RUN_ID" in os.environ:  # A worker has started this process.
    read_no_result_for_engine()
PREFECT_OPTIONS = ("return_state", "wait_for")  # arguments of Prefect's `Flow.__call__`


class BatchFlow(Flow[P, T]):
    """A Prefect flow that converts Python values to parameters, and starts a server if none is configured.

    `model` is the flow's parameter model, or None for a flow that wraps a plain function.
    """

    model: type[FlowParameters[Any]] | None = None
    # `call_flow` sets these two in the copy of the flow that it calls.
    run: Run | None = None
    listener: FlowListener | None = None
    _changed_options: dict[str, Any] | None = None  # the options that `with_options` set

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        """Return a coroutine that runs the flow, as the call of an async function does.

        Prefect's `return_state` and `wait_for` are accepted too. They are not in the type, because overloads would make
        a type checker's message about a wrong argument unclear.
        """
        coroutine: Any = self.call(args, kwargs)
        name = self.fn.__name__
        # Python's warning about a coroutine that was never awaited shows this name.
        coroutine.__qualname__ = f"{name}(...) [write await {name}(...), or {name}.sync(...) where nothing is async]"
        return coroutine

    def sync(self: "BatchFlow[P, Coroutine[Any, Any, R]]", *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the flow from code that is not async, such as a script or a sync task.

        Args:
            *args: Parameters of the flow, by position.
            **kwargs: Parameters of the flow, by name.

        Returns:
            The result of the flow.

        Raises:
            ConfigurationError: An event loop runs in this thread, as in async code and in a notebook. Otherwise the
                flow's own errors.
        """
        return run_now(self.fn.__name__, lambda: self(*args, **kwargs))

    def stream(self: "BatchFlow[P, Coroutine[Any, Any, R]]", *args: P.args, **kwargs: P.kwargs) -> EventStream[R]:
        """Return an async iterator that runs the flow and yields the events of its recursive queries.

        The last event of a question is its "answer". After the loop, `result` of the iterator is the value that the
        flow returns. A caller that leaves the loop cancels the run.

        Args:
            *args: Parameters of the flow, by position.
            **kwargs: Parameters of the flow, by name.

        Returns:
            The iterator, for `async for`. The loop raises the flow's errors.
        """
        return EventStream(lambda listener: self.call(args, kwargs, listener))

    if not TYPE_CHECKING:  # Type checkers take the signatures of Prefect's own methods.

        def with_options(self, **options: Any) -> Self:
            """Return a copy of the flow with other options of Prefect's.

            Args:
                **options: Arguments of Prefect's `Flow.with_options`, such as `name` or `retries`.

            Returns:
                A copy of the flow.
            """
            flow = copy.copy(self)
            vars(flow).update(vars(Flow.with_options(self, **options)))
            flow._changed_options = {**(self._changed_options or {}), **options}
            return flow

        # A module path, because Prefect's default would run a file of this package as a script.
        def to_deployment(self, *args: Any, **options: Any) -> Any:
            return Flow.to_deployment(self, *args, **{**options, "entrypoint_type": EntrypointType.MODULE_PATH})

        async def ato_deployment(self, *args: Any, **options: Any) -> Any:
            options["entrypoint_type"] = EntrypointType.MODULE_PATH
            return await Flow.ato_deployment(self, *args, **options)

    def __copy__(self) -> Self:
        flow = object.__new__(type(self))
        vars(flow).update(vars(self))
        return flow

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the flow by its name. cloudpickle would copy the flow's code and its globals."""
        return load_flow, (self.fn.__module__, self.fn.__name__, self._changed_options)

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters as JSON values."""
        if self.model is None:
            return super().serialize_parameters(parameters)
        # The model has converted them. Prefect's own method would import FastAPI, which takes 0.1 s of CPU.
        return to_jsonable_python(parameters)

    async def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], listener: FlowListener | None = None) -> Any:
        """Check the arguments, run the flow, and return its result.

        Args:
            args: Parameters of the flow, by position.
            kwargs: Parameters of the flow by name, and Prefect's `return_state` and `wait_for`.
            listener: Receives the events of the run.

        Raises:
            ConfigurationError: A value has a wrong type or is out of its bounds. Otherwise the flow's own errors.
        """
        prefect_options = {name: value for name, value in kwargs.items() if name in PREFECT_OPTIONS}
        own_kwargs = {name: value for name, value in kwargs.items() if name not in PREFECT_OPTIONS}
        values = _bind_arguments(self.fn, args, own_kwargs)
        await _resolve_futures(values)
        parameters = _check_arguments(self, values) if self.model is None else self.model.parse(values)
        return await call_flow(self, parameters, listener, **prefect_options)


async def call_flow(
    flow: BatchFlow[..., Any],
    parameters: FlowParameters[Any] | dict[str, Any],
    listener: FlowListener | None = None,
    plan: Plan | None = None,
    **prefect_options: Any,
) -> Any:
    """Start or find the server, call a copy of the flow, and return its result.

    The run is prepared first, so that a wrong parameter starts no server. Only a run that names blocks is prepared
    later, because only a server has them.

    Args:
        flow: The flow.
        parameters: The checked parameters, or values by name for a flow that wraps a function.
        listener: Receives the events of the run.
        plan: The plan of the parameters, if the caller has made it.
        **prefect_options: Prefect's `return_state` and `wait_for`.

    Raises:
        ConfigurationError: The provider or the server cannot be used. Otherwise the flow's own errors.
    """
    flow = copy.copy(flow)
    flow.listener = listener
    if flow.result_storage is None and flow.persist_result is False:
        # Prefect would ask the server for its default storage, with a request that blocks the event loop.
        flow.result_storage = PREFECT_LOCAL_STORAGE_PATH.value()
    model = parameters if isinstance(parameters, FlowParameters) else None
    values: Any = parameters
    has_blocks = False
    if model is not None:
        values = spill_long_parameters(model.list_values(), find_contents(type(model)))
        has_blocks = model.reads_blocks() or needs_server(model.options)
        if model.options.shards is not None:
            require_server_url()
        _ = model.summary_code  # Wrong code is refused before the run.
        if not has_blocks:
            flow.run = await prepare_run(model, plan, listener)
    try:
        async with provide_server(lambda: flow.run and flow.run.results_path, listener) as ui_url:
            if model is not None and has_blocks:
                flow.run = await prepare_run(model, plan, listener)
            if flow.run is not None:
                flow.run.ui_url = ui_url
            return await Flow.__call__(flow, **prefect_options, **values)  # type: ignore[misc]
    except MissingResult:
        # A busy server answered late when Prefect set the run's last state. Prefect set the state again, and used the
        # server's copy, which has no result.
        if flow.run is None or flow.run.report is None:
            raise
        return flow.run.report
    except RlmBatchError as error:
        raise error.with_traceback(None) from error.__cause__  # Prefect adds dozens of frames.
    except asyncio.CancelledError as error:
        raise error.with_traceback(None) from None
    finally:
        flow.run = None  # Prefect's contexts keep the flow, and the run has copies of a ledger's files.


def run_now(name: str, call: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run the coroutine that `call` makes, and return its result. Raises ConfigurationError in a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # Errors of the coroutine must not show this one as their context.
    else:
        raise ConfigurationError(
            f"{name}.sync(...) cannot be called in a running event loop: write `await {name}(...)`, in a notebook too"
        )
    return asyncio.run(call())


async def execute_flow(run: Run) -> State[Any]:
    """Execute the run as the current flow run, and return its state, whose message says how the run went."""
    parameters, options, plan = run.parameters, run.options, run.plan
    assert parameters is not None
    async with open_run(run):
        await (plan.execute or execute_items)(run)
        if parameters.summary_code is not None:
            await summarize_outcomes(run, parameters.summary_code)
        outcomes = run.collect_outcomes()
    if options.on_failure == "raise":
        raise_failures(outcomes, plan)
    run.report = parameters.build_report(outcomes)
    emit_run_event(run, "completed")
    return Completed(message=run.message, data=await with_reference(run.report, run.record))


def get_current_flow() -> BatchFlow[..., Any]:
    """Return the flow of the current flow run."""
    context: Any = FlowRunContext.get()
    return context.flow


def define_flow(model: Callable[P, FlowParameters[R]]) -> BatchFlow[P, Coroutine[Any, Any, R]]:
    """Return the Prefect flow of a subclass of `FlowParameters`, with the signature of its constructor."""
    flow_model: type[FlowParameters[Any]] = model  # type: ignore[assignment]

    async def execute(*args: Any, **kwargs: Any) -> Any:
        shorten_engine_log(flow_run.id)
        with trace_flow_run(), cancel_at_termination():
            run = get_current_flow().run
            try:
                if run is None:  # In a worker, Prefect calls the flow itself.
                    parameters = flow_model.parse(_bind_arguments(execute, args, kwargs))
                    plan = parameters.make_plan(get_run_logger().info, get_results_root() / flow_run.id)
                    run = await prepare_run(parameters, plan)
                return await execute_flow(run)
            except Exception:
                emit_run_event(run, "failed")
                raise

    execute.__name__ = execute.__qualname__ = flow_model.flow_name
    execute.__module__ = f"{__package__}.{flow_model.flow_name}"  # Other processes import the flow from there.
    execute.__doc__ = flow_model.__doc__ or ""
    execute.__signature__ = build_signature(flow_model)  # type: ignore[attr-defined]
    # The model validates the values, with one sentence for all problems.
    flow = _make_flow(execute, flow_model.prefect_name, validate_parameters=False)
    flow.model = flow_model
    return flow


def define_function_flow(
    name: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], BatchFlow[P, Coroutine[Any, Any, T]]]:
    """Return a decorator that makes an async function a flow with that name in Prefect."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> BatchFlow[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def execute(*args: P.args, **kwargs: P.kwargs) -> T:
            shorten_engine_log(flow_run.id)
            with trace_flow_run():
                return await function(*args, **kwargs)

        return _make_flow(execute, name)

    return decorate


def _make_flow(function: Callable[..., Any], name: str, **options: Any) -> BatchFlow[..., Any]:
    function.__doc__ = _document_parameters(function)
    # The hooks are for a run whose process died. In other runs, the lanes have removed the sandboxes. The shards of a
    # crashed run continue, because another run can resume the job.
    hooks: dict[str, Any] = {"on_cancellation": [remove_sandboxes, cancel_shards], "on_crashed": [remove_sandboxes]}
    # By default, a flow takes the number of retries in Prefect's settings.
    return BatchFlow(function, name=name, retries=0, retry_delay_seconds=0, persist_result=False, **hooks, **options)


def load_flow(module: str, name: str, options: dict[str, Any] | None = None) -> Any:
    """Return the flow `name` of a module, with options of Prefect's."""
    flow = getattr(import_module(module), name)
    return flow if options is None else flow.with_options(**options)


def _check_arguments(flow: BatchFlow[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Convert and check the arguments of a flow that wraps a function. Raises ConfigurationError."""
    converted = convert_parameters(values, {})
    parameters = inspect.signature(flow.fn).parameters.values()
    fields: dict[str, Any] = {}
    for parameter in parameters:
        is_required = parameter.default is parameter.empty
        fields[parameter.name] = (parameter.annotation, ... if is_required else parameter.default)
    try:
        create_model(flow.name, **fields)(**converted)
    except ValidationError as error:
        raise ConfigurationError(describe_problems(error)) from None
    return converted


def _bind_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name. A function's keyword-only parameters may have arguments by position, too.

    Raises:
        TypeError: The arguments do not fit. The message names a similar parameter for an unknown one.
    """
    signature = inspect.signature(function)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = signature.replace(parameters=[item.replace(kind=kind) for item in signature.parameters.values()])
    try:
        return dict(positional.bind(*args, **kwargs).arguments)
    except TypeError as error:
        message = f"{function.__name__}() {error}"
        unknown = [name for name in kwargs if name not in signature.parameters]
        similar = difflib.get_close_matches(unknown[0], signature.parameters, 1) if unknown else []
        if similar:
            message += f": did you mean {similar[0]}?"
        raise TypeError(message) from None


async def _resolve_futures(values: dict[str, Any]) -> None:
    """Replace arguments that are Prefect futures, and futures in lists such as that of `Task.map`, by their results."""
    for name, value in values.items():
        values[name] = await _resolve_future(value)
        if isinstance(value, list) and any(isinstance(item, PrefectFuture) for item in value):
            values[name] = [await _resolve_future(item) for item in value]


async def _resolve_future(value: Any) -> Any:
    return await asyncio.to_thread(value.result) if isinstance(value, PrefectFuture) else value


def _document_parameters(function: Callable[..., Any]) -> str:
    """Return the docstring with a section on the parameters, from which Prefect's schema takes their descriptions."""
    lines = [inspect.cleandoc(function.__doc__ or ""), "", "Args:"]
    for parameter in inspect.signature(function).parameters.values():
        field = find_field(parameter.annotation)
        if field is not None and field.description:
            lines.append(f"    {parameter.name}: {field.description}")
    return "\n".join(lines)
