"""The search for orphaned sandboxes, whose flow runs or processes have ended, and their removal."""

import asyncio
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sized
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventOccurredFilter
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_logger
from prefect.logging.loggers import flow_run_logger

from ..blocks.provider import SandboxInfo, SandboxProvider
from ..blocks.registry import MACHINE_PROVIDERS, find_provider_name, resolve_provider
from ..sandbox.errors import RlmBatchError
from ..sandbox.outcomes.server_message import describe_server_error
from ..sandbox.process_identity import is_process_alive
from ..tasks.capacity.limits import VARIABLE_NAME, read_server_variable

MIN_SILENCE_SECONDS = 360  # twice the interval at which flow runs send Prefect their heartbeats
PAGE_SIZE = 200  # the most flow runs that the server returns
MAX_CONCURRENT_REMOVALS = 8
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class OrphanedSandbox:
    """A sandbox that nothing uses any more, the reason, and the sandbox's age in seconds."""

    info: SandboxInfo
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Findings:
    """The sandboxes of a provider that nothing uses, and for the others sentences that say why they stay."""

    orphans: list[OrphanedSandbox]
    kept: list[str]


async def find_orphans(
    provider: SandboxProvider,
    server: str,
    older_than: float | None = None,
    now: float | None = None,
    *,
    takes_kept: bool = False,
) -> Findings:
    """Return the sandboxes of a provider that nothing uses any more; see `reap` for the rules.

    Args:
        provider: The provider.
        server: The id of the configured Prefect server, or an empty text if it has none.
        older_than: Seconds of silence after which the sandboxes of an unfinished flow run count as unused.
        now: The time, by default that of this machine's clock.
        takes_kept: Count sandboxes that `keep_failed` still keeps as unused, too.

    Raises:
        RlmBatchError: The provider cannot list its sandboxes.
    """
    now = time.time() if now is None else now
    # Sandboxes are listed before their runs, so that a run's state is not older than its sandboxes.
    ours = [info for info in await provider.list_sandboxes() if info.labels.get("managed-by") == "rlm-batch"]
    reasons: dict[str, str] = {}  # keys: the ids of unused sandboxes
    left: list[str] = []
    by_run = defaultdict[uuid.UUID, list[SandboxInfo]](list)
    by_owner = defaultdict[tuple[str, str], list[SandboxInfo]](list)  # The keys are a description and a process.
    for info in ours:
        reason = _find_own_reason(info, now)
        if info.kept_until > now and not takes_kept:
            execution = "a failed execution" if info.execution is None else f"the failed execution {info.execution}"
            run = f" of flow run {info.run}" if info.run else ""
            left.append(f"left: sandbox {info.id} of {execution}{run}, {describe_kept(provider, info)}")
        elif reason is not None:
            reasons[info.id] = reason
        elif server and info.server == server and info.run:
            by_run[uuid.UUID(info.run)].append(info)
        else:
            owner = "a flow run of another server" if info.run else "a script"
            by_owner[owner, info.process].append(info)
    if by_run:
        async with get_client() as client:
            runs = await read_flow_runs(client, by_run)
            for run_id, boxes in by_run.items():
                run = runs.get(run_id)
                if run is None:
                    reason, stays = "its flow run was deleted", ""
                else:
                    reason, stays = await _judge_run(client, run, boxes, older_than, now)
                if reason is None:
                    left.append(stays)
                else:
                    reasons |= {info.id: reason for info in boxes}
    for (owner, _process), boxes in by_owner.items():
        hours = max(0.0, max(info.expires for info in boxes) - now) / 3600
        left.append(_describe_left(owner, boxes, f"until their lifetime ends within {hours:.1f} h"))
    return Findings([_make_orphan(info, reasons[info.id], now) for info in ours if info.id in reasons], left)


def _find_own_reason(info: SandboxInfo, now: float) -> str | None:
    """Return why a sandbox is unused according to its labels, or None if they show no reason."""
    if info.kept_until:
        return "it was kept for a failed execution"
    if info.abandoned:
        return "its host has died"
    if 0 < info.expires <= now:
        return "its lifetime is over"
    if is_owner_alive(info) is False:
        return "its process has ended"
    return None


async def _judge_run(
    client: PrefectClient, run: FlowRun, boxes: list[SandboxInfo], older_than: float | None, now: float
) -> tuple[str | None, str]:
    """Return why the sandboxes of a flow run are unused; or else None, and a sentence on why they stay."""
    if run.state is None or run.state.is_final():
        return _describe_state(run), ""
    caller = await _find_outermost_caller(client, run)
    if caller is not None and caller.state is not None and caller.state.is_final():
        return f"the flow run that called its own is {caller.state.name}", ""
    is_seen = older_than is None and all(is_owner_alive(info) for info in boxes)
    silence = 0.0 if is_seen else await measure_silence(client, run, boxes, now)
    if older_than is not None and silence > older_than:
        return f"{_describe_state(run)}, and has been silent for more than {older_than:,.0f} s", ""
    about = f"silent for {silence:,.0f} s: `--older-than SECONDS` removes those of silent runs"
    return None, _describe_left(f"flow run {run.name}", boxes, about)


def describe_kept(provider: SandboxProvider, info: SandboxInfo) -> str:
    """Return a phrase on how long a sandbox is kept, and on how to remove it sooner."""
    until = datetime.fromtimestamp(info.kept_until).astimezone()
    return f"kept until {until:%H:%M %Z}; `rlm-batch reap --kept --provider {provider.provider_name}` removes it sooner"


async def remove_orphans(
    provider: SandboxProvider, orphans: list[OrphanedSandbox]
) -> tuple[list[OrphanedSandbox], dict[str, RlmBatchError]]:
    """Remove sandboxes, some at a time. An error does not prevent the removal of the others.

    Returns:
        The removed sandboxes, and the errors of those that could not be removed, by id. Sandboxes that were already
        gone are in neither.
    """
    errors: dict[str, RlmBatchError] = {}
    slots = asyncio.Semaphore(MAX_CONCURRENT_REMOVALS)

    async def remove(orphan: OrphanedSandbox) -> bool:
        async with slots:
            try:
                return await provider.delete_sandbox(orphan.info.id)
            except RlmBatchError as error:
                errors[orphan.info.id] = error
                return False

    were_removed = await asyncio.gather(*(remove(orphan) for orphan in orphans))
    return [orphan for orphan, was_removed in zip(orphans, were_removed, strict=True) if was_removed], errors


def _make_orphan(info: SandboxInfo, reason: str, now: float) -> OrphanedSandbox:
    return OrphanedSandbox(info, reason, max(0.0, now - info.began) if info.began else 0.0)


async def read_flow_runs(client: PrefectClient, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, FlowRun]:
    """Return the flow runs with these ids that the server has, by id."""
    all_ids = sorted(ids)
    runs: dict[uuid.UUID, FlowRun] = {}
    for start in range(0, len(all_ids), PAGE_SIZE):
        only = FlowRunFilter(id=FlowRunFilterId(any_=all_ids[start : start + PAGE_SIZE]))
        runs |= {run.id: run for run in await client.read_flow_runs(flow_run_filter=only, limit=PAGE_SIZE)}
    return runs


def is_owner_alive(info: SandboxInfo) -> bool | None:
    """Return whether the process that opened a sandbox lives; None if it is on another machine.

    The machine's name is compared too: a copy of a machine's memory image has the same boot id and process ids.
    """
    return is_process_alive(info.process) if info.host == socket.gethostname() else None


def _describe_state(run: FlowRun) -> str:
    return f"its flow run is {run.state.name if run.state is not None else 'over'}"


async def measure_silence(client: PrefectClient, run: FlowRun, boxes: list[SandboxInfo], now: float) -> float:
    """Return the seconds since a flow run changed its state, opened a sandbox, or was the subject of an event."""
    times: list[float] = [info.began for info in boxes]
    if run.state is not None:
        times.append(run.state.timestamp.timestamp())
    last_sign = min(now, max(times))  # A sandbox's label may have any time.
    since: Any = datetime.fromtimestamp(last_sign, UTC)
    # Events may have times after `now`, from a machine whose clock is ahead of this one's.
    until: Any = datetime.fromtimestamp(now + DAY_SECONDS, UTC)
    event_filter = EventFilter(
        any_resource=EventAnyResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        occurred=EventOccurredFilter(since=since, until=until),
    )
    page = await client.read_events(event_filter, limit=1)  # the latest event
    for event in page.events:
        last_sign = max(last_sign, event.occurred.timestamp())
    return max(0.0, now - last_sign)


def _describe_left(owner: str, boxes: list[SandboxInfo], about: str) -> str:
    """Return a sentence that an owner's sandboxes stay, and what removes them."""
    start = f"left: {_count(boxes)} of {owner}"
    if all(is_owner_alive(info) for info in boxes):
        return f"{start}, whose process is alive on this machine"
    hosts = ", ".join(sorted({info.host or "an unknown machine" for info in boxes}))
    return f"{start} on {hosts}, {about}; reap on that machine removes them once their process has ended"


async def _find_outermost_caller(client: PrefectClient, run: FlowRun) -> FlowRun | None:
    """Return the outermost flow run that called `run` in the same process; None if the run has its own process."""
    caller: FlowRun | None = None
    with suppress(ObjectNotFound):
        # Each run of a deployment has a new process.
        while run.parent_task_run_id is not None and run.deployment_id is None:
            calling_task_run = await client.read_task_run(run.parent_task_run_id)
            if calling_task_run.flow_run_id is None:
                break
            run = caller = await client.read_flow_run(calling_task_run.flow_run_id)
    return caller


async def get_server_id() -> str:
    """Return the id of the Prefect server from a Prefect Variable, or an empty text if the server refuses variables.

    The id is in the labels of sandboxes. By it, `find_orphans` distinguishes a deleted flow run of this server from a
    run of another server. Two servers have the same id if the database of one is a copy of the other's. Then each takes
    the other's runs for deleted, so a person must delete the variable on one of them.
    """
    try:
        async with get_client() as client:
            return (await read_server_variable(client))["id"]
    except PrefectHTTPStatusError as error:
        text = "the Prefect server refused the variable %s (%s): sandboxes of dead processes stay until they expire"
        get_logger("rlm_batch").warning(text, VARIABLE_NAME, describe_server_error(error))
        return ""


_own_runs: set[str] = set()


def register_own_run(run_id: str) -> None:
    """Record that a flow run is in this process. Then `remove_sandboxes` leaves its sandboxes to its lanes."""
    _own_runs.add(run_id)


async def remove_sandboxes(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Remove the sandboxes of a dead flow run. A hook for cancelled and crashed runs.

    Prefect calls the hook in the worker, which knows the provider only from the run's parameters.
    """
    if str(flow_run.id) in _own_runs:
        return
    log = flow_run_logger(flow_run, flow)
    try:
        parameters = flow_run.parameters or {}
        options = parameters.get("options", parameters)  # The flow of a shard has them in its parameter `options`.
        provider = await resolve_provider(options.get("provider") or "local", options.get("provider_options"))
        now = time.time()
        reason = f"its flow run is {state.name}"
        orphans: list[OrphanedSandbox] = []
        for info in await provider.list_sandboxes():
            is_of_run = info.run == str(flow_run.id) and info.labels.get("managed-by") == "rlm-batch"
            if is_of_run and info.kept_until <= now:
                orphans.append(_make_orphan(info, reason, now))
        removed, errors = await remove_orphans(provider, orphans)
    except RlmBatchError as error:
        log.warning("the sandboxes of this run could not be listed, and stay until they expire: %s", error)
        return
    if removed:
        log.info("%s", describe_removal(removed, provider.provider_name, "removed"))
    for sandbox, error in errors.items():
        log.warning("sandbox %s could not be removed, and stays until it expires: %s", sandbox, error.summary)


def describe_removal(orphans: list[OrphanedSandbox], provider: str, verb: str) -> str:
    """Return a sentence with the number of sandboxes, their machine, and the sandbox seconds that they have cost."""
    if find_provider_name(provider) in MACHINE_PROVIDERS:
        provider = f"{provider} on {socket.gethostname()}"
    if not orphans:
        return f"no unused sandboxes of {provider}"
    seconds = sum(orphan.seconds for orphan in orphans)
    unknown = sum(not orphan.info.began for orphan in orphans)
    note = f" (of {unknown} it is not known)" if unknown else ""
    return f"{_count(orphans)} of {provider} {verb}, after {seconds:,.0f} sandbox seconds{note}"


def _count(sandboxes: Sized) -> str:
    return f"{len(sandboxes)} {'sandbox' if len(sandboxes) == 1 else 'sandboxes'}"
