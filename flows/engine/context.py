"""The shared context of one flow run: its options, deadline, model access and used resources."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from prefect import get_run_logger
from prefect.runtime import flow_run

from ...blocks.language_model.credentials import CredentialMask
from ...blocks.language_model.model_access import ModelAccess, open_model_access
from ...blocks.provider import SandboxProvider
from ...blocks.registry import resolve_provider
from ...blocks.volume import check_volume_name
from ...sandbox.caller import name_parameter
from ...sandbox.driver_settings import Preparation
from ...sandbox.errors import ConfigurationError
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.budget import Usage
from ...sandbox.queries.events import RlmEvent
from ...sandbox.queries.recursive_model import DEFAULT_RECURSION, RecursionSettings
from ...tasks.capacity.slots import Slots, open_slots
from ...tasks.check import Check
from ...tasks.execution import Execution, FindUploads
from ...tasks.host_tools import Tool, load_tools
from ...tasks.kept_sandboxes import KeptSandboxes
from ...tasks.lane import Lane, LaneSettings
from ...tasks.ledger.answer_ledger import AnswerLedger
from ...tasks.ledger.collected_files import CollectedFilesStore
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.ledger_line import encode_turn, encode_usage
from ...tasks.ledger.result_index import get_results_root
from ...tasks.ledger.transcript_ledger import TranscriptLedger
from ...tasks.query import QueryTracker
from ...tasks.retry import RetryPolicy
from ...tasks.task_log import LineBudget, OutputLog
from ...tasks.tracing import trace_model, trace_queries
from ..inputs.secrets import read_secrets
from ..inputs.spilling import PARAMETER_LIMIT, read_text_reference
from ..orphans import get_server_id, register_own_run
from ..parameters import Options
from ..plan import Label
from ..prefect_client import ask_once
from ..reporting.report import describe_usage
from .failures import Deadline

Log = logging.Logger | logging.LoggerAdapter[Any]


@dataclass(slots=True)
class ResourceUsage:
    """The resources that a flow run has used: sandboxes, the sum of their open seconds, and the language model.

    `model` counts the usage of other processes. `ModelAccess.spent` counts the usage of this process.
    """

    sandboxes: int = 0
    sandbox_seconds: float = 0.0
    model: Usage = field(default_factory=Usage)

    async def close_lane(self, lane: Lane) -> None:
        """Close the lane's sandbox, return its slot, and add its sandboxes to the usage."""
        await lane.release()
        self.sandboxes += lane.opened_count
        self.sandbox_seconds += lane.open_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The context that the parts of a flow run share. Sandboxes have `server_id` in a label."""

    provider: SandboxProvider
    options: Options
    label: Label
    ledger: Ledger
    total: int  # executions
    log: Log
    run_id: str
    server_id: str
    deadline: Deadline
    policy: RetryPolicy
    model_access: ModelAccess | None
    answers: AnswerLedger | None  # None without `cache_queries`, if the executions are not recursive queries.
    transcripts: TranscriptLedger | None  # None without `record="full"`.
    tracker: QueryTracker
    usage: ResourceUsage
    preparation: Preparation | None
    tools: dict[str, Tool]
    files: CollectedFilesStore
    check: Check | None = None  # judges each execution
    kept: KeptSandboxes | None = None  # None without `keep_failed`
    prepare_lines: LineBudget = field(default_factory=LineBudget)

    def make_lane(
        self,
        slots: Slots,
        find_uploads: FindUploads | None = None,
        state_context: str | None = None,
        on_event: Callable[[RlmEvent], object] | None = None,
    ) -> Lane:
        """Return a lane of this flow run. With a `state_context` its executions share one process and its state.

        The ledger gets each turn of a recursive query before `on_event` gets its event.
        """

        def pass_event(execution: Execution, event: RlmEvent) -> None:
            if event.kind == "output":
                self._record_turn(execution, event)
            if event.kind in ("code", "query", "output"):
                self._record_usage(execution)
            if on_event is not None:
                on_event(event)

        has_log = self.options.log_output
        settings = LaneSettings(
            provider=self.provider,
            run_id=self.run_id,
            server_id=self.server_id,
            timeout=self.options.timeout,
            is_reused=self.options.reuse_sandboxes,
            state_context=state_context,
            model_access=self.model_access,
            on_event=pass_event,
            answers=None if self.options.cache_queries else self.answers,
            find_uploads=find_uploads,
            transcripts=self.transcripts,
            preparation=self.preparation,
            open_prepare_log=(lambda: OutputLog(self.prepare_lines, "prepare: ", self.log)) if has_log else None,
            tools=self.tools,
            collect=self.options.collect,
            files=self.files,
            check=self.check,
            kept=self.kept,
        )
        return Lane(settings, slots)

    def _record_turn(self, execution: Execution, event: RlmEvent) -> None:
        """Write a turn of a recursive query to the ledger, so that a killed run does not lose it."""
        query, turn = event.query, event.query.trajectory[event.turn - 1]
        line = encode_turn(execution.key, execution.index, query.prompt, query.depth, event.turn, turn)
        self._write_line(line)

    def _record_usage(self, execution: Execution) -> None:
        """Write what the attempt has used to the ledger, if it has asked the model since the last line."""
        usage = execution.get_usage()
        if usage != execution.recorded_usage:
            execution.recorded_usage = usage
            self._write_line(encode_usage(execution.key, execution.index, execution.attempt, usage))

    def _write_line(self, line: bytes) -> None:
        with suppress(OSError):  # The write of the outcome reports that the ledger cannot be written.
            self.ledger.write_line(line)

    async def flush_ledger_after_error(self) -> None:
        """Close the ledger, which flushes it. Only log an OSError, because the error before it matters more."""
        try:
            await asyncio.shield(asyncio.to_thread(self.ledger.close))
        except OSError as error:
            self.log.error("%s", error)


async def resolve_provider_with_volume(options: Options, volume_name: str | None) -> SandboxProvider:
    """Return a flow run's provider with the run's files, and with the volume `volume_name` unless it is None.

    Raises ConfigurationError.
    """
    provider = await resolve_provider(options.provider, options.provider_options)
    if volume_name is not None:
        if (options.provider_options or {}).get("volume_name") not in (None, volume_name):
            raise ConfigurationError(
                f"the volume is named twice: pass either {name_parameter('volume_name')} or volume_name in "
                "provider_options"
            )
        provider = provider.with_options({"volume_name": check_volume_name(volume_name)})
    if options.secrets:
        provider = provider.with_secrets(read_secrets(options))
    if options.python_path is not None or options.mounts:
        provider = await asyncio.to_thread(provider.with_files, options.python_path, options.mounts)
        provider.check_mounts()
    return provider


async def open_run_context(
    provider: SandboxProvider,
    options: Options,
    label: Label,
    ledger: Ledger,
    total: int,
    part_prefix: str = "",
    recursion: RecursionSettings | None = None,
) -> RunContext:
    """Return the context of the current flow run of `total` executions. Its deadline starts now.

    `part_prefix` begins the names of this process's parts of the ledger. `recursion` has the settings of recursive
    models; None for the defaults. Raises ConfigurationError.
    """
    tracker = QueryTracker()
    model_access = answers = None
    # In a sharded job only the shards query the model.
    if options.language_model is not None and options.shards is None and (options.cache_queries or recursion):
        # Without `cache_queries`, an execution gets only the answers of its own earlier attempts.
        root = get_results_root() if options.cache_queries else None
        answers = AnswerLedger(ledger.path, root, get_run_logger().warning, part_prefix)
    if options.language_model is not None:
        model_access = await open_model_access(
            options.language_model,
            sub_model=options.sub_model,
            models=options.models,
            max_total_llm_calls=options.max_total_llm_calls,
            max_total_llm_tokens=options.max_total_llm_tokens,
            max_cost=options.max_cost,
            track=trace_queries(tracker.track_query),
            wrap_model=trace_model,
            batch_concurrency=options.batch_concurrency,
            max_depth=options.max_depth,
            max_llm_calls=options.max_llm_calls,
            max_llm_tokens=options.max_llm_tokens,
            cache=AnswerCache(answers) if answers is not None and options.cache_queries else None,
            recursion=recursion or DEFAULT_RECURSION,
        )
    preparation = _read_preparation(options, provider)
    named = cast("dict[str, str]", options.tools or {})
    if options.shards is not None and (own := [name for name, path in named.items() if path.startswith("<")]):
        raise ConfigurationError(
            f"the tool {own[0]!r} is a function of this process, and shards run in other processes: pass its import "
            "path, such as package.module:function"
        )
    for name in ("language_model", "sub_model", "models"):
        if options.shards is not None and "<" in str(getattr(options, name)):
            raise ConfigurationError(
                f"{name_parameter(name)} is an object of this process, and shards run in other processes: save it as "
                "a block, and pass it again"
            )
    tools = await asyncio.to_thread(load_tools, named)
    deadline = Deadline.start(options.deadline)
    expected = total if options.check is None else 2 * total  # Each check has another sandbox.
    provider = provider.with_expected_sandboxes(
        min(total, options.max_workers) if options.reuse_sandboxes else expected
    )
    context = RunContext(
        provider=provider.with_kept_failures() if options.keep_failed else provider,
        options=options,
        label=label,
        ledger=ledger,
        total=total,
        log=get_run_logger(),
        run_id=flow_run.id,
        server_id=await ask_once("id", get_server_id),
        deadline=deadline,
        policy=RetryPolicy(options.retries, options.retry_code_errors, options.idempotent, deadline.at),
        model_access=model_access,
        answers=answers,
        transcripts=_make_transcripts(options, provider, model_access, ledger, part_prefix),
        tracker=tracker,
        usage=ResourceUsage(),
        preparation=preparation,
        tools=tools,
        files=CollectedFilesStore(ledger.path),
        check=None if options.check is None else Check(_read_code("check", str(options.check), options)),
        kept=KeptSandboxes(is_shard=bool(part_prefix)) if options.keep_failed else None,
    )
    register_own_run(context.run_id)
    return context


def _make_transcripts(
    options: Options, provider: SandboxProvider, access: ModelAccess | None, ledger: Ledger, part_prefix: str
) -> TranscriptLedger | None:
    """Return the writer of whole requests, or None if they are not recorded. In a sharded job only the shards write."""
    if access is None or options.record == "summary" or options.shards is not None:
        return None
    mask = CredentialMask()
    for settings in (access.model, *access.models.values(), provider):
        mask.add_settings(settings)
    return TranscriptLedger(ledger.path, mask.build_filter(), get_run_logger().warning, part_prefix)


def _read_preparation(options: Options, provider: SandboxProvider) -> Preparation | None:
    """Return the code that runs first in each sandbox. Read it if `prepare` names a file. Raises ConfigurationError."""
    preparation = options.build_preparation()
    if preparation is None:
        return None
    provider.check_preparation()
    if preparation.timeout is not None and preparation.timeout + options.timeout > provider.lifetime:
        raise ConfigurationError(
            f"{name_parameter('prepare_timeout')} ({preparation.timeout:g} s) and {name_parameter('timeout')} "
            f"({options.timeout:g} s) together exceed the sandbox's lifetime of {provider.lifetime} s: lower them, or "
            f"raise {name_parameter('lifetime')}"
        )
    return replace(preparation, code=_read_code("prepare", preparation.code, options))


def _read_code(name: str, text: str, options: Options) -> str:
    """Return the code of a parameter, which may name a file. Raises ConfigurationError if no shard can take it."""
    code = read_text_reference(text)
    if "\0" in code:
        raise ConfigurationError(f"{name_parameter(name)} contains a NUL character: remove it")
    if options.shards is not None and (size := len(code.encode("utf-8", "replace"))) > PARAMETER_LIMIT:
        raise ConfigurationError(
            f"{name_parameter(name)} has {size:,} bytes, and with {name_parameter('shards')} at most "
            f"{PARAMETER_LIMIT:,} are allowed: put the code into the repository or a package, and import it"
        )
    return code


@asynccontextmanager
async def open_capacity(context: RunContext) -> AsyncIterator[Slots]:
    """Yield the slots of the provider's limit. Track queries within the block, and log their usage at its end.

    Raises OSError if the answers of earlier runs cannot be read.
    """
    answers, access = context.answers, context.model_access
    if answers is not None:
        await asyncio.to_thread(answers.load)
    try:
        async with (
            context.tracker,
            open_slots(context.provider, context.run_id, context.log) as slots,
        ):
            yield slots
    finally:
        for writer in filter(None, (answers, context.transcripts)):
            await asyncio.shield(asyncio.to_thread(writer.close))
        if access is not None:
            used = access.spent.usage + context.usage.model
            context.log.info("the model was called %s", describe_usage(used, access.count_cached()))
