"""What makes our flows flows: Prefect's, with hooks, and two things more for whoever calls one from Python."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from prefect import Flow
from pydantic.fields import FieldInfo

from ..sandbox.errors import ConfigurationError
from ..tasks.ledger.ledger import results_root
from .cleanup.orphans import remove_sandboxes
from .error_log_filter import in_sentences
from .inputs.chunking import with_text_ids
from .inputs.readers import spilled, spilled_text
from .prefect_server import embedded_server
from .sharding.coordinator import cancel_shards
from .sharding.work_pool import server_url

P = ParamSpec("P")
T = TypeVar("T")

PARAMETER_LIMIT = 256 * 1024  # bytes of JSON; Prefect refuses flow runs with parameters over 512 KiB in all
SPILLABLE = {  # and how each refers to a file
    "code": "@{path}",
    "steps": "@{path}",
    "inputs": "{path}",
    "points": "{path}",
    "data": "{path}",
    "chunks": "{path}",
}
TEXTS = ("code", "reduce")  # that are one text, and refer to a file as lists of code do


class BatchFlow(Flow[P, T]):
    """A flow whose long lists are written to a file before Prefect sees them, on a server that suits us.

    Where no server is configured Prefect starts one of its own inside the program; it gets our settings.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the flow; a coroutine, as the function's own call would be."""
        return self._call(args, kwargs)

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {name: kwargs.pop(name) for name in ("return_state", "wait_for") if name in kwargs}
        parameters = within_limit(dict(inspect.signature(self.fn).bind(*args, **kwargs).arguments))
        if parameters.get("shards") is not None:
            server_url()  # rather than start one that has no workers
        async with embedded_server():
            return await super().__call__(**options, **parameters)  # type: ignore[misc]


def within_limit(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, with a reference to a file in the place of each list or text that is too long for Prefect."""
    short = {
        name: _short(value, name, SPILLABLE[name]) if name in SPILLABLE and isinstance(value, (list, dict)) else value
        for name, value in parameters.items()
    }
    for name in TEXTS:
        text = short.get(name)
        if isinstance(text, str) and len(text) > PARAMETER_LIMIT // 4:
            short[name] = f"@{spilled_text(text, results_root())}"
    text = short.get("context")
    if isinstance(text, str) and len(text) > PARAMETER_LIMIT // 4:  # a character has 4 bytes at most
        del short["context"]
        short["context_file"] = spilled_text(text, results_root())
    return short


def _short(value: list[Any] | dict[Any, Any], name: str, form: str) -> list[Any] | dict[Any, Any] | str:
    if isinstance(value, dict):
        value = with_text_ids(value)
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} must be JSON, and is not: {error}") from None
    if size <= PARAMETER_LIMIT:
        return value
    lines = [{"id": key, "data": item} for key, item in value.items()] if isinstance(value, dict) else value
    return form.format(path=spilled(lines, results_root()))


def _with_parameters(function: Callable[..., Any]) -> str:
    """The docstring, with a section on the parameters: that is where Prefect's schema takes their descriptions from."""
    lines = [inspect.cleandoc(function.__doc__ or ""), "", "Args:"]
    for parameter, hint in get_type_hints(function, include_extras=True).items():
        described = [field.description for field in get_args(hint) if isinstance(field, FieldInfo)]
        lines += [f"    {parameter}: {text}." for text in described if text]
    return "\n".join(lines)


def batch_flow(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], BatchFlow[P, Coroutine[Any, Any, T]]]:
    """Makes an async function a `BatchFlow` of that name."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> BatchFlow[P, Coroutine[Any, Any, T]]:
        function.__doc__ = _with_parameters(function)
        in_sentences()
        # For a process that died: otherwise its lanes have removed what they had open.
        cancelled: list[Any] = [remove_sandboxes, cancel_shards]
        crashed: list[Any] = [remove_sandboxes]  # and its shards go on, for the run that goes on with the job
        return BatchFlow(function, name=name, persist_result=False, on_cancellation=cancelled, on_crashed=crashed)

    return decorate
