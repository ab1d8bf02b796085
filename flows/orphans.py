"""The search for orphaned sandboxes, whose flow runs or processes have ended, and their removal."""

import asyncio
import itertools
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sized
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventOccurredFilter
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_logger
from prefect.logging.loggers import flow_run_logger

from ..blocks.provider import SandboxInfo, SandboxProvider
from ..blocks.registry import resolve_provider
from ..sandbox.errors import RlmBatchError
from ..sandbox.outcomes.server_message import describe_server_error
from ..sandbox.process_identity import is_process_alive

VARIABLE_NAME = "rlm_batch_server"
MIN_SILENCE_SECONDS = 360  # twice the interval at which flow runs send Prefect their heartbeats
PAGE_SIZE = 200  # the most flow runs that the server returns
MAX_CONCURRENT_REMOVALS = 8
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class OrphanedSandbox:
    """A sandbox that nothing uses any more, the reason, and its age in seconds."""

    info: SandboxInfo
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Findings:
    """The sandboxes of a provider that nothing uses, and sentences on why the others stay."""

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

    With `takes_kept`, sandboxes that `keep_failed` still keeps count as unused.

    Raises the errors of `list_sandboxes`.
    """
    now = time.time() if now is None else now
    # Sandboxes are listed before their runs, so that a run's state is not older than its sandboxes.
    ours = [info for info in await provider.list_sandboxes() if info.labels.get("managed-by") == "rlm-batch"]
    reasons: dict[str, str] = {}
    candidates = defaultdict[uuid.UUID, list[SandboxInfo]](list)  # The keys are flow runs.
    others = defaultdict[tuple[str, str], list[SandboxInfo]](list)  # The keys are owner and process.
    kept: list[str] = []
    for info in ours:
        if info.kept_until > now and not takes_kept:
            execution = "a failed execution" if info.execution is None else f"the failed execution {info.execution}"
            run = f" of flow run {info.run}" if info.run else ""
            kept.append(f"left: sandbox {info.id} of {execution}{run}, {describe_kept(provider, info)}")
        elif reason := _find_own_reason(info, now):
            reasons[info.id] = reason
        elif server and info.server == server and info.run:
            candidates[uuid.UUID(info.run)].append(info)
        else:
            others["a flow run of another server" if info.run else "a script", info.process].append(info)
    if candidates:
        async with get_client() as client:
            runs = await read_flow_runs(client, candidates)
            for run_id, boxes in candidates.items():
                run, reason = runs.get(run_id), ""
                if run is None:
                    reason = "its flow run was deleted"
                elif run.state is None or run.state.is_final():
                    reason = _describe_state(run)
                elif (caller := await _find_outermost_caller(client, run)) and caller.state and caller.state.is_final():
                    reason = f"the flow run that called its own is {caller.state.name}"
                else:
                    is_seen = older_than is None and all(map(_is_owner_alive, boxes))
                    silence = 0.0 if is_seen else await measure_silence(client, run, boxes, now)
                    if older_than is not None and silence > older_than:
                        reason = f"{_describe_state(run)}, and has been silent for more than {older_than:,.0f} s"
                    else:
                        about = f"silent for {silence:,.0f} s: `--older-than SECONDS` removes those of silent runs"
                        kept.append(_describe_left(f"flow run {run.name}", boxes, about))
                if reason:
                    reasons.update((info.id, reason) for info in boxes)
    for (owner, _), boxes in others.items():
        hours = (max(info.expires for info in boxes) - now) / 3600
        kept.append(_describe_left(owner, boxes, f"until their lifetime ends within {max(0.0, hours):.1f} h"))
    return Findings([_make_orphan(info, reasons[info.id], now) for info in ours if info.id in reasons], kept)


def _find_own_reason(info: SandboxInfo, now: float) -> str:
    """Return why a sandbox is unused according to its labels, or an empty text if they show no reason."""
    if info.kept_until:
        return "it was kept for a failed execution"
    if info.abandoned:
        return "its host has died"
    if 0 < info.expires <= now:
        return "its lifetime is over"
    return "its process has ended" if _is_owner_alive(info) is False else ""


def describe_kept(provider: SandboxProvider, info: SandboxInfo) -> str:
    """Return a phrase on how long a sandbox is kept, and on how to remove it sooner."""
    until = datetime.fromtimestamp(info.kept_until).astimezone()
    return f"kept until {until:%H:%M %Z}; `rlm-batch reap --kept --provider {provider.provider_name}` removes it sooner"


async def remove_orphans(
    provider: SandboxProvider, orphans: list[OrphanedSandbox]
) -> tuple[list[OrphanedSandbox], dict[str, RlmBatchError]]:
    """Remove sandboxes, some at a time. An error does not prevent the removal of the others.

    Returns:
        The removed sandboxes, and the errors of others by id. Sandboxes that were gone are in neither.
    """
    errors, gate = dict[str, RlmBatchError](), asyncio.Semaphore(MAX_CONCURRENT_REMOVALS)

    async def remove_one(info: SandboxInfo) -> bool:
        async with gate:
            try:
                return await provider.delete_sandbox(info.id)
            except RlmBatchError as error:
                errors[info.id] = error
                return False

    were_removed = await asyncio.gather(*(remove_one(orphan.info) for orphan in orphans))
    return list(itertools.compress(orphans, were_removed)), errors


def _make_orphan(info: SandboxInfo, reason: str, now: float) -> OrphanedSandbox:
    return OrphanedSandbox(info, reason, max(0.0, now - info.began) if info.began else 0.0)


async def read_flow_runs(client: PrefectClient, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, FlowRun]:
    """Return the flow runs with these ids that the server has, by id."""
    wanted, runs = sorted(ids), dict[uuid.UUID, FlowRun]()
    for start in range(0, len(wanted), PAGE_SIZE):
        only = FlowRunFilter(id=FlowRunFilterId(any_=wanted[start : start + PAGE_SIZE]))
        runs |= {run.id: run for run in await client.read_flow_runs(flow_run_filter=only, limit=PAGE_SIZE)}
    return runs


def _is_owner_alive(info: SandboxInfo) -> bool | None:
    """Return whether the process that opened a sandbox lives; None if it is on another machine.

    The machine's name is compared too: a copy of a machine's memory image has the same boot id and process ids.
    """
    return is_process_alive(info.process) if info.host == socket.gethostname() else None


def _describe_state(run: FlowRun) -> str:
    return f"its flow run is {run.state.name if run.state is not None else 'over'}"


async def measure_silence(client: PrefectClient, run: FlowRun, boxes: list[SandboxInfo], now: float) -> float:
    """Return the seconds since a flow run changed its state, opened a sandbox, or was the subject of an event."""
    stated = run.state.timestamp.timestamp() if run.state is not None else 0.0
    heard = min(now, max([stated, *(info.began for info in boxes)]))  # A label may have any time.
    # Events may have times after `now`, from a machine whose clock is ahead of this one's.
    since, until = (cast("Any", datetime.fromtimestamp(seconds, UTC)) for seconds in (heard, now + DAY_SECONDS))
    later = EventOccurredFilter(since=since, until=until)
    of_this_run = EventAnyResourceFilter(id=[f"prefect.flow-run.{run.id}"])
    page = await client.read_events(EventFilter(any_resource=of_this_run, occurred=later), limit=1)  # the latest event
    return max(0.0, now - max([heard, *(event.occurred.timestamp() for event in page.events)]))


def _describe_left(owner: str, boxes: list[SandboxInfo], about: str) -> str:
    """Return a sentence that an owner's sandboxes stay, and what removes them."""
    left = f"left: {_count(boxes)} of {owner}"
    if all(map(_is_owner_alive, boxes)):
        return f"{left}, whose process is alive on this machine"
    hosts = ", ".join(sorted({info.host or "an unknown machine" for info in boxes}))
    return f"{left} on {hosts}, {about}; reap on that machine removes them once their process has ended"


async def _find_outermost_caller(client: PrefectClient, run: FlowRun) -> FlowRun | None:
    """Return the outermost flow run that called `run` in the same process; None if the run has its own process."""
    caller: FlowRun | None = None
    with suppress(ObjectNotFound):
        # Each run of a deployment has a new process.
        while run.parent_task_run_id is not None and run.deployment_id is None:
            caller_id = (await client.read_task_run(run.parent_task_run_id)).flow_run_id
            if caller_id is None:
                break
            run = caller = await client.read_flow_run(caller_id)
    return caller


async def get_server_id() -> str:
    """Return the id of the Prefect server from a Prefect Variable, or an empty text if the server refuses variables.

    With the id in sandboxes' labels, `find_orphans` distinguishes a deleted flow run of this server from a run of
    another server. A server whose database is a copy of another server's has the same id, and would treat the other
    server's runs as deleted: delete the variable on one of the two servers.
    """
    try:
        async with get_client() as client:
            variable = await client.read_variable_by_name(VARIABLE_NAME)
            if variable is None:
                action = VariableCreate(name=VARIABLE_NAME, value=uuid.uuid4().hex, tags=["rlm-batch"])
                try:
                    variable = await client.create_variable(action)
                except ObjectAlreadyExists:  # Another process has created it meanwhile.
                    variable = await client.read_variable_by_name(VARIABLE_NAME)
    except PrefectHTTPStatusError as error:
        text = "the Prefect server refused the variable %s (%s): sandboxes of dead processes stay until they expire"
        get_logger("rlm_batch").warning(text, VARIABLE_NAME, describe_server_error(error))
        return ""
    return variable.value if variable is not None and isinstance(variable.value, str) else ""


_own_runs: set[str] = set()


def register_own_run(run_id: str) -> None:
    """Record that a flow run is in this process, whose lanes remove their own sandboxes."""
    _own_runs.add(run_id)


async def remove_sandboxes(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Remove the sandboxes of a dead flow run: a hook for cancelled and crashed runs.

    Prefect calls the hook in the worker, which knows the provider only from the run's parameters.
    """
    if str(flow_run.id) in _own_runs:
        return
    log = flow_run_logger(flow_run, flow)
    try:
        parameters = flow_run.parameters or {}
        options = parameters.get("options", parameters)  # A shard's flow has these in its parameter `options`.
        provider = await resolve_provider(options.get("provider") or "local", options.get("provider_options"))
        now, sandboxes = time.time(), await provider.list_sandboxes()
        reason = f"its flow run is {state.name}"
        orphans = [
            _make_orphan(info, reason, now)
            for info in sandboxes
            if info.run == str(flow_run.id) and info.labels.get("managed-by") == "rlm-batch" and info.kept_until <= now
        ]
        removed, errors = await remove_orphans(provider, orphans)
    except RlmBatchError as error:
        log.warning("the sandboxes of this run could not be listed, and stay until they expire: %s", error)
        return
    if removed:
        log.info("%s", describe_removal(removed, provider.provider_name, "removed"))
    for sandbox, error in errors.items():
        log.warning("sandbox %s could not be removed, and stays until it expires: %s", sandbox, error.summary)


def describe_removal(orphans: list[OrphanedSandbox], provider: str, verb: str) -> str:
    """Return a sentence with the number of sandboxes and the sandbox seconds that they have cost."""
    if not orphans:
        return f"no unused sandboxes of {provider}"
    seconds = sum(orphan.seconds for orphan in orphans)
    unknown = sum(not orphan.info.began for orphan in orphans)
    rest = f" (of {unknown} it is not known)" if unknown else ""
    return f"{_count(orphans)} of {provider} {verb}, after {seconds:,.0f} sandbox seconds{rest}"


def _count(sandboxes: Sized) -> str:
    return f"{len(sandboxes)} {'sandbox' if len(sandboxes) == 1 else 'sandboxes'}"
