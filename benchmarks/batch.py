"""What a batch costs beside a plain thread pool: the same executions in the same sandboxes, in one run.

    python benchmarks/batch.py [--executions 500] [--workers 4] [--long 10000] [--isolation auto]

A Prefect server with the settings that we ship runs as a process of its own. Each way is measured `--rounds` times, in
turns; a batch is counted until the server shows all of its task runs as completed. The ratio is to a pool of as many
threads, each of which opens a sandbox for each execution. Below the table are 200 executions in sandboxes where
`prepare` has imported numpy beside 200 in those where it has not, and one long batch in reused sandboxes, with what the
process grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
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

from rlm_batch import LocalInterpreter, LocalSandbox, SandboxStartError, batch
from rlm_batch.deployments.server import PrefectServer

CODE = "SUBMIT(y=x + 1)"
STAND_IN = "import time\nwhile time.process_time() < 1:\n    pass"  # for numpy, where it cannot be installed


def pool(executions: int, workers: int, isolation: str) -> None:
    """The peer: a thread pool over sandboxes, one for each execution."""

    def one(x: int) -> int:
        with LocalInterpreter(isolation=isolation) as interpreter:
            return interpreter.execute(CODE, {"x": x}).y

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(one, range(executions))) == list(range(1, executions + 1))


def through_batch(url: str, executions: int, workers: int, isolation: str, task_runs: int, **options: Any) -> None:
    """The same through the flow, until the server has recorded every task run."""
    provider = options.pop("provider", "local" if isolation == "auto" else f"local:{isolation}")
    before = completed(url)
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(batch(CODE, inputs=inputs, provider=provider, max_workers=workers, **options))
    assert [result.y for result in results] == list(range(1, executions + 1))
    until = time.monotonic() + 120
    while completed(url) - before < task_runs:
        if time.monotonic() > until:
            raise TimeoutError(f"of {task_runs} task runs the server has recorded {completed(url) - before}")
        time.sleep(0.05)


def find_import(isolation: str) -> tuple[str, dict[str, Any]]:
    """Code that imports what takes a while, and the fields of a block that has it."""
    fields: dict[str, Any] = {"isolation": isolation, "packages": ["numpy"]}
    try:
        open_and_execute(prepare="import numpy", **fields)
    except SandboxStartError:
        return STAND_IN, {"isolation": isolation}
    return "import numpy", fields


def open_and_execute(**fields: Any) -> None:
    with LocalInterpreter(**fields) as interpreter:
        interpreter.execute("pass")


def measure_prepare(url: str, workers: int, isolation: str, rounds: int, executions: int = 200) -> str:
    """What executions cost that are forks of a process which has imported something, beside those that are not."""
    code, fields = find_import(isolation)
    LocalSandbox(**fields).save("prepared", overwrite=True)  # type: ignore[unused-coroutine]
    ways: dict[str, dict[str, Any]] = {"without": {"reuse_sandboxes": True}, "with": {"prepare": code}}
    found: dict[str, list[float]] = {name: [] for name in ways}
    openings: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, options in ways.items():
            own = {"prepare": options["prepare"]} if "prepare" in options else {}
            openings[name].append(timed(lambda own=own: open_and_execute(**fields, **own)))
            options = {"provider": "local-sandbox/prepared", **options}
            run = functools.partial(through_batch, url, executions, workers, isolation, executions, **options)
            found[name].append(timed(run))
    seconds = {name: statistics.median(samples) for name, samples in found.items()}
    one = statistics.median(openings["with"]) - statistics.median(openings["without"])
    imports = one * workers / min(workers, os.cpu_count() or 1)
    ratio = (seconds["with"] - imports) / seconds["without"]
    return (
        f"{executions} executions, reused: {seconds['without']:.2f} s; with prepare ({code.splitlines()[0]}): "
        f"{seconds['with']:.2f} s, of which {imports:.2f} s are one import for each worker; ratio {ratio:.2f} without"
    )


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
            print(measure_prepare(server.url, workers, isolation, arguments.rounds))
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
