"""What makes our flows flows: Prefect's, with hooks, and two things more for whoever calls one from Python."""

import copy
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Self, TypeVar

from prefect import Flow

from ..sandbox.errors import RlmBatchError
from ..tasks.task_log import install_task_run_log_filter
from .cleanup.orphans import remove_sandboxes
from .engine.events import FlowListener
from .inputs.conversion import convert_parameters
from .inputs.spilling import spill_long_parameters
from .parameters import field_of, signature_of
from .prefect_server import embedded_server
from .sharding.attempt import cancel_shards
from .sharding.work_pool import require_server_url

P = ParamSpec("P")
T = TypeVar("T")


class BatchFlow(Flow[P, T]):
    """A flow whose parameters are made JSON, and written to a file where they are long, before Prefect sees them.

    Where no server is configured Prefect starts one of its own inside the program; it gets our settings. `listener` is
    told how a run goes that is called in this process.
    """

    listener: FlowListener | None = None
    results_path: str | None = None  # of a run that goes on in this process, as soon as it has a ledger

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        """Runs the flow; a coroutine, as the function's own call would be.

        Prefect's `return_state` and `wait_for` are taken too. Type checkers are not told of them: they would have to be
        overloads, and what is wrong with a call is then no longer said of one argument.
        """
        coroutine: Any = self._call(args, kwargs)
        return coroutine

    def with_listener(self, listener: FlowListener) -> Self:
        """The same flow, whose runs report to the listener as they go."""
        flow = copy.copy(self)
        flow.listener = listener
        return flow

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {name: kwargs.pop(name) for name in ("return_state", "wait_for") if name in kwargs}
        parameters = spill_long_parameters(
            convert_parameters(dict(_positional(self.fn).bind(*args, **kwargs).arguments))
        )
        if parameters.get("shards") is not None:
            require_server_url()  # rather than start one that has no workers
        run = copy.copy(self)  # which is told where its results are
        try:
            async with embedded_server(lambda: run.results_path):
                return await Flow.__call__(run, **options, **parameters)  # type: ignore[misc]
        except RlmBatchError as error:
            raise error.with_traceback(None) from error.__cause__  # without dozens of frames of Prefect's


def _positional(function: Callable[..., Any]) -> inspect.Signature:
    """The signature by which callers may pass every parameter also by its position."""
    signature = inspect.signature(function)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return signature.replace(parameters=[item.replace(kind=kind) for item in signature.parameters.values()])


def _document_parameters(function: Callable[..., Any]) -> str:
    """The docstring with a section on the parameters: Prefect's schema takes their descriptions from there."""
    lines = [inspect.cleandoc(function.__doc__ or ""), "", "Args:"]
    for parameter in inspect.signature(function).parameters.values():
        field = field_of(parameter.annotation)
        if field is not None and field.description:
            lines.append(f"    {parameter.name}: {field.description}.")
    return "\n".join(lines)


def _log_error_text(record: logging.LogRecord) -> bool:
    """A log filter: a flow run's log says of an error of ours its text, which is for people, without a traceback."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, RlmBatchError):
        record.exc_info = record.exc_text = None
        record.msg, record.args = "%s: %s", (type(error).__name__, error)
    return True


def batch_flow(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], BatchFlow[P, Coroutine[Any, Any, T]]]:
    """Makes an async function a `BatchFlow` of that name."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> BatchFlow[P, Coroutine[Any, Any, T]]:
        function.__signature__ = signature_of(function)  # type: ignore[attr-defined]
        function.__doc__ = _document_parameters(function)
        logging.getLogger("prefect.flow_runs").addFilter(_log_error_text)
        install_task_run_log_filter()
        # For a process that died: otherwise its lanes have removed what they had open.
        cancelled: list[Any] = [remove_sandboxes, cancel_shards]
        crashed: list[Any] = [remove_sandboxes]  # and its shards go on, for the run that goes on with the job
        return BatchFlow(function, name=name, persist_result=False, on_cancellation=cancelled, on_crashed=crashed)

    return decorate
