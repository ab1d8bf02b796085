"""The cost of a batch beside plain thread pools: the same executions, in one run.

    python benchmarks/batch.py [--executions 500] [--workers 4] [--long 10000] [--isolation auto]

A Prefect server with the shipped settings runs as a separate process. Each variant runs `--rounds` times, in turns, and
starts when the server is idle. Two times are measured: until the variant returns, and until the server shows all its
task runs as completed. The peers are pools of as many threads. Their executions are a new Python, a new Python in
bubblewrap, and an rlm-batch sandbox. Ratios are to the Python in bubblewrap, or without bubblewrap to the plain Python.
Task runs with the same concurrency that do nothing, or start the Python of the first line, show Prefect's own cost: a
batch with a task run for each execution cannot have a lower ratio than these. CPU is per execution: the time of the
program, of the server, and of the rest of the machine, which counts as the sandboxes' time. The last line is one long
batch in reused sandboxes, with the growth of the process's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

from prefect.client.orchestration import SyncPrefectClient
from processor_time import read_machine_seconds, read_process_seconds
from rich.console import Console
from rich.table import Table

from rlm_batch import LocalInterpreter, batch
from rlm_batch.flows.server.process import ServerProcess

CODE = "SUBMIT(y=x + 1)"
REUSED: dict[str, Any] = {"reuse_sandboxes": True, "executions_per_task": 50}
BARE_CODE = "import sys\nprint(int(sys.argv[1]) + 1)"
TASKS, BATCH = "task runs around the first line's pool", "batch, a sandbox each"
WALLS = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
WALLS += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
WALLS += ["--ro-bind", sys.prefix, sys.prefix, "--"]  # The environment may be below /tmp.


@dataclass
class Sample:
    """One measurement: seconds until the function returned, seconds until the server showed it, and CPU seconds."""

    seconds: float
    recorded: float
    client: float
    server: float
    machine: float

    @property
    def sandboxes(self) -> float:
        """Return the CPU seconds of everything but the program and the server."""
        return self.machine - self.client - self.server


@dataclass
class Way:
    """One way to run the executions, and the number of task runs that it adds to the server."""

    run: Callable[[], None]
    task_runs: int = 0


def run_process(command: list[str], x: int) -> int:
    """Run a process with the number as its argument, and return the number that it prints."""
    done = subprocess.run([*command, str(x)], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return int(done.stdout)


def run_processes(command: list[str], executions: int, workers: int) -> None:
    """Run a peer: a thread pool, and a process for each execution."""
    with ThreadPoolExecutor(workers) as threads:
        answers = list(threads.map(functools.partial(run_process, command), range(executions)))
    assert answers == list(range(1, executions + 1))


def run_sandboxes(executions: int, workers: int, isolation: Any) -> None:
    """Run a peer: a thread pool, and a sandbox for each execution."""

    def run_one(x: int) -> int:
        with LocalInterpreter(isolation=isolation) as interpreter:
            return interpreter.execute(CODE, {"x": x}).y

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(run_one, range(executions))) == list(range(1, executions + 1))


def run_tasks(executions: int, workers: int, command: list[str] | None = None) -> None:
    """Run a flow with task runs that add one, themselves or by running a process."""
    from prefect import flow, task

    @task
    async def add_one(x: int) -> int:
        return x + 1 if command is None else await asyncio.to_thread(run_process, command, x)

    @flow
    async def add_ones() -> list[int]:
        limit = asyncio.Semaphore(workers)

        async def run_one(x: int) -> int:
            async with limit:
                return await add_one(x)

        return await asyncio.gather(*map(run_one, range(executions)))

    assert asyncio.run(add_ones()) == list(range(1, executions + 1))


def run_batch(executions: int, workers: int, isolation: str, **options: Any) -> None:
    """Run the flow `batch`."""
    provider = "local" if isolation == "auto" else f"local:{isolation}"
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(batch(CODE, inputs=inputs, provider=provider, max_workers=workers, **options))
    assert [result.y for result in results] == list(range(1, executions + 1))


def wait_until_idle(pid: int) -> None:
    """Wait until a process takes less than a fifth of a processor, two minutes at most.

    The server writes events long after it shows their task runs. The next sample would pay for that.
    """
    until = time.monotonic() + 120
    while time.monotonic() < until:
        before = read_process_seconds(pid)
        time.sleep(1)
        if read_process_seconds(pid) - before < 0.2:
            return


def measure(way: Way, server: ServerProcess) -> Sample:
    """Take one sample, which ends when the server shows the task runs."""
    wait_until_idle(server.process.pid)
    shown = count_completed(server.url)
    client, of_server, machine = time.process_time(), read_process_seconds(server.process.pid), read_machine_seconds()
    begun = time.perf_counter()
    way.run()
    seconds = time.perf_counter() - begun
    client = time.process_time() - client
    until = time.monotonic() + 120
    while (completed := count_completed(server.url) - shown) < way.task_runs:
        if time.monotonic() > until:
            raise TimeoutError(f"of {way.task_runs} task runs the server has recorded {completed}")
        time.sleep(0.05)
    recorded = time.perf_counter() - begun
    of_server = read_process_seconds(server.process.pid) - of_server
    return Sample(seconds, recorded, client, of_server, read_machine_seconds() - machine)


def build_ways(count: int, workers: int, isolation: str) -> dict[str, Way]:
    """Return the ways by name; the ratios are to the first."""
    # bubblewrap does not find a path through a directory that its /tmp covers.
    bare = [os.path.normpath(sys.executable), "-I", "-S", "-c", BARE_CODE]
    ways = {"bare pool": Way(lambda: run_processes(bare, count, workers))}
    command = bare
    if bubblewrap := shutil.which("bwrap"):
        command = [bubblewrap, *WALLS, *bare]
        ways = {"bare pool in bubblewrap": Way(lambda: run_processes(command, count, workers)), **ways}
    return {
        **ways,
        "thread pool, a sandbox each": Way(lambda: run_sandboxes(count, workers, isolation)),
        "task runs that do nothing": Way(lambda: run_tasks(count, workers), count),
        TASKS: Way(lambda: run_tasks(count, workers, command), count),
        BATCH: Way(lambda: run_batch(count, workers, isolation, executions_per_task=1), count),
        "batch, reused, 50 a task": Way(lambda: run_batch(count, workers, isolation, **REUSED), -(-count // 50)),
    }


def build_table(ways: dict[str, list[Sample]], count: int, title: str) -> Table:
    """Return a table of the medians and of their ratios to the first way."""
    table = Table(title=title, box=None)
    for name in ("", "seconds", "ratio", "shown", "ratio", "client", "server", "sandboxes"):
        table.add_column(name, justify="left" if not name else "right")

    def compute_median(samples: list[Sample], name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in samples)

    peer = compute_median(next(iter(ways.values())), "seconds")
    for name, samples in ways.items():
        seconds, shown = compute_median(samples, "seconds"), compute_median(samples, "recorded")
        times = [f"{seconds:.2f}", f"{seconds / peer:.2f}", f"{shown:.2f}", f"{shown / peer:.2f}"]
        parts = (compute_median(samples, part) for part in ("client", "server", "sandboxes"))
        table.add_row(name, *times, *(f"{part / count * 1000:.1f} ms" for part in parts))
    return table


def count_completed(url: str) -> int:
    """Return how many task runs the server at `url` shows as completed."""
    is_completed = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return int(_make_client(url).request("POST", "/task_runs/count", json=is_completed).json())  # type: ignore[arg-type]


@functools.cache
def _make_client(url: str) -> SyncPrefectClient:
    return SyncPrefectClient(url)


def read_memory() -> float:
    """Return the resident memory of this process, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Measure every way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=10_000, help="executions of the long batch; 0 leaves it out")
    parser.add_argument("--isolation", default="auto")
    arguments = parser.parse_args()
    count, workers, isolation = arguments.executions, arguments.workers, arguments.isolation
    with tempfile.TemporaryDirectory() as home, ServerProcess.start(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            run_batch(workers, workers, isolation)  # It imports modules and probes the isolation.
            ways = build_ways(count, workers, isolation)
            samples: dict[str, list[Sample]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, way in ways.items():
                    samples[name].append(measure(way, server))
            title = f"{count} executions, {workers} workers: medians of {arguments.rounds}; CPU for each execution"
            Console(width=120).print(build_table(samples, count, title))
            tasks, ours = (statistics.median(sample.seconds for sample in samples[name]) for name in (TASKS, BATCH))
            print(f"{BATCH}: {ours / tasks:.2f} of {TASKS}")
            if arguments.long:
                before = read_memory()
                long = Way(lambda: run_batch(arguments.long, workers, isolation, **REUSED), -(-arguments.long // 50))
                seconds = measure(long, server).recorded
                each = seconds / arguments.long * 1000
                print(f"{arguments.long} executions, reused: {seconds:.1f} s, {each:.2f} ms each; ", end="")
                print(f"memory grew by {read_memory() - before:.0f} MB")


if __name__ == "__main__":
    main()
