"""The command `rlm-batch worker`: a Prefect process worker that ends its flow runs properly before it ends."""

import asyncio
import os
import signal
from abc import ABC
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from prefect.client.schemas.objects import FlowRun
from prefect.workers.process import ProcessWorker

from ..flows.child_process import list_children
from .deploy import WORK_POOL, open_client

RUN_GRACE_SECONDS = 30.0  # seconds in which a flow run removes its sandboxes and reports its state
HOOK_GRACE_SECONDS = 20.0  # seconds in which a hook removes the sandboxes of a killed flow run
POLL_SECONDS = 0.1  # seconds between two looks at the flow runs that are to end


class DrainingWorker(ProcessWorker, ABC):  # Prefect does not register an abstract class as its worker of the type.
    """Prefect's process worker, which starts no more flow runs once it is draining."""

    is_draining = False

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Start the flow runs that are due, and return them."""
        return [] if self.is_draining else await super().get_and_submit_flow_runs()


def worker(
    *,
    work_pool: Annotated[str, Parameter(metavar="POOL")] = WORK_POOL,
    name: Annotated[str | None, Parameter(metavar="NAME")] = None,
    limit: Annotated[int, Parameter(metavar="N")] = 4,
    with_healthcheck: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run the flow runs of a process pool until SIGINT, SIGTERM or SIGHUP, then end them.

    Prefect's own worker kills its flow runs instead. They stay Running, and their sandboxes remain.

    Args:
        work_pool: Work pool, as `rlm-batch deploy` creates it
        name: Name of the worker on the server; by default a random one
        limit: Number of flow runs at a time, each a process of 120 MB or more
        with_healthcheck: Answer GET /health on PREFECT_WORKER_WEBSERVER_PORT, by default 8080

    Raises:
        ConfigurationError: No server is configured, or it does not answer.
    """
    process_worker = DrainingWorker(work_pool, name=name, limit=limit, create_pool_if_not_found=False)
    asyncio.run(_run_until_stopped(process_worker, with_healthcheck))


async def _run_until_stopped(process_worker: DrainingWorker, with_healthcheck: bool) -> None:
    async with open_client():
        pass  # The server answers.
    stop = asyncio.Event()  # A second signal must not interrupt the end of the flow runs.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.create_task(process_worker.start(with_healthcheck=with_healthcheck))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.is_set():
        print("Ending the flow runs and the worker.", flush=True)
        process_worker.is_draining = True
        await _end_flow_runs(process_worker)
        serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


async def _end_flow_runs(process_worker: DrainingWorker) -> None:
    """End the worker's flow runs. They get SIGTERM, and SIGKILL after `RUN_GRACE_SECONDS`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + RUN_GRACE_SECONDS
    last_deadline = deadline + HOOK_GRACE_SECONDS
    signalled: set[int] = set()
    # Each token is a flow run that the worker starts, watches or reports.
    while process_worker.is_setup and process_worker.limiter.borrowed_tokens and loop.time() < last_deadline:
        signal_flow_runs(list_children(os.getpid()), signalled, is_late=loop.time() > deadline)
        await asyncio.sleep(POLL_SECONDS)


def signal_flow_runs(pids: Iterable[int], signalled: set[int], *, is_late: bool) -> None:
    """Send SIGTERM to the processes of flow runs that are not in `signalled`, or if it is late SIGKILL to all.

    The hook of a flow run cleans up after it, and ends by itself.
    """
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError, FileNotFoundError):
            is_hook = b"hook" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if is_hook or (pid in signalled and not is_late):
                continue
            signalled.add(pid)
            send = os.killpg if os.getpgid(pid) == pid else os.kill  # A flow run leads a process group.
            send(pid, signal.SIGKILL if is_late else signal.SIGTERM)
