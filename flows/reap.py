"""The flow `reap`, which removes orphaned sandboxes: their flow run has ended, or their host process has died."""

import time
from collections.abc import Callable
from typing import Annotated

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.states import Crashed
from pydantic import Field

from ..blocks.provider import SandboxProvider
from ..blocks.registry import resolve_provider
from ..sandbox.errors import RlmBatchError, SandboxesLeft
from ..sandbox.outcomes.server_message import describe_server_error
from ..tasks.capacity.limits import return_lost_slots
from .listener import FlowListener
from .orphans import (
    MIN_SILENCE_SECONDS,
    describe_removal,
    find_orphans,
    get_server_id,
    is_owner_alive,
    measure_silence,
    remove_orphans,
)
from .parameters import Provider
from .prefect_flow import define_function_flow, get_current_flow
from .registry import FLOWS, load_model

# Seconds of silence after which no process runs a flow run. A process without a server ends after four minutes.
MAX_SILENCE_SECONDS = 600
DEAD = "its process has sent no heartbeat for ten minutes, so it has died. Retry the flow run to run the rest"
SILENCE = "Seconds of silence after which sandboxes of an unfinished flow run are removed, too; at least 360."
OlderThan = Annotated[float | None, Field(ge=MIN_SILENCE_SECONDS, description=SILENCE)]
DryRun = Annotated[bool, Field(description="Show what would be removed, and remove nothing.")]
Kept = Annotated[bool, Field(description="Also remove what keep_failed keeps, before its hour is over.")]


@define_function_flow("rlm-reap")
async def reap(
    provider: Provider = "local", older_than: OlderThan = None, dry_run: DryRun = False, kept: Kept = False
) -> list[str]:
    """Remove the provider's unused sandboxes, and end flow runs whose process died without a message.

    Flow runs of rlm-batch that are Running, but have sent no heartbeat for ten minutes, become Crashed.

    Only sandboxes with rlm-batch's labels (`managed-by=rlm-batch`) are removed, in these cases:

    - The sandbox has expired. This uses this machine's clock, so the clocks of all hosts must be right.
    - The sandbox has this server's label, and its flow run has ended or was deleted, or the run's caller in the same
      process has ended.
    - A process of this machine opened the sandbox and has ended or was killed (`rlm-batch-process`). Of local
      sandboxes, only those of this user are removed.
    - `keep_failed` kept the sandbox, and its hour has passed, or `kept` is set.

    Snapshots of sandboxes' set-ups that have been unused for the block's `snapshot_ttl` are deleted too.

    Slots of a block's limit are given back if the Prefect server has lost their leases.

    All other sandboxes stay: those of scripts and of other servers until they expire, and those of flow runs that have
    not ended. The log names the rlm-batch sandboxes that stay, with the reason.

    A flow run whose process was killed may still have a running state on the server. If the process is on another
    machine or in another container, its sandboxes stay until they expire, or until the run has been silent for longer
    than `older_than` seconds. Silence counts from the run's last state, the start of its newest sandbox, and the last
    event of the run or its task runs on the server. A live flow run sends a heartbeat every 180 s
    (PREFECT_FLOWS_HEARTBEAT_FREQUENCY), so `older_than` must be longer, and less than 360 is refused. A worker without
    a connection to the server is silent too.

    Returns:
        The ids of the removed sandboxes; with `dry_run`, of those that would be removed.

    Raises:
        ConfigurationError: A parameter is wrong.
        SandboxesLeft: Some sandboxes could not be removed.
    """
    log = get_run_logger()
    listener = get_current_flow().listener or FlowListener()

    def report(sentence: str) -> None:
        log.info("%s", sentence)
        listener.on_warning(sentence)

    block = await resolve_provider(provider)
    await _end_dead_runs(block, report, dry_run=dry_run)
    findings = await find_orphans(block, await get_server_id(), older_than, takes_kept=kept)
    for sentence in findings.kept:
        report(sentence)
    if not dry_run:
        try:
            async with get_client() as client:
                for limit in await return_lost_slots(client):
                    report(
                        f"the {limit.active_slots} slots in use of {limit.name} are free again, because a restart of "
                        "the Prefect server has lost who held them; runs that still use one take it again"
                    )
        except httpx.HTTPError as error:
            report(f"lost slots could not be looked for: {describe_server_error(error)}")
    for orphan in findings.orphans:
        log.info("sandbox %s of run %s: %s", orphan.info.id, orphan.info.run or "(a script)", orphan.reason)
    try:
        for sentence in await _delete_expired_snapshots(block, dry_run=dry_run):
            report(sentence)
    except RlmBatchError as error:
        report(f"unused snapshots could not be deleted: {error.summary}")
    removed, errors, verb = findings.orphans, {}, "would be removed"
    if not dry_run:
        removed, errors = await remove_orphans(block, findings.orphans)
        verb = "removed"
    listener.on_orphans(removed)
    log.info("%s", describe_removal(removed, block.provider_name, verb))
    if errors:
        sandbox, error = next(iter(errors.items()))
        raise SandboxesLeft(
            f"{len(errors)} of {len(findings.orphans)} sandboxes could not be removed, the first is "
            f"{sandbox}: {error.summary} -- reap again later",
            sandboxes=list(errors),
        )
    return [orphan.info.id for orphan in removed]


async def _end_dead_runs(block: SandboxProvider, report: Callable[[str], None], *, dry_run: bool) -> None:
    """Let the flow runs that no process runs any more end as Crashed, and report each. Raises RlmBatchError."""
    alive = {info.run for info in await block.list_sandboxes() if is_owner_alive(info)}
    ours = [*(load_model(name).prefect_name for name in FLOWS), "rlm-shard"]
    flows = FlowFilter.model_validate({"name": {"any_": ours}})
    running = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING"]}}})
    verb = "would become" if dry_run else "becomes"
    async with get_client() as client:
        for run in await client.read_flow_runs(flow_filter=flows, flow_run_filter=running):
            is_silent = await measure_silence(client, run, [], time.time()) > MAX_SILENCE_SECONDS
            if is_silent and str(run.id) not in alive:
                if not dry_run:
                    await client.set_flow_run_state(run.id, Crashed(message=DEAD))
                report(f"flow run {run.name} {verb} Crashed: {DEAD}")


async def _delete_expired_snapshots(block: SandboxProvider, *, dry_run: bool) -> list[str]:
    """Delete the snapshots of set-ups that have expired, and return a sentence about each. Raises RlmBatchError."""
    sentences: list[str] = []
    for snapshot in await block.list_snapshots():
        if snapshot.expires < time.time():
            if not dry_run:
                await block.delete_snapshot(snapshot.id)
            days = (time.time() - snapshot.last_used) / 86_400
            verb = "would be deleted" if dry_run else "deleted"
            sentences.append(
                f"snapshot {snapshot.name} of a set-up {verb}: unused for {days:.0f} days, {snapshot.size:.1f} GiB"
            )
    return sentences
