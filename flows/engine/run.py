"""One flow run: what its parts share, from the checks before Prefect to the report."""

import asyncio
import logging
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from prefect import get_run_logger
from prefect.logging import get_logger

from ...blocks.language_model.credentials import CredentialMask
from ...blocks.language_model.model_access import LIMITS, ModelAccess, is_saved_model, open_model_access
from ...blocks.provider import SandboxProvider
from ...blocks.registry import resolve_provider
from ...sandbox.driver_settings import Preparation
from ...sandbox.errors import ConfigurationError, NotRun
from ...sandbox.model_reply import read_program
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.budget import Usage
from ...sandbox.queries.records import RlmEvent
from ...sandbox.queries.recursive_model import DEFAULT_RECURSION
from ...sandbox.requests.code_text import parse_module
from ...sandbox.requests.execution_request import ToolValue
from ...tasks.capacity.slots import Slots
from ...tasks.check import Check
from ...tasks.execution import Execution
from ...tasks.host_tools import Tool, load_tools
from ...tasks.kept_sandboxes import MAX_KEPT, MAX_KEPT_OF_SHARD
from ...tasks.ledger.collected_files import CollectedFilesStore
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.ledger_line import encode_event
from ...tasks.ledger.model_ledgers import AnswerLedger, TranscriptLedger
from ...tasks.ledger.result_index import ResultCache, get_results_root
from ...tasks.ledger.run_record import KEY_VERSION, RunRecord, list_run_records
from ...tasks.ledger.shards import ShardStore
from ...tasks.query import QueryTracker
from ...tasks.task_log import LineBudget, Logger
from ...tasks.tracing import trace_model, trace_queries
from ..listener import FlowListener, NotebookProgress, is_notebook
from ..orphans import get_server_id, register_own_run
from ..parameters import FlowParameters, Options
from ..plan import Outcomes, Plan
from ..reporting.summary import RunSummary
from ..reports import Report
from .failures import StopConditions
from .turn_calls import TurnCalls

if TYPE_CHECKING:
    from ..sharding.coordinator import ShardingExecutor
    from .executor import LaneExecutor
    from .outcome_sink import MemoryStore, OutcomeSink


@dataclass(slots=True)
class ResourceUsage:
    """The resources that a flow run has used."""

    sandboxes: int = 0
    sandbox_seconds: float = 0.0  # the sum of the sandboxes' open seconds
    model: Usage = field(default_factory=Usage)  # usage in other processes; `ModelAccess.spent` has this process's


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a flow, or of a shard of it. The executor and the lanes get it whole.

    `make_run` sets the first group of fields before Prefect calls the flow. `start` sets the second group in the flow
    run, and `open_run` the third. If Prefect retries the flow run, the second and the third group are set again.
    """

    options: Options
    plan: Plan
    provider: SandboxProvider
    parameters: FlowParameters[Any] | None = None  # all parameters of the flow; None in a shard
    listener: FlowListener = field(default_factory=FlowListener)
    preparation: Preparation | None = None  # code that runs in each sandbox before the first execution
    check: Check | None = None
    tools: dict[str, Tool | ToolValue] = field(default_factory=dict[str, "Tool | ToolValue"])
    model_access: ModelAccess | None = None
    tracker: QueryTracker = field(default_factory=QueryTracker)
    environment: str = ""  # a phrase such as "in local sandboxes (bubblewrap)", once the provider is checked
    ui_url: str | None = None  # the UI of the shared server, if the run uses it

    run_id: str = ""
    server_id: str = ""
    log: Logger = field(default_factory=logging.getLogger)
    ledger: Ledger = field(init=False)
    key_version: int = KEY_VERSION  # A run of recursive queries on an old ledger keeps the version of its keys.
    stop: StopConditions = field(init=False)
    files: CollectedFilesStore | None = None
    answers: AnswerLedger | None = None
    transcripts: TranscriptLedger | None = None
    keepable_count: int = 0  # the number of failed executions whose sandboxes may still be kept
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    log_lines: LineBudget = field(default_factory=LineBudget)  # lines of output that may still be logged
    sink: "OutcomeSink" = field(init=False)

    results_path: str | None = None
    store: "MemoryStore | ShardStore" = field(init=False)
    cache: ResultCache = field(init=False)
    record: RunRecord = field(init=False)
    summary: RunSummary | None = None  # None in a shard
    turn_calls: TurnCalls | None = None
    slots: Slots = field(init=False)
    executor: "LaneExecutor | ShardingExecutor" = field(init=False)
    message: str = ""  # a sentence about the outcomes, once all executions have ended
    report: Report | None = None

    async def check_before_start(self) -> None:
        """Check the provider and the language models. Raises ConfigurationError if one of them cannot be used."""
        await self.provider.check()
        self.environment = await self.provider.describe_sandboxes()
        if self.model_access is not None:
            await self.model_access.check_models(is_recursive=self.plan.recursion is not None)

    async def start(self, ledger: Ledger, run_id: str, part_prefix: str = "") -> None:
        """Begin the current flow run, whose deadline starts now.

        Args:
            ledger: The place of the results.
            run_id: The id of the flow run, or of a task run without a flow run.
            part_prefix: The beginning of the names of this process's parts of the ledger; empty unless it runs a shard.
        """
        options = self.options
        self.run_id, self.log, self.ledger = run_id, get_run_logger(), ledger
        self.server_id = await get_server_id()
        if self.plan.recursion is not None:
            earlier = await asyncio.to_thread(list_run_records, ledger.path)
            self.key_version = max(2, earlier[-1].key_version) if earlier else KEY_VERSION
        self.stop = StopConditions(options, self.plan.total)
        self.files = CollectedFilesStore(ledger.path) if options.collect else None
        self.keepable_count = 0
        if options.keep_failed:
            self.keepable_count = MAX_KEPT_OF_SHARD if part_prefix else MAX_KEPT
        self.usage, self.log_lines = ResourceUsage(), LineBudget()
        if self.model_access is not None and options.shards is None:  # In a sharded job only the shards ask the model.
            self._open_model_ledgers(self.model_access, part_prefix)
        register_own_run(self.run_id)

    def _open_model_ledgers(self, access: ModelAccess, part_prefix: str) -> None:
        """Open the files of the model's answers and of whole requests, if the options ask for them."""
        if self.options.cache_queries:
            self.answers = AnswerLedger(self.ledger.path, get_results_root(), part_prefix)
            access.cache = AnswerCache(self.answers, has_limits_in_keys=self.key_version < 3)
        elif self.plan.recursion is not None:  # An execution gets the answers of its own earlier attempts.
            self.answers = AnswerLedger(self.ledger.path, None, part_prefix)
        if self.options.record == "full":
            mask = CredentialMask()
            for settings in (*access.list_settings(), self.provider):
                mask.add_settings(settings)
            self.transcripts = TranscriptLedger(self.ledger.path, mask.build_filter(), part_prefix)

    async def compute_fingerprint(self) -> dict[str, Any]:
        """Return the settings on which all results depend."""
        fingerprint = {**await self.provider.fingerprint()}
        if self.model_access is not None:
            fingerprint["language_model"] = self.model_access.fingerprint()
        recursion = self.plan.recursion
        if recursion is not None and self.key_version >= 3:
            recursion = replace(
                recursion, max_turns=DEFAULT_RECURSION.max_turns, max_errors=DEFAULT_RECURSION.max_errors
            )
        if recursion is not None and recursion != DEFAULT_RECURSION:
            answer_type = None if recursion.answer_type is None else recursion.answer_type.schema
            settings = {**asdict(replace(recursion, answer_type=None)), "answer_type": answer_type}
            del settings["turn_timeout"]  # Results do not depend on limits of time.
            fingerprint["recursion"] = settings
        if self.preparation is not None:
            fingerprint["prepare"] = self.preparation.code
            if self.preparation.seed is not None:
                fingerprint["prepare_seed"] = self.preparation.seed
        if self.tools:
            fingerprint["tools"] = sorted(self.tools)
        values = {name: tool.compute_digest() for name, tool in self.tools.items() if isinstance(tool, ToolValue)}
        if values:
            fingerprint["tool_values"] = values
        if self.check is not None:
            fingerprint["check"] = self.check.code
        if self.options.collect:  # Earlier results lack the files.
            fingerprint["collect"] = sorted(self.options.collect)
        return fingerprint

    def take_event(self, execution: Execution, event: RlmEvent) -> None:
        """Write a turn of a recursive query and the usage so far to the ledger, and then tell the listener.

        The ledger still has them if the run is killed.
        """
        with suppress(OSError):  # Writing the outcome reports it.
            for line in encode_event(execution, event):
                self.ledger.write_line(line)
        self.listener.on_rlm_event(event.index, event)
        if self.turn_calls is not None and event.kind == "output":
            self.turn_calls.add(event)

    def skip(self, executions: Iterable[Execution], reason: str) -> None:
        """Fail the executions that have no outcome. The ledger does not get these failures."""
        for execution in executions:
            if execution.index not in self.store:
                self.sink.record_unrun(execution, NotRun(f"not run: {reason}"))

    def collect_outcomes(self) -> Outcomes:
        """Return every outcome in order. Raises ConfigurationError if their number differs from that of the inputs."""
        outcomes = Outcomes(self.store.outcomes, self.store.failures, str(self.ledger.path), self.plan.report_spec)
        total, count = self.plan.total, len(outcomes.split()[0])
        if count != total and not self.plan.may_stop_early:
            raise ConfigurationError(
                f"the inputs changed while they were read: {total} at first, {count} at the end. Run it again"
            )
        return outcomes

    async def flush_ledger_after_error(self) -> None:
        """Close the ledger, which flushes it. Only log an OSError, because the error before it matters more."""
        try:
            await asyncio.shield(asyncio.to_thread(self.ledger.close))
        except OSError as error:
            self.log.error("%s", error)


async def prepare_run(
    parameters: FlowParameters[Any], plan: Plan | None = None, listener: FlowListener | None = None
) -> Run:
    """Return the run of a flow, after a check of its provider and its language models.

    `plan` is the plan of the parameters, if the caller has made it. Raises ConfigurationError if the parameters, the
    provider or a model cannot be used.
    """
    if plan is None:
        plan = parameters.make_plan(get_logger("rlm_batch").info)
    run = await make_run(parameters.options, plan)
    run.parameters = parameters
    if listener is not None:
        run.listener = listener
    elif is_notebook():
        run.listener = NotebookProgress()
    if parameters.options.shards is None:  # Shards check the provider and the model on their own machines.
        await run.check_before_start()
    return run


async def make_run(options: Options, plan: Plan, provider: SandboxProvider | None = None) -> Run:
    """Return a run with its provider, its code, its functions of the host and its language models.

    Args:
        options: The shared parameters.
        plan: The executions, and what only their flow knows.
        provider: The provider, if `options` does not name it.

    Raises:
        ConfigurationError: The provider, the code, a function of the host or a language model cannot be used.
    """
    tools = cast("dict[str, Any]", options.tools or {})
    if options.shards is not None:
        _refuse_own_objects(options, tools)
    if provider is None:
        provider = await resolve_run_provider(options)
    prepare_timeout = None if options.preparation is None else options.preparation.timeout
    if prepare_timeout is not None and prepare_timeout + options.timeout > provider.lifetime:
        raise ConfigurationError(
            f"`prepare_timeout` and `timeout` together exceed the sandbox's `lifetime` of {provider.lifetime} s"
        )
    if provider.has_this_python:
        _check_syntax("prepare", "" if options.preparation is None else options.preparation.code)
        _check_syntax("check", options.check_code or "")
    if options.reuse_sandboxes:
        sandbox_count = min(plan.total, options.max_workers)
    else:
        sandbox_count = plan.total if options.check is None else 2 * plan.total  # Each check has another sandbox.
    run = Run(
        options=options,
        plan=plan,
        provider=provider.with_expectations(sandboxes=sandbox_count, keeps_failed=options.keep_failed),
        preparation=options.preparation,
        check=None if options.check_code is None else Check(options.check_code),
        tools=await asyncio.to_thread(load_tools, tools, options.tool_timeout),
    )
    if options.language_model is not None:
        run.model_access = await open_model_access(
            options.language_model,
            track=trace_queries(run.tracker.track_query),
            wrap_model=trace_model,
            recursion=plan.recursion or DEFAULT_RECURSION,
            **{name: getattr(options, name) for name in LIMITS},
        )
    return run


def needs_server(options: Options) -> bool:
    """Return whether the provider or a language model is a block on a Prefect server."""
    models = options.models.values() if isinstance(options.models, dict) else options.models or ()
    sources = (options.language_model, options.sub_model, *models)
    return "/" in str(options.provider) or any(is_saved_model(str(source)) for source in sources)


async def resolve_run_provider(options: Options) -> SandboxProvider:
    """Return a flow run's provider with the run's secrets and files.

    Raises ConfigurationError if the provider, a secret or a file cannot be used.
    """
    provider = await resolve_provider(options.provider, options.provider_options)
    if options.secrets:
        environment = {**provider.environment, **options.read_secrets()}
        provider = provider.model_copy(update={"environment": environment})
    if options.python_path is not None or options.mounts:
        provider = await asyncio.to_thread(provider.with_files, options.python_path, options.mounts)
    return provider


def _check_syntax(name: str, code: str) -> None:
    """Raise ConfigurationError if the code of a parameter has a syntax error in this Python."""
    with warnings.catch_warnings(), suppress(ValueError, MemoryError, RecursionError):  # The sandbox reports these.
        warnings.simplefilter("ignore")
        try:
            parse_module(read_program(code))
        except SyntaxError as error:
            raise ConfigurationError(f"`{name}` is not valid Python: {error.msg} (line {error.lineno})") from None


def _refuse_own_objects(options: Options, tools: dict[str, Any]) -> None:
    """Raise ConfigurationError if a job in shards has an object of this process, because shards run in others."""
    texts = {f"the tool {name!r}": str(tool) for name, tool in tools.items()}
    for name in ("language_model", "sub_model", "models"):
        texts[f"`{name}`"] = str(getattr(options, name))
    for role, text in texts.items():
        if " of this process>" in text:
            raise ConfigurationError(
                f"{role} is an object of this process, and shards run in other processes: save a model as a block, "
                "and pass the import path of a function, such as package.module:function"
            )
