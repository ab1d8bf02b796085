"""The command `shell`: a terminal in the sandbox of a failed execution that `--keep-failed` has kept."""

import asyncio
import os
import sys
import time

from ..blocks.provider import SandboxInfo, SandboxProvider
from ..flows.parameters import Options
from ..flows.prefect_server import provide_server
from ..flows.reporting.ledger_reader import LedgerReader
from ..sandbox.errors import ConfigurationError
from ..sandbox.meta import Meta
from .earlier_run import find_model, read_parameters
from .report import open_run


def open_shell(run: str, number: int) -> int:
    """Open a terminal in the kept sandbox of an execution, and return the exit status of its shell.

    The Prefect server has the settings of the run's provider, so it must be the server of the run.

    Raises:
        ConfigurationError: There is no such run, execution or kept sandbox, or this process has no terminal.
    """
    reader = open_run(run)
    meta = _find_meta(reader, run, number)
    if not (os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())):
        raise ConfigurationError("shell needs a terminal for its input and its output: start it in one, without pipes")
    model = find_model(reader)
    if model is None:
        raise ConfigurationError(
            f"{run} is of {reader.records[-1].flow}, and shell takes only runs of rlm-batch's flows"
        )
    parameters = model.parse(read_parameters(reader))
    provider = asyncio.run(_resolve_provider(parameters.make_options(), getattr(parameters, "volume_name", None)))
    status, info = asyncio.run(_open_terminal(provider, meta, f"rlm-batch rerun {run} {number} --keep-failed"))
    if info is None:
        print("The sandbox is gone.", file=sys.stderr)
    else:
        from ..flows.orphans import describe_kept

        print(f"The sandbox is {describe_kept(provider, info)}.", file=sys.stderr)
    return status


def _find_meta(reader: LedgerReader, run: str, number: int) -> Meta:
    """Return the meta of an execution whose sandbox was kept. Raises ConfigurationError."""
    outcome = next((outcome for outcome in reader.read_outcomes() if outcome.meta.index == number), None)
    if outcome is None:
        raise ConfigurationError(f"the run has no execution {number}: rlm-batch report {run} lists them")
    if outcome.meta.kept_until is None:
        raise ConfigurationError(
            f"the sandbox of execution {number} was not kept: --keep-failed keeps those of a run's first three failures"
        )
    return outcome.meta


async def _resolve_provider(options: Options, volume_name: str | None) -> SandboxProvider:
    from ..flows.engine.context import resolve_provider_with_volume

    async with provide_server():  # A saved block is on the server.
        return await resolve_provider_with_volume(options, volume_name)


async def _open_terminal(provider: SandboxProvider, meta: Meta, advice: str) -> tuple[int, SandboxInfo | None]:
    """Open the terminal, and return the shell's exit status, and the sandbox unless it is gone."""
    info = await _find_sandbox(provider, meta.sandbox_id)
    if info is None or info.kept_until <= time.time():
        raise ConfigurationError(
            f"the sandbox {meta.sandbox_id} is gone, because it was removed or its hour is over: {advice}"
        )
    status = await provider.open_terminal(info.id)
    return status, await _find_sandbox(provider, info.id)


async def _find_sandbox(provider: SandboxProvider, sandbox_id: str) -> SandboxInfo | None:
    return next((info for info in await provider.list_sandboxes() if info.id == sandbox_id), None)
