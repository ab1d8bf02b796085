"""What a batch costs beside plain thread pools: the same executions, in one run.

    python benchmarks/batch.py [--executions 500] [--workers 4] [--long 10000] [--isolation auto]
    python benchmarks/batch.py --image docker.io/library/python:3.12-slim --executions 100

A Prefect server with the settings that we ship runs as a process of its own. Each way is measured `--rounds` times, in
turns, each when the server is idle: until it returns, and until the server shows all of its task runs as completed. The
peers are pools of as many threads: each execution a new Python and nothing around it; the same in bubblewrap, to which
the ratios are (without bubblewrap to the first); and a sandbox of ours. Task runs that do nothing, as many at once, are
what Prefect costs by itself. CPU is for each execution: the program's, the server's, and what else the machine did,
which is the sandboxes.
Below the table are 200 executions in sandboxes where `prepare` has imported numpy beside 200 in those where it has not,
and one long batch in reused sandboxes, with what the process grew by.

With an image the sandboxes are containers, and the first peer is the engine's own `run --rm` of it, with all flags that
a sandbox of ours has. The line below that table is a batch's seconds less those of task runs that do nothing, beside
that peer's.
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

from rich.console import Console
from rich.table import Table
from shared.api import post
from shared.processor_time import read_machine_seconds, read_process_seconds

from rlm_batch import ContainerSandbox, LocalInterpreter, LocalSandbox, SandboxStartError, batch
from rlm_batch.blocks.container.command import build_run_command
from rlm_batch.blocks.container.deletion import make_name
from rlm_batch.blocks.container.engine import find_engine
from rlm_batch.deployments.server import PrefectServer

CODE = "SUBMIT(y=x + 1)"
NOTHING, FRESH = "task runs that do nothing", "batch, a sandbox each"
BARE_CODE = "import sys\nprint(int(sys.argv[1]) + 1)"
WALLS = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
WALLS += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--"]
STAND_IN = "import time\nwhile time.process_time() < 1:\n    pass"  # for numpy, where it cannot be installed


@dataclass
class Sample:
    """What one measurement took: seconds until it returned and until the server showed it; CPU seconds."""

    seconds: float
    recorded: float
    client: float
    server: float
    machine: float

    @property
    def sandboxes(self) -> float:
        """CPU seconds of everything but the program and the server."""
        return self.machine - self.client - self.server


@dataclass
class Way:
    """One way to have the executions done, and the task runs that the server shows then."""

    run: Callable[[], None]
    task_runs: int = 0


def run_processes(command: list[str], executions: int, workers: int) -> None:
    """A peer: a thread pool, and for each execution a process that is given its number."""

    def run_one(x: int) -> int:
        done = subprocess.run([*command, str(x)], stdin=subprocess.DEVNULL, capture_output=True, check=True)
        return int(done.stdout)

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(run_one, range(executions))) == list(range(1, executions + 1))


def run_sandboxes(executions: int, workers: int, isolation: Any) -> None:
    """A peer: a thread pool over sandboxes, one for each execution."""

    def run_one(x: int) -> int:
        with LocalInterpreter(isolation=isolation) as interpreter:
            return interpreter.execute(CODE, {"x": x}).y

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(run_one, range(executions))) == list(range(1, executions + 1))


def run_empty_tasks(executions: int, workers: int) -> None:
    """Task runs that do nothing."""
    from prefect import flow, task

    @task
    async def add_one(x: int) -> int:
        return x + 1

    @flow
    async def add_ones() -> list[int]:
        limit = asyncio.Semaphore(workers)

        async def run_one(x: int) -> int:
            async with limit:
                return await add_one(x)

        return await asyncio.gather(*map(run_one, range(executions)))

    assert asyncio.run(add_ones()) == list(range(1, executions + 1))


def run_batch(executions: int, workers: int, isolation: str, **options: Any) -> None:
    """The flow."""
    provider = options.pop("provider", "local" if isolation == "auto" else f"local:{isolation}")
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(batch(CODE, inputs=inputs, provider=provider, max_workers=workers, **options))
    assert [result.y for result in results] == list(range(1, executions + 1))


def run_containers(provider: ContainerSandbox, executions: int, workers: int) -> None:
    """A peer: a thread pool, and for each execution a container that the engine runs, with the flags of ours."""
    engine = asyncio.run(find_engine(provider.engine))

    def run_one(x: int) -> int:
        words = build_run_command(engine, provider, provider.image, BARE_CODE, labels={}, name=make_name())
        done = subprocess.run([*words, str(x)], stdin=subprocess.DEVNULL, capture_output=True, check=True, cwd="/proc")
        return int(done.stdout)

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(run_one, range(executions))) == list(range(1, executions + 1))


def build_container_ways(count: int, workers: int, image: str) -> dict[str, Way]:
    """The ways of containers by their names, the peer of the ratios first."""
    provider = ContainerSandbox(image=image)
    provider.save("measured", overwrite=True)  # type: ignore[unused-coroutine]
    ours = {"provider": "container-sandbox/measured"}
    reused = {**ours, "reuse_sandboxes": True, "executions_per_task": 50}
    run_batch(workers, workers, "auto", **ours)  # the probe of the image
    return {
        "engine's run": Way(lambda: run_containers(provider, count, workers)),
        NOTHING: Way(lambda: run_empty_tasks(count, workers), count),
        FRESH: Way(lambda: run_batch(count, workers, "auto", executions_per_task=1, **ours), count),
        "batch, reused, 50 a task": Way(lambda: run_batch(count, workers, "auto", **reused), -(-count // 50)),
    }


def describe_container_ratios(found: dict[str, list[Sample]]) -> str:
    """A batch's seconds in containers, less what Prefect costs, beside the engine's."""
    seconds = {name: statistics.median(sample.seconds for sample in samples) for name, samples in found.items()}
    peer, _, _, reused = seconds.values()
    each = (seconds[FRESH] - seconds[NOTHING]) / peer
    return f"less task runs that do nothing: {each:.2f} of the engine's run; reused: {reused / peer:.2f}"


def wait_until_idle(pid: int) -> None:
    """Waits until a process takes less than a fifth of a processor, two minutes at most.

    The server has events to write long after it shows the task runs that they are of, which the next sample would pay.
    """
    until = time.monotonic() + 120
    while time.monotonic() < until:
        before = read_process_seconds(pid)
        time.sleep(1)
        if read_process_seconds(pid) - before < 0.2:
            return


def measure(way: Way, server: PrefectServer) -> Sample:
    """One sample, which ends when the server shows its task runs."""
    assert server.pid is not None
    wait_until_idle(server.pid)
    shown = count_completed(server.url)
    client, of_server, machine = time.process_time(), read_process_seconds(server.pid), read_machine_seconds()
    begun = time.perf_counter()
    way.run()
    seconds = time.perf_counter() - begun
    client = time.process_time() - client
    until = time.monotonic() + 120
    while (found := count_completed(server.url) - shown) < way.task_runs:
        if time.monotonic() > until:
            raise TimeoutError(f"of {way.task_runs} task runs the server has recorded {found}")
        time.sleep(0.05)
    recorded = time.perf_counter() - begun
    of_server = read_process_seconds(server.pid) - of_server
    return Sample(seconds, recorded, client, of_server, read_machine_seconds() - machine)


def build_ways(count: int, workers: int, isolation: str) -> dict[str, Way]:
    """The ways by their names, the peer of the ratios first."""
    bare = [sys.executable, "-I", "-S", "-c", BARE_CODE]
    ways = {"bare pool": Way(lambda: run_processes(bare, count, workers))}
    if bubblewrap := shutil.which("bwrap"):
        walls = [bubblewrap, *WALLS]
        ways = {"bare pool in bubblewrap": Way(lambda: run_processes([*walls, *bare], count, workers)), **ways}
    reused = {"reuse_sandboxes": True, "executions_per_task": 50}
    return {
        **ways,
        "thread pool, a sandbox each": Way(lambda: run_sandboxes(count, workers, isolation)),
        NOTHING: Way(lambda: run_empty_tasks(count, workers), count),
        FRESH: Way(lambda: run_batch(count, workers, isolation, executions_per_task=1), count),
        "batch, reused, 50 a task": Way(lambda: run_batch(count, workers, isolation, **reused), -(-count // 50)),
    }


def build_table(found: dict[str, list[Sample]], count: int, title: str) -> Table:
    """The medians, beside the first of the ways."""
    table = Table(title=title, box=None)
    for name in ("", "seconds", "ratio", "shown", "ratio", "client", "server", "sandboxes"):
        table.add_column(name, justify="left" if not name else "right")

    def compute_median(samples: list[Sample], name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in samples)

    peer = compute_median(next(iter(found.values())), "seconds")
    for name, samples in found.items():
        seconds, shown = compute_median(samples, "seconds"), compute_median(samples, "recorded")
        times = [f"{seconds:.2f}", f"{seconds / peer:.2f}", f"{shown:.2f}", f"{shown / peer:.2f}"]
        parts = (compute_median(samples, part) for part in ("client", "server", "sandboxes"))
        table.add_row(name, *times, *(f"{part / count * 1000:.1f} ms" for part in parts))
    return table


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


def measure_prepare(server: PrefectServer, workers: int, isolation: str, rounds: int, executions: int = 200) -> str:
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
            way = Way(functools.partial(run_batch, executions, workers, isolation, **options), executions)
            found[name].append(measure(way, server).recorded)
    seconds = {name: statistics.median(samples) for name, samples in found.items()}
    one = statistics.median(openings["with"]) - statistics.median(openings["without"])
    imports = one * workers / min(workers, os.cpu_count() or 1)
    ratio = (seconds["with"] - imports) / seconds["without"]
    return (
        f"{executions} executions, reused: {seconds['without']:.2f} s; with prepare ({code.splitlines()[0]}): "
        f"{seconds['with']:.2f} s, of which {imports:.2f} s are one import for each worker; ratio {ratio:.2f} without"
    )


def count_completed(url: str) -> int:
    """How many task runs the server shows as completed."""
    wanted = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return int(post(url, "/task_runs/count", wanted))


def read_memory() -> float:
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
    parser.add_argument("--image", help="measure containers of that image in the place of local sandboxes")
    arguments = parser.parse_args()
    count, workers, isolation = arguments.executions, arguments.workers, arguments.isolation
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            run_batch(workers, workers, isolation)  # imports, and the probe of the isolation
            image = arguments.image
            ways = build_container_ways(count, workers, image) if image else build_ways(count, workers, isolation)
            found: dict[str, list[Sample]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, way in ways.items():
                    found[name].append(measure(way, server))
            title = f"{count} executions, {workers} workers: medians of {arguments.rounds}; CPU for each execution"
            Console(width=120).print(build_table(found, count, title))
            if image:
                print(describe_container_ratios(found))
                return
            print(measure_prepare(server, workers, isolation, arguments.rounds))
            if arguments.long:
                before = read_memory()
                reused = {"reuse_sandboxes": True, "executions_per_task": 50}
                long = Way(lambda: run_batch(arguments.long, workers, isolation, **reused), -(-arguments.long // 50))
                seconds = measure(long, server).recorded
                each = seconds / arguments.long * 1000
                print(f"{arguments.long} executions, reused: {seconds:.1f} s, {each:.2f} ms each; ", end="")
                print(f"memory grew by {read_memory() - before:.0f} MB")


if __name__ == "__main__":
    main()
