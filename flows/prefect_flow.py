"""Prefect flows built from parameter models."""

import asyncio
import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from prefect import Flow, State, get_run_logger
from prefect.context import FlowRunContext
from prefect.exceptions import MissingResult
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
from .prefect_server import provide_server
from .sharding.shard_runs import cancel_shards
from .sharding.work_pool import require_server_url

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class BatchFlow(Flow[P, T]):
    """A Prefect flow that converts Python values to parameters, and starts a server if none is configured.

    `model` is the flow's parameter model, or None for a flow that wraps a plain function.
    """

    model: type[FlowParameters[Any]] | None = None
    run: Run | None = None  # the run that `call_flow` has prepared, in the copy of the flow that Prefect calls
    listener: FlowListener | None = None  # receives the events of the run
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
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self(*args, **kwargs))
        name = self.fn.__name__
        raise ConfigurationError(
            f"{name}.sync(...) cannot be called in a running event loop: write `await {name}(...)`, in a notebook too"
        )

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
        """Pickle the flow by its name, as a function is. cloudpickle would copy the code and its globals."""
        return load_flow, (self.fn.__module__, self.fn.__name__, self._changed_options)

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters as JSON. Prefect's own method imports FastAPI for that, in 0.1 processor seconds."""
        if self.model is None:
            return super().serialize_parameters(parameters)
        return to_jsonable_python(parameters)  # The model has converted them, so all of them have a form in JSON.

    async def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], listener: FlowListener | None = None) -> Any:
        """Check the arguments, and run the flow. `kwargs` may have Prefect's `return_state` and `wait_for`.

        Raises ConfigurationError if a value has a wrong type or is out of its bounds, and the flow's own errors.
        """
        values = dict(kwargs)
        prefect_options = {name: values.pop(name) for name in ("return_state", "wait_for") if name in values}
        values = _bind_arguments(self.fn, args, values)
        parameters = _check_arguments(self, values) if self.model is None else self.model.parse(values)
        return await call_flow(self, parameters, listener, **prefect_options)


async def call_flow(
    flow: BatchFlow[..., Any],
    parameters: FlowParameters[Any] | dict[str, Any],
    listener: FlowListener | None = None,
    plan: Plan | None = None,
    **prefect_options: Any,
) -> Any:
    """Prepare a run, so that a wrong parameter starts no server, and return the result of a copy of the flow.

    `parameters` are checked, or values by name for a flow that wraps a function. `plan` is that of the parameters, if
    the caller has made it. `prefect_options` are Prefect's `return_state` and `wait_for`.

    Raises ConfigurationError if the provider or the server cannot be used, and the flow's own errors.
    """
    flow = copy.copy(flow)
    flow.listener = listener
    if flow.result_storage is None and flow.persist_result is False:
        # Prefect would ask the server for its default storage, with a request that blocks the event loop.
        flow.result_storage = PREFECT_LOCAL_STORAGE_PATH.value()
    model = parameters if isinstance(parameters, FlowParameters) else None
    values: Any = parameters
    has_blocks = False  # Only a Prefect server has the blocks that the parameters name.
    if model is not None:
        values = spill_long_parameters(model.list_values(), find_contents(type(model)))
        has_blocks = model.reads_blocks() or needs_server(model.options)
        if model.options.shards is not None:
            require_server_url()
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
        flow.run = None  # A context that Prefect copied keeps the flow, and the run keeps copies of a ledger's files.


async def execute_flow(run: Run) -> State[Any]:
    """Execute the run as the current flow run, and return its state, whose message says how the run went."""
    parameters, options, plan = run.parameters, run.options, run.plan
    assert parameters is not None
    try:
        async with open_run(run):
            await (plan.execute or execute_items)(run)
            outcomes = run.collect_outcomes()
        if options.on_failure == "raise":
            raise_failures(outcomes, plan)
        run.report = parameters.build_report(outcomes)
    except Exception:
        if run.message:
            emit_run_event(run, "failed")
        raise
    emit_run_event(run, "completed")
    return Completed(message=run.message, data=await with_reference(run.report, run.record))


def get_current_flow() -> BatchFlow[..., Any]:
    """Return the flow of the current flow run."""
    context: Any = FlowRunContext.get()
    return context.flow


def define_flow(model: Callable[P, FlowParameters[R]]) -> BatchFlow[P, Coroutine[Any, Any, R]]:
    """Return the Prefect flow of a subclass of `FlowParameters`, with the signature of its constructor."""
    parameters: type[FlowParameters[Any]] = model  # type: ignore[assignment]

    async def execute(*args: Any, **kwargs: Any) -> Any:
        """Execute the current flow run, and return its state, whose message says how the run went."""
        shorten_engine_log(flow_run.id)
        with trace_flow_run(), cancel_at_termination():
            run = get_current_flow().run
            if run is None:  # In a worker, Prefect calls the flow itself.
                checked = parameters.parse(_bind_arguments(execute, args, kwargs))
                plan = checked.make_plan(get_run_logger().info, get_results_root() / flow_run.id)
                run = await prepare_run(checked, plan)
            return await execute_flow(run)

    execute.__name__ = execute.__qualname__ = parameters.flow_name
    execute.__module__ = f"{__package__}.{parameters.flow_name}"  # Deployments and copies in other processes use it.
    execute.__doc__ = parameters.__doc__ or ""
    execute.__signature__ = build_signature(parameters)  # type: ignore[attr-defined]
    # The model validates the values, with one sentence for all problems.
    flow = _make_flow(execute, parameters.prefect_name, validate_parameters=False)
    flow.model = parameters
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
    # These hooks are for a run whose process died. Otherwise the run's lanes have removed the sandboxes.
    # The shards of a run that crashed continue, for the run that resumes the job.
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
    fields: dict[str, Any] = {
        item.name: (item.annotation, ... if item.default is item.empty else item.default) for item in parameters
    }
    try:
        create_model(flow.name, **fields)(**converted)
    except ValidationError as error:
        raise ConfigurationError(describe_problems(error)) from None
    return converted


def _bind_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by their names; all may be passed by position. Raises TypeError if they do not fit."""
    signature = inspect.signature(function)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = signature.replace(parameters=[item.replace(kind=kind) for item in signature.parameters.values()])
    try:
        return dict(positional.bind(*args, **kwargs).arguments)
    except TypeError as error:
        unknown = next((name for name in kwargs if name not in signature.parameters), None)
        close = [] if unknown is None else difflib.get_close_matches(unknown, signature.parameters, 1)
        advice = f": did you mean {close[0]}?" if close else ""
        raise TypeError(f"{function.__name__}() {error}{advice}") from None


def _document_parameters(function: Callable[..., Any]) -> str:
    """Return the docstring with a section on the parameters, from which Prefect's schema takes their descriptions."""
    lines = [inspect.cleandoc(function.__doc__ or ""), "", "Args:"]
    for parameter in inspect.signature(function).parameters.values():
        field = find_field(parameter.annotation)
        if field is not None and field.description:
            lines.append(f"    {parameter.name}: {field.description}")
    return "\n".join(lines)
