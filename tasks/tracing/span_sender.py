"""Sends spans to the OTLP endpoint of the environment: in the background, and at the end for a bounded time."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

SEND_SECONDS = 2.0  # at the end of a flow run, which waits for no endpoint longer than that


class SpanSender:
    """A tracer whose spans are sent, in batches and in the background, until it is closed.

    Its provider is its own and not the process's: another's stays as it is, and gets none of these spans. Its settings
    are those of OpenTelemetry's variables (`OTEL_EXPORTER_OTLP_*`, `OTEL_BSP_*`, `OTEL_RESOURCE_ATTRIBUTES`, ...);
    `endpoint` is theirs, and raises ValueError where it is no address.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # without what may be a secret
        self._exporter = _CountingExporter()
        # No end at the interpreter's exit, which would wait for the endpoint.
        self._provider = TracerProvider(resource=_build_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        tracer = self._provider.get_tracer("rlm_batch", version("rlm-batch"))
        self.tracer: Tracer = tracer  # type: ignore[assignment]

    async def close(self) -> str:
        """Sends what is left, for `SEND_SECONDS` at most; a sentence where not all could be sent, else nothing."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        def shut_down() -> None:
            try:
                self._provider.shutdown()
            finally:
                with suppress(RuntimeError):  # the loop may have ended meanwhile
                    loop.call_soon_threadsafe(finish)

        # A daemon, as those of the SDK are: a process that ends waits for none.
        threading.Thread(target=shut_down, name="rlm-batch-spans", daemon=True).start()
        await asyncio.wait({done}, timeout=SEND_SECONDS)
        exporter = self._exporter
        if exporter.failed_spans:
            return f"{exporter.failed_spans} spans could not be sent to {self._place}: {exporter.reason}"
        if not done.done():
            reason = f" ({exporter.reason})" if exporter.reason else ""
            return f"not all spans could be sent to {self._place} within {SEND_SECONDS:g} s{reason}"
        return ""


class _CountingExporter(SpanExporter):
    """The OTLP exporter, which counts the spans that it could not send, and knows why, instead of logging it."""

    def __init__(self) -> None:
        self._exporter = OTLPSpanExporter()
        self.failed_spans = 0
        self.reason = ""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _current.exporter = self
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever its client raises
            self.reason, result = type(error).__name__, SpanExportResult.FAILURE
        finally:
            _current.exporter = None
        if result is not SpanExportResult.SUCCESS:
            self.failed_spans += len(spans)
            self.reason = self.reason or "no answer"
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Current(threading.local):
    exporter: _CountingExporter | None = None  # of ours, that exports in this thread


_current = _Current()


def _take_reason(record: logging.LogRecord) -> bool:
    """A log filter: what goes wrong while we export is told at the end, in one line and with no address."""
    exporter = _current.exporter
    if exporter is None:
        return True
    args = record.args if isinstance(record.args, tuple) else ()
    status = next((arg for arg in args if type(arg) is int), None)
    error = next((arg for arg in args if isinstance(arg, BaseException)), None)
    if status is not None:
        exporter.reason = f"it answered {status}"
    elif error is not None:
        exporter.reason = type(error).__name__
    return False


logging.getLogger(trace_exporter.__name__).addFilter(_take_reason)


def _build_resource() -> Resource:
    """The environment's, whose service is called rlm-batch where nobody gave it a name."""
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "rlm-batch", "service.version": version("rlm-batch")}))
    return resource
