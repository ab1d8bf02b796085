"""A server on this machine that takes spans as OTLP over HTTP, and what they say once they are parsed.

In tests it runs in a thread: `with SpanReceiver() as receiver`. `status` is what it answers, and with `hangs` it
answers nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

CLIENT = ProtoSpan.SPAN_KIND_CLIENT


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came; `parent` is the id of another, or empty."""

    name: str
    trace: str
    id: str
    parent: str
    is_client: bool
    is_error: bool
    message: str
    attributes: dict[str, Any]
    service: str
    seconds: float


@dataclass(eq=False)
class SpanReceiver:
    """Takes spans at `/v1/traces` on 127.0.0.1."""

    status: int = 200
    hangs: bool = False
    spans: list[ReceivedSpan] = field(default_factory=list[ReceivedSpan])
    requests: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """What `OTEL_EXPORTER_OTLP_ENDPOINT` is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def find(self, name: str, **attributes: Any) -> list[ReceivedSpan]:
        """The spans of that name that have those attributes, whose dots are written as underscores."""
        return [
            span
            for span in self.spans
            if span.name == name
            and attributes.items() <= {key.replace(".", "_"): value for key, value in span.attributes.items()}.items()
        ]

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests += 1
                if receiver.hangs:
                    receiver._ended.wait()
                elif self.path == "/v1/traces" and receiver.status == 200:
                    receiver._add(ExportTraceServiceRequest.FromString(data))
                self.send_response(receiver.status if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the tests' output is for others."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="span-receiver", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def _add(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = _read(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind == CLIENT,
                            span.status.code == Status.STATUS_CODE_ERROR,
                            span.status.message,
                            _read(span.attributes),
                            service,
                            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        )
                    )


def _read(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
