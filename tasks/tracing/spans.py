"""The spans of one flow run: of itself, of its executions, and of what their code asks of language models.

Names and attributes are OpenTelemetry's for generative AI (open-telemetry/semantic-conventions-genai, which is in
development). Those that it has no name for begin with `rlm_batch.`, but for the cost, whose name is the one that
backends look for. What is below a span finds it in the context, which goes with tasks, threads and calls of sandboxed
code alike.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.sdk.trace import Tracer
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.telemetry.run_telemetry import LABELS_TRACEPARENT_KEY

from ...sandbox.meta import Meta, QuerySummary
from ...sandbox.queries.budget import Usage
from ...sandbox.queries.session import Answer, Message, Model, NoAnswerError, Query, RunTracked
from ...sandbox.result import Result
from ..execution import Execution
from .span_sender import SpanSender

# The convention's names of those whom LiteLLM calls otherwise.
PROVIDER_NAMES = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "moonshot": "moonshot_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CAPTURE_VALUES = ("true", "span_only", "span_and_event")
W3C = TraceContextTextMapPropagator()  # in which Prefect's label is, whatever the environment's propagators are

Warn = Callable[[str], None]
Attributes = Mapping[str, str | bool | int | float]


@dataclass(eq=False)
class RunTracer:
    """Makes the spans of one flow run. `span` is its own."""

    tracer: Tracer
    span: Span

    def set_totals(self, executions: int, failures: int, usage: Usage) -> None:
        """Notes at the flow run's span what it has come to, and what it took of language models."""
        self.span.set_attribute("rlm_batch.executions", executions)
        self.span.set_attribute("rlm_batch.executions.failed", failures)
        _set_totals(self.span, usage)

    async def trace_execution(
        self, execution: Execution, provider: str, run: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Runs one attempt at an execution in a span, below which are those of its queries."""
        attributes: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "python",
            "rlm_batch.provider": provider,
            "rlm_batch.execution.index": execution.index,
            "rlm_batch.execution.attempt": execution.attempt,
        }
        with self.open_span("execute_tool python", SpanKind.INTERNAL, attributes) as span:
            try:
                result = await run()
            except BaseException as error:
                _set_meta(span, getattr(error, "meta", None))
                raise
            _set_meta(span, result.meta)
            return result

    def trace_queries(self, track: RunTracked) -> RunTracked:
        """The same as `track`, with a span for each recursive query. A flat one is one request, which has its own."""

        async def track_with_span(query: Query, work: Callable[[], Awaitable[str]]) -> str:
            if query.kind != "rlm_query":
                return await track(query, work)
            attributes: Attributes = {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": "rlm",
                "rlm_batch.query.depth": query.depth,
                **_describe_model(query.model),
            }
            with self.open_span("invoke_agent rlm", SpanKind.INTERNAL, attributes) as span:
                try:
                    return await track(query, work)
                finally:
                    _set_usage(span, query.usage)

        return track_with_span

    def trace_model(self, model: Model) -> Model:
        """The same model, with a span for each request."""
        return cast("Model", _TracedModel(self, model))

    @contextmanager
    def open_span(self, name: str, kind: SpanKind, attributes: Attributes) -> Iterator[Span]:
        """Within this a span is the current one."""
        with _end_span(self.tracer.start_span(name, kind=kind, attributes=attributes)) as span:
            yield span


@dataclass(eq=False)
class _TracedModel:
    """A model whose requests have spans; all else is the model's own."""

    tracer: RunTracer
    model: Model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    async def ask(self, messages: list[Message]) -> Answer:
        described = _describe_model(self.model.name)
        attributes = {"gen_ai.operation.name": "chat", **described}
        name = f"chat {described['gen_ai.request.model']}"
        with self.tracer.open_span(name, SpanKind.CLIENT, attributes) as span:
            captures = os.environ.get(CAPTURE_VARIABLE, "").strip().lower() in CAPTURE_VALUES
            if captures:
                inputs = [_build_message(message["role"], message["content"]) for message in messages]
                span.set_attribute("gen_ai.input.messages", _encode(inputs))
            try:
                answer = await self.model.ask(messages)
            except NoAnswerError as error:
                _set_usage(span, error.usage)
                raise
            _set_usage(span, answer.usage)
            if captures:
                output = {**_build_message("assistant", answer.text), "finish_reason": "stop"}
                span.set_attribute("gen_ai.output.messages", _encode([output]))
            return answer


def open_run_tracer(endpoint: str, warn: Warn) -> AbstractAsyncContextManager[RunTracer]:
    """Within this, spans of the current flow run are made and sent; see `open_run_trace`."""
    return _open_run_tracer(SpanSender(endpoint), warn)


@asynccontextmanager
async def _open_run_tracer(sender: SpanSender, warn: Warn) -> AsyncIterator[RunTracer]:
    context = FlowRunContext.get()
    labels: dict[str, Any] = {} if context is None or context.flow_run is None else context.flow_run.labels
    parent = None
    if not trace.get_current_span().get_span_context().is_valid and LABELS_TRACEPARENT_KEY in labels:
        # A shard's, whose job's span it is.
        parent = W3C.extract({"traceparent": str(labels[LABELS_TRACEPARENT_KEY])})
    name = _clean(flow_run.flow_name or "flow")
    attributes: Attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": name,
        "rlm_batch.flow_run.id": str(flow_run.id or ""),
        "rlm_batch.flow_run.name": _clean(flow_run.name or ""),
    }
    try:
        span = sender.tracer.start_span(f"invoke_workflow {name}", context=parent, attributes=attributes)
        carrier: dict[str, str] = {}
        W3C.inject(carrier, context=trace.set_span_in_context(span))
        if "traceparent" in carrier:
            labels.setdefault(LABELS_TRACEPARENT_KEY, carrier["traceparent"])  # which Prefect hands on to a shard's run
        with _end_span(span):
            yield RunTracer(sender.tracer, span)
    finally:
        if problem := await sender.close():
            warn(problem)


@contextmanager
def _end_span(span: Span) -> Iterator[Span]:
    """Within this the span is the current one; it has the type of what was raised, and no text of it."""
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    except Pause:
        raise
    except BaseException as error:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()


def _describe_model(name: str) -> dict[str, str]:
    """The attributes of a model by LiteLLM's name for it."""
    provider, slash, model = _clean(name).partition("/")
    if not slash:
        provider, model = "litellm", provider  # which knows by the name who serves it
    return {"gen_ai.provider.name": PROVIDER_NAMES.get(provider, provider), "gen_ai.request.model": model}


def _set_meta(span: Span, meta: Meta | None) -> None:
    if meta is None:
        return
    span.set_attribute("rlm_batch.sandbox.id", _clean(meta.sandbox_id))
    span.set_attribute("rlm_batch.execution.seconds", meta.seconds)
    if meta.queries.asked:
        _set_totals(span, meta.queries)


def _set_usage(span: Span, usage: Usage) -> None:
    """What a span's own requests have taken."""
    span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
    if usage.cost is not None:
        span.set_attribute("gen_ai.usage.cost", usage.cost)


def _set_totals(span: Span, usage: Usage | QuerySummary) -> None:
    """What all below a span has taken, under names of our own: backends add up those of the convention."""
    span.set_attribute("rlm_batch.usage.calls", usage.calls)
    span.set_attribute("rlm_batch.usage.input_tokens", usage.prompt_tokens)
    span.set_attribute("rlm_batch.usage.output_tokens", usage.completion_tokens)
    if usage.cost is not None:
        span.set_attribute("rlm_batch.usage.cost", usage.cost)


def _build_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _encode(messages: list[dict[str, Any]]) -> str:
    return _clean(json.dumps(messages, ensure_ascii=False))


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, for which a whole batch of spans would not be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")
