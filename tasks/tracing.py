"""OpenTelemetry spans of flow runs, of their executions, and of the requests that code makes to language models.

This module uses only OpenTelemetry's API. Spans are recorded if the process has an SDK. Otherwise they cost a few
microseconds an execution. A span's parent is the current span of its context, which may be a span of Prefect.

Names and attributes follow OpenTelemetry's conventions for generative AI (open-telemetry/semantic-conventions-genai,
in development). Our own attributes begin with `rlm_batch.`. `gen_ai.usage.cost` is not in the conventions, but
backends read this name.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prefect.client.schemas import FlowRun, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.telemetry.run_telemetry import LABELS_TRACEPARENT_KEY

from ..sandbox.meta import Meta, QuerySummary
from ..sandbox.queries.budget import Usage
from ..sandbox.queries.session import (
    DEFAULT_OPTIONS,
    Answer,
    EmptyAnswerError,
    Message,
    Model,
    Query,
    RequestOptions,
    RunTracked,
)
from .execution import Execution

TRACER = trace.get_tracer("rlm_batch", version("rlm-batch"))  # This also uses an SDK that is set up later.
W3C = TraceContextTextMapPropagator()  # Prefect's label has this format, even if the environment sets another one.

Attributes = Mapping[str, str | bool | int | float]


@contextmanager
def trace_flow_run() -> Iterator[None]:
    """Open the span of the current flow run. The spans of its executions and shards are below it."""
    name = flow_run.flow_name or "flow"
    attributes: Attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": name,
        "rlm_batch.flow_run.id": str(flow_run.id or ""),
        "rlm_batch.flow_run.name": flow_run.name or "",
    }
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    parent = None
    has_prefect_span = trace.get_current_span().get_span_context().is_valid
    if run is not None and LABELS_TRACEPARENT_KEY in run.labels and not has_prefect_span:
        # Prefect's own spans are switched off. The label of a shard's run names the span of its job, the parent.
        parent = W3C.extract({"traceparent": str(run.labels[LABELS_TRACEPARENT_KEY])})
    with _open_span(f"invoke_workflow {name}", attributes, run=run, parent=parent):
        yield


def set_run_totals(executions: int, failures: int, usage: Usage) -> None:
    """Set the flow run's counts and its usage of language models in the current span."""
    span = trace.get_current_span()
    span.set_attribute("rlm_batch.executions", executions)
    span.set_attribute("rlm_batch.executions.failed", failures)
    _set_totals(span, usage)


@contextmanager
def trace_execution(execution: Execution, provider: str) -> Iterator[Callable[[Meta], None]]:
    """Open the span of one attempt at an execution. Yield a function that adds the meta of the result to the span.

    The spans of the execution's queries are below this span.
    """
    attributes: Attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "python",
        "rlm_batch.provider": provider,
        "rlm_batch.execution.index": execution.index,
        "rlm_batch.execution.attempt": execution.attempt,
    }
    with _open_span("execute_tool python", attributes, run=_get_task_run()) as span:
        try:
            yield partial(_set_meta, span)
        except BaseException as error:
            _set_meta(span, getattr(error, "meta", None))
            raise


def trace_queries(track: RunTracked) -> RunTracked:
    """Return `track` with a span for each recursive query. For a flat query, the span of its one request is enough."""

    async def track_with_span(query: Query, work: Callable[[], Awaitable[Any]]) -> Any:
        if query.kind != "rlm_query":
            return await track(query, work)
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": "rlm",
            "rlm_batch.query.depth": query.depth,
            **_describe_model(query.model),
        }

        async def work_in_span() -> Any:
            with _open_span("invoke_agent rlm", attributes, run=_get_task_run()) as span:
                try:
                    return await work()
                finally:
                    _set_usage(span, query.usage)

        return await track(query, work_in_span)

    return track_with_span


def trace_model(model: Model) -> Model:
    """Return the model with a span for each request."""
    return cast("Model", _TracedModel(model))


@dataclass(eq=False)
class _TracedModel:
    """A model with a span for each request. All other attributes are those of the wrapped model."""

    model: Model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        attributes = {"gen_ai.operation.name": "chat", **_describe_model(self.model.name)}
        with _open_span(f"chat {attributes['gen_ai.request.model']}", attributes, kind=SpanKind.CLIENT) as span:
            try:
                answer = await self.model.ask(messages, options)
            except EmptyAnswerError as error:
                _set_answer(span, error.answer)
                raise
            _set_answer(span, answer)
            return answer


def _get_task_run() -> TaskRun | None:
    context = TaskRunContext.get()
    return None if context is None else context.task_run


@contextmanager
def _open_span(
    name: str,
    attributes: Attributes,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    run: FlowRun | TaskRun | None = None,
    parent: Context | None = None,
) -> Iterator[Span]:
    """Open a span, and make it the current span. At the end, record the type of an exception, not its text.

    The runs that `run` starts have their spans below this span. The span of `parent` is the parent; by default the
    current span is.
    """
    span = TRACER.start_span(name, context=parent, kind=kind, attributes=attributes)
    if not span.get_span_context().is_valid:  # There is no SDK.
        yield span
        return
    if run is not None:
        carrier: dict[str, str] = {}
        W3C.inject(carrier, context=trace.set_span_in_context(span))
        run.labels[LABELS_TRACEPARENT_KEY] = carrier["traceparent"]
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
    """Return the attributes of a model. A name without a provider, unlike `openai/x`, has the provider `litellm`."""
    provider, slash, model = name.partition("/")
    if not slash:
        provider, model = "litellm", name
    return {"gen_ai.provider.name": provider, "gen_ai.request.model": model}


def _set_meta(span: Span, meta: Meta | None) -> None:
    if meta is None or not span.is_recording():
        return
    span.set_attribute("rlm_batch.sandbox.id", meta.sandbox_id)
    span.set_attribute("rlm_batch.execution.seconds", meta.seconds)
    if meta.queries.asked:
        _set_totals(span, meta.queries)


def _set_answer(span: Span, answer: Answer) -> None:
    _set_usage(span, answer.usage)
    span.set_attribute("gen_ai.response.finish_reasons", [answer.finish_reason])


def _set_usage(span: Span, usage: Usage | QuerySummary, prefix: str = "gen_ai.usage") -> None:
    span.set_attribute(f"{prefix}.input_tokens", usage.prompt_tokens)
    span.set_attribute(f"{prefix}.output_tokens", usage.completion_tokens)
    if usage.cost is not None:
        span.set_attribute(f"{prefix}.cost", usage.cost)


def _set_totals(span: Span, usage: Usage | QuerySummary) -> None:
    """Set the usage of all spans below a span. Use our own names, because backends add up those of the conventions."""
    span.set_attribute("rlm_batch.usage.calls", usage.calls)
    _set_usage(span, usage, "rlm_batch.usage")
