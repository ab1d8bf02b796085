"""Whether a flow run has spans, and for how long: nothing of OpenTelemetry's SDK is imported where it has none."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ...sandbox.outcomes.text_escape import escape_text

if TYPE_CHECKING:
    from .spans import RunTracer

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"

_run_tracer: ContextVar[RunTracer | None] = ContextVar("run_tracer", default=None)


def find_run_tracer() -> RunTracer | None:
    """That of the flow run that this is called in; None where it has no spans."""
    return _run_tracer.get()


@asynccontextmanager
async def open_run_trace(warn: Callable[[str], None]) -> AsyncIterator[None]:
    """Within this the current flow run has spans, if `OTEL_EXPORTER_OTLP_ENDPOINT` or that of traces is set.

    What has not been sent at its end is sent then, for 2 s at most; `warn` is told what could not be. It raises nothing
    of its own.
    """
    endpoint = _find_endpoint()
    if not endpoint:
        yield
        return
    protocol = next((os.environ[name].strip() for name in PROTOCOL_VARIABLES if os.environ.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        warn(
            f"spans are sent as {PROTOCOL}, and OTEL_EXPORTER_OTLP_PROTOCOL is {escape_text(protocol)}: none are sent; "
            f"set it to {PROTOCOL}, and the endpoint to the port for that, which is often 4318"
        )
        yield
        return
    try:
        from .spans import open_run_tracer

        opening = open_run_tracer(endpoint, warn)
    except Exception as error:  # noqa: BLE001 - of a library, and of values in the environment: no run fails for spans
        warn(f"no spans are sent: {type(error).__name__}: {escape_text(str(error))}")
        yield
        return
    async with opening as tracer:
        token = _run_tracer.set(tracer)
        try:
            yield
        finally:
            _run_tracer.reset(token)


def _find_endpoint() -> str:
    """The endpoint, empty where no spans are to be sent."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return ""
    return next((value for name in ENDPOINT_VARIABLES if (value := os.environ.get(name, "").strip())), "")
