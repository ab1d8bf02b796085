"""What a batch costs beside a plain thread pool: the same executions in the same sandboxes, in one run.

    python benchmarks/batch.py [--executions 500] [--workers 4] [--long 10000] [--isolation auto]

A Prefect server with the settings that we ship runs as a process of its own. Each way is measured `--rounds` times, in
turns; a batch is counted until the server shows all of its task runs as completed. The ratio is to a pool of as many
threads, each of which opens a sandbox for each execution. The last row is one long batch in reused sandboxes, with what
the process grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

from api import post
from rich.console import Console
from rich.table import Table

from rlm_batch import LocalInterpreter, batch
from rlm_batch.deployments.server import PrefectServer

CODE = "SUBMIT(y=x + 1)"


def pool(executions: int, workers: int, isolation: str) -> None:
    """The peer: a thread pool over sandboxes, one for each execution."""

    def one(x: int) -> int:
        with LocalInterpreter(isolation=isolation) as interpreter:
            return interpreter.execute(CODE, {"x": x}).y

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(one, range(executions))) == list(range(1, executions + 1))


def through_batch(url: str, executions: int, workers: int, isolation: str, task_runs: int, **options: Any) -> None:
    """The same through the flow, until the server has recorded every task run."""
    provider = "local" if isolation == "auto" else f"local:{isolation}"
    before = completed(url)
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(batch(CODE, inputs=inputs, provider=provider, max_workers=workers, **options))
    assert [result.y for result in results] == list(range(1, executions + 1))
    until = time.monotonic() + 120
    while completed(url) - before < task_runs:
        if time.monotonic() > until:
            raise TimeoutError(f"of {task_runs} task runs the server has recorded {completed(url) - before}")
        time.sleep(0.05)


def completed(url: str) -> int:
    """How many task runs the server shows as completed."""
    wanted = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return int(post(url, "/task_runs/count", wanted))


def resident() -> float:
    """This process's resident memory, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def timed(work: Callable[[], None]) -> float:
    """Seconds that it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=10_000, help="executions of the long batch; 0 leaves it out")
    parser.add_argument("--isolation", default="auto")
    arguments = parser.parse_args()
    count, workers, isolation = arguments.executions, arguments.workers, arguments.isolation
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            ways: dict[str, Callable[[], None]] = {
                "thread pool, a sandbox each": lambda: pool(count, workers, isolation),
                "batch, a sandbox each": lambda: through_batch(server.url, count, workers, isolation, count),
                "batch, reused, 50 a task": lambda: through_batch(
                    server.url, count, workers, isolation, -(-count // 50), reuse_sandboxes=True, executions_per_task=50
                ),
            }
            through_batch(server.url, workers, workers, isolation, workers)  # imports, and the probe of the isolation
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, work in ways.items():
                    found[name].append(timed(work))
            table = Table(title=f"{count} executions, {workers} workers: medians of {arguments.rounds}", box=None)
            for name in ("", "seconds", "ratio", "ms each"):
                table.add_column(name, justify="left" if not name else "right")
            peer = statistics.median(found["thread pool, a sandbox each"])
            for name, samples in found.items():
                median = statistics.median(samples)
                table.add_row(name, f"{median:.2f}", f"{median / peer:.2f}", f"{median / count * 1000:.1f}")
            Console(width=100).print(table)
            if arguments.long:
                before = resident()
                seconds = timed(
                    lambda: through_batch(
                        server.url, arguments.long, workers, isolation, -(-arguments.long // 50),
                        reuse_sandboxes=True, executions_per_task=50,
                    )
                )  # fmt: skip
                each = seconds / arguments.long * 1000
                print(f"{arguments.long} executions, reused: {seconds:.1f} s, {each:.2f} ms each; ", end="")
                print(f"memory grew by {resident() - before:.0f} MB")


if __name__ == "__main__":
    main()
