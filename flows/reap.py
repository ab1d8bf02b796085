"""The reap flow: removes the sandboxes that are left of flow runs and hosts which are over."""

from typing import Annotated

from prefect import get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from ..blocks.registry import resolve_provider
from ..sandbox.errors import SandboxesLeft
from .cleanup.orphans import MIN_SILENCE_SECONDS, describe_removal, find_orphans, get_server_id, remove_orphans
from .listener import FlowListener
from .parameters import Provider
from .prefect_flow import define_function_flow
from .run_state import get_run_state

OlderThan = Annotated[
    float | None,
    Field(
        ge=MIN_SILENCE_SECONDS,
        description="Also take the sandboxes of a flow run that is not over, but has been silent for so many seconds",
    ),
]
DryRun = Annotated[bool, Field(description="Say what would be removed, and remove nothing")]


@define_function_flow("reap")
async def reap(provider: Provider = "local", older_than: OlderThan = None, dry_run: DryRun = False) -> list[str]:
    """Removes the provider's sandboxes that nobody uses any more, and returns their ids.

    It takes only what carries our labels (`managed-by=rlm-batch`), and of that
    - what is past its expiry (by this machine's clock, which has to be right, as those of all hosts),
    - where the server's label is this server's, what belongs to a flow run that has ended or was deleted, or whose
      caller in the same process has ended,
    - what a process of this machine opened that has ended, killed ones too (`rlm-batch-process`; of local sandboxes,
      only this user's).
    All else stays: what is not ours, a script's or another server's until its expiry, and what is of a flow run that
    has not ended. The log says of ours what stays, and why.

    A run whose process was killed may not have ended by its state, for nobody told the server. Where its process
    cannot be seen, from another machine or container, its sandboxes stay until their expiry, or until it has been
    silent for longer than `older_than` seconds: since its last state, the beginning of its newest sandbox, and the last
    event that the server has of it or of its task runs. A live flow run says that it lives every 180 s
    (PREFECT_FLOWS_HEARTBEAT_FREQUENCY): more than that, and less than 360 is refused. A worker that was cut off from
    the server for so long is silent too.

    Raises SandboxesLeft when all is done and some could not be removed.
    """
    log, listener = get_run_logger(), get_run_state(flow_run.id).listener or FlowListener()
    block = await resolve_provider(provider)
    findings = await find_orphans(block, await get_server_id(), older_than)
    orphans = findings.orphans
    for sentence in findings.kept:
        log.info("%s", sentence)
        listener.on_warning(sentence)
    for orphan in orphans:
        log.info("sandbox %s of run %s: %s", orphan.info.id, orphan.info.run or "(a script)", orphan.reason)
    if dry_run:
        listener.on_orphans(orphans)
        log.info("%s", describe_removal(orphans, block.provider_name, "would be removed"))
        return [orphan.info.id for orphan in orphans]
    removal = await remove_orphans(block, orphans)
    listener.on_orphans(removal.removed)
    log.info("%s", describe_removal(removal.removed, block.provider_name, "removed"))
    if removal.errors:
        sandbox, error = next(iter(removal.errors.items()))
        raise SandboxesLeft(
            f"{len(removal.errors)} of {len(orphans)} sandboxes could not be removed, {sandbox} first: {error.summary} "
            "-- reap again; they end with their lifetime at the latest",
            sandboxes=list(removal.errors),
        )
    return [orphan.info.id for orphan in removal.removed]
