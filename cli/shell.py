"""The command `shell`: a terminal in the sandbox of a failed execution that `--keep-failed` has kept."""

import os
import sys
import time

from ..blocks.provider import SandboxInfo, SandboxProvider
from ..flows.parameters import Options
from ..flows.prefect_server import provide_server
from ..sandbox.errors import ConfigurationError
from .earlier_run import find_model, open_run, read_parameters
from .run_flow import run_until_interrupted


def shell(run: str, number: int, /) -> int:
    """Open a terminal in the kept sandbox of an execution, and return the exit status of its shell.

    Only the run's own Prefect server has the settings of the run's provider.

    Args:
        run: Id or name of a flow run, or the path of its results
        number: The number of the execution in the run's table

    Raises:
        ConfigurationError: There is no such run, execution or kept sandbox, or this process has no terminal.
    """
    reader = open_run(run)
    meta = reader.find_outcome(number).meta
    if meta.kept_until is None:
        raise ConfigurationError(
            f"the sandbox of execution {number} was not kept: --keep-failed keeps those of a run's first three "
            "failures, and with shards that of each shard's first"
        )
    sandbox_id = meta.sandbox_id
    if not (os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())):
        raise ConfigurationError("shell needs a terminal for its input and its output: start it in one, without pipes")
    model = find_model(reader)
    assert model is not None  # Only flows of rlm-batch keep sandboxes.
    options = model.parse(read_parameters(reader)).options
    provider = run_until_interrupted(lambda: _resolve_provider(options))

    from ..flows.orphans import describe_kept

    async def open_terminal() -> int:
        if await _find_kept(provider, sandbox_id) is None:
            raise ConfigurationError(
                f"the sandbox {sandbox_id} is gone, because it was removed or its hour is over: rlm-batch rerun {run} "
                f"{number} --keep-failed"
            )
        status = await provider.open_terminal(sandbox_id)
        info = await _find_kept(provider, sandbox_id)
        fate = "gone" if info is None else describe_kept(provider, info)
        print(f"The sandbox is {fate}.", file=sys.stderr)
        return status

    return run_until_interrupted(open_terminal)


async def _resolve_provider(options: Options) -> SandboxProvider:
    from ..flows.engine.run import resolve_run_provider

    async with provide_server():  # A saved block is on the server.
        return await resolve_run_provider(options)


async def _find_kept(provider: SandboxProvider, sandbox_id: str) -> SandboxInfo | None:
    """Return the kept sandbox, or None if it is missing or its time has passed."""
    for info in await provider.list_sandboxes():
        if info.id == sandbox_id and info.kept_until > time.time():
            return info
    return None
