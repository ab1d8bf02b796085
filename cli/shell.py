"""The command `shell`: a terminal in the sandbox of a failed execution that `--keep-failed` has kept."""

import os
import sys
import time
import uuid
from collections.abc import Callable

from ..blocks.provider import SandboxInfo, SandboxProvider
from ..flows.parameters import Options
from ..flows.prefect_server import provide_server
from ..flows.reporting.ledger_reader import LedgerReader
from ..sandbox.errors import ConfigurationError
from .earlier_run import find_model, read_parameters
from .report import open_run
from .run_flow import run_until_interrupted


def shell(run: str, number: int, /) -> int:
    """Open a terminal in the kept sandbox of an execution, and return the exit status of its shell.

    The Prefect server has the settings of the run's provider, so it must be the server of the run.

    Args:
        run: Id or name of a flow run, or the path of its results
        number: The number of the execution in the run's table

    Raises:
        ConfigurationError: There is no such run, execution or kept sandbox, or this process has no terminal.
    """
    reader = open_run(run)
    sandbox_id = _read_sandbox_id(reader, run, number)
    if not (os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())):
        raise ConfigurationError("shell needs a terminal for its input and its output: start it in one, without pipes")
    model = find_model(reader)
    if model is None:
        raise ConfigurationError(
            f"{run} is of {reader.records[-1].flow}, and shell takes only runs of rlm-batch's flows"
        )
    parameters = model.parse(read_parameters(reader))
    provider = run_until_interrupted(_resolve_provider(parameters.options))
    runs = run_until_interrupted(_list_flow_runs(reader)) if sandbox_id is None else set[str]()

    def is_wanted(info: SandboxInfo) -> bool:
        return info.id == sandbox_id if sandbox_id else info.execution == number and info.run in runs

    async def open_terminal() -> tuple[int, SandboxInfo | None]:
        info = await _find_kept(provider, is_wanted)
        if info is None:
            reason = f"the run has no outcome of execution {number}, and no kept sandbox of it"
            if sandbox_id:
                reason = f"the sandbox {sandbox_id} is gone, because it was removed or its hour is over"
            raise ConfigurationError(f"{reason}: rlm-batch rerun {run} {number} --keep-failed")
        status = await provider.open_terminal(info.id)
        return status, await _find_kept(provider, is_wanted)

    status, info = run_until_interrupted(open_terminal())
    if info is None:
        print("The sandbox is gone.", file=sys.stderr)
    else:
        from ..flows.orphans import describe_kept

        print(f"The sandbox is {describe_kept(provider, info)}.", file=sys.stderr)
    return status


def _read_sandbox_id(reader: LedgerReader, run: str, number: int) -> str | None:
    """Return the id of an execution's kept sandbox from the ledger; None without an outcome. Raises ConfigurationError.

    A killed run may have kept a sandbox without an outcome.
    """
    outcome = next((outcome for outcome in reader.read_outcomes() if outcome.meta.index == number), None)
    if outcome is None and not 0 <= number < reader.records[-1].total:
        raise ConfigurationError(f"the run has no execution {number}: rlm-batch report {run} lists them")
    if outcome is None:
        return None
    if outcome.meta.kept_until is None:
        raise ConfigurationError(
            f"the sandbox of execution {number} was not kept: --keep-failed keeps those of a run's first three "
            "failures, and with shards that of each shard's first"
        )
    return outcome.meta.sandbox_id


async def _resolve_provider(options: Options) -> SandboxProvider:
    from ..flows.engine.run import resolve_run_provider

    async with provide_server():  # A saved block is on the server.
        return await resolve_run_provider(options)


async def _list_flow_runs(reader: LedgerReader) -> set[str]:
    """Return the ids of the flow runs that wrote to a ledger, with those of shards."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId

    runs, offset = {record.flow_run_id for record in reader.records}, 0
    only = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[uuid.UUID(run) for run in runs]))
    async with provide_server(), get_client() as client:
        while found := await client.read_flow_runs(flow_run_filter=only, offset=offset):
            runs.update(str(run.id) for run in found)
            offset += len(found)
    return runs


async def _find_kept(provider: SandboxProvider, is_wanted: Callable[[SandboxInfo], bool]) -> SandboxInfo | None:
    """Return the sandbox that is wanted, unless its hour is over. None if there is none."""
    kept = [info for info in await provider.list_sandboxes() if info.kept_until > time.time()]
    return next(filter(is_wanted, kept), None)
