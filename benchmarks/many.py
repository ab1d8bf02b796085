"""What many sandboxes at once cost the one process that drives them.

    python benchmarks/many.py [--sandboxes 1,50,300] [--provider daytona] [--each 4] [--wait SECONDS] [--reuse yes]

A flow run in a process of its own has that many workers, each with a sandbox at a local stand-in of the provider, whose
sandboxes are real processes on this machine: 300 of them take some 6 GB of its memory. The executions wait and compute
nothing; they wait for as long as it takes all sandboxes to be there. Memory, threads and descriptors are the most that
the process had; what a sandbox takes is what they add to a process that has one. CPU is the process's own, from the
flow's beginning to its end, an opened sandbox's share in it. `recorded` is how many of its task runs the Prefect server
has as Completed afterwards, of how many there were.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")

from providers import PROVIDERS, Standin
from rich.console import Console
from rich.table import Table
from shared.api import post

from rlm_batch import batch
from rlm_batch.deployments.server import PrefectServer

CODE = "import time; time.sleep(seconds); SUBMIT(y=x)"
TIME_LIMIT = 420.0  # seconds for one run
RECORDED_LIMIT = 90.0  # seconds after its end until the server has all of its task runs


@dataclass
class Measured:
    """What one run took. Memory is in MiB."""

    executions: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    flow_run: str = ""
    peak: int = 0  # sandboxes at once
    opened: int = 0
    created: list[float] | None = None  # the moments of the creations
    rss: float = 0.0
    threads: int = 0
    descriptors: int = 0
    task_runs: int = 0
    recorded: int = 0


# -------------------------------------------------------------------------------------------------- the process itself


async def drive(provider: str, sandboxes: int, each: int, wait: float, reuse: bool) -> dict[str, Any]:
    """One flow run; what it did and what CPU it took."""
    from prefect.client.orchestration import get_client

    await batch(CODE, inputs=[{"x": 0, "seconds": 0}], provider=provider, max_workers=1)  # imports, and one of each
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    inputs = [{"x": x, "seconds": wait} for x in range(sandboxes * each)]
    results = await batch(
        CODE, inputs=inputs, provider=provider, max_workers=sandboxes, reuse_sandboxes=reuse, timeout=wait + 120
    )
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    assert [result.y for result in results] == list(range(sandboxes * each))
    async with get_client() as client:
        (run,) = await client.read_flow_runs(sort="START_TIME_DESC", limit=1)  # type: ignore[arg-type]
    return {
        "executions": len(results),
        "seconds": seconds,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "flow_run": str(run.id),
    }


# ------------------------------------------------------------------------------------------------------ what watches it


@contextlib.contextmanager
def watched(pid: int, found: Measured) -> Iterator[None]:
    """The most of what a process has, looked at five times a second."""
    ended, place = threading.Event(), Path(f"/proc/{pid}")

    def watch() -> None:
        while not ended.wait(0.2):
            with contextlib.suppress(OSError, ValueError, KeyError):  # it is ending
                fields = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
                found.rss = max(found.rss, int(fields["VmRSS"].split()[0]) / 1024)
                found.threads = max(found.threads, int(fields["Threads"]))
                found.descriptors = max(found.descriptors, len(os.listdir(place / "fd")))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def task_runs(api: str, flow_run: str, expected: int) -> tuple[int, int]:
    """How many of a flow run's task runs the server has, and how many of them as Completed, once it has them all."""
    counts, until = [0, 0], time.monotonic() + RECORDED_LIMIT
    wanted: dict[str, Any] = {"flow_runs": {"id": {"any_": [flow_run]}}}
    completed = {**wanted, "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    while counts[1] < expected and time.monotonic() < until:
        time.sleep(1.0)
        counts = [post(api, "/task_runs/count", body) for body in (wanted, completed)]
    return counts[0], counts[1]


def measure(api: str, running: Standin, arguments: argparse.Namespace, sandboxes: int) -> Measured:
    """One run in a process of its own."""
    wait = arguments.wait if arguments.wait is not None else max(1.0, sandboxes / 12)
    own = ["--drive", str(sandboxes), "--provider", arguments.provider, "--each", str(arguments.each)]
    command = [sys.executable, __file__, *own, "--wait", str(wait), "--reuse", arguments.reuse]
    found = Measured()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            with watched(process.pid, found):
                said, _ = process.communicate(timeout=TIME_LIMIT)
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"the run with {sandboxes} sandboxes ended with status {process.returncode}")
    for name, value in json.loads(said.splitlines()[-1]).items():
        setattr(found, name, value)
    state = running.read_state()
    found.peak, found.opened = state["peak"], state.get("created", 0)
    per_task = max(1, math.ceil(found.executions / 1000))
    found.task_runs = math.ceil(found.executions / per_task)
    _, found.recorded = task_runs(api, found.flow_run, found.task_runs)
    return found


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", default="1,50,300", help="how many at once, comma-separated")
    parser.add_argument("--provider", default="daytona", choices=[provider.name for provider in PROVIDERS])
    parser.add_argument("--each", type=int, default=4, help="executions for each sandbox")
    parser.add_argument(
        "--wait", type=float, help="seconds that an execution waits; by default a 12th of the sandboxes"
    )
    parser.add_argument("--boot", type=float, default=0.3, help="seconds that a sandbox takes to boot")
    parser.add_argument("--reuse", default="yes", choices=["yes", "no"], help="keep a worker's sandbox")
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        run = drive(arguments.provider, arguments.drive, arguments.each, arguments.wait, arguments.reuse == "yes")
        print(json.dumps(asyncio.run(run)))
        return
    table = Table(title=f"{arguments.each} executions for each sandbox, on {arguments.provider}", box=None)
    for name in (
        "sandboxes", "at once", "seconds", "RSS MiB", "MiB each", "threads", "descriptors", "CPU ms each", "recorded"
    ):  # fmt: skip
        table.add_column(name, justify="right")
    (provider,) = (provider for provider in PROVIDERS if provider.name == arguments.provider)
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ |= {"RLM_BATCH_RESULTS": f"{home}/results", "PREFECT_API_URL": server.url}
        base = 0.0
        for count in map(int, arguments.sandboxes.split(",")):
            with provider.standin(arguments.boot, 0.0) as running:
                found = measure(server.url, running, arguments, count)
            base = base or (found.rss if count == 1 else 0.0)
            grown = f"{(found.rss - base) / (count - 1):.2f}" if base and count > 1 else ""
            table.add_row(
                str(count), str(found.peak), f"{found.seconds:.1f}", f"{found.rss:.0f}", grown, str(found.threads),
                str(found.descriptors), f"{found.cpu / found.executions * 1000:.1f}",
                f"{found.recorded} of {found.task_runs}",
            )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
