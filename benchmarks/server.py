"""What a Prefect server can take: the task runs that it records, and what each of them costs it, by how it is set up.

    python benchmarks/server.py [--task-runs 1000] [--clients 2] [--only sqlite,postgres,several] [--set NAME=VALUE]

The first two are one process with the settings that we ship, on SQLite and on Postgres. The third is compose.yaml's, as
processes: two API servers, the background services apart, Postgres and Redis; each client uses one of the two. A client
is a process with a flow of no-op tasks, and what is counted begins with the first and ends when the server shows the
last as completed. CPU is that of the server's processes alone, without what they use when nothing happens; `busiest` is
the part of it that one process has to do, and a process of Prefect's has one core: `at most` is how many task runs a
second that leaves. It does not depend on what else runs on the machine, as the task runs a second do; the load average
stands beside them. A flow run is `batch` with one execution in a local sandbox without isolation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"  # the clients' log lines are not what is measured

import pytest
from rich.console import Console
from rich.table import Table
from shared.api import post
from shared.processor_time import read_process_seconds

from rlm_batch import batch
from rlm_batch.deployments.server import WORK_POOL, PrefectServer
from rlm_batch.deployments.worker import PrefectWorker, list_children

TESTS = Path(__file__).resolve().parents[1] / "tests"
IDLE_SECONDS = 10.0
RUNS = 5  # of `batch`
RECORD_SECONDS = 300.0

CLIENT = """
import asyncio, sys
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

@task(cache_policy=NO_CACHE)
async def nothing():
    pass

@flow
async def many(count: int):
    room = asyncio.Semaphore(50)
    async def one():
        async with room:
            await nothing()
    await asyncio.gather(*[one() for _ in range(count)])

print(flush=True)
sys.stdin.readline()
asyncio.run(many(int(sys.argv[1])))
"""


@dataclass
class Running:
    """A server to measure: where clients find it, and its processes by what they are."""

    urls: list[str]
    pids: dict[str, int]
    prefect: set[str]  # those of them that are Prefect's, whose Python has one core each


@dataclass
class Measured:
    """What was found; CPU in milliseconds."""

    a_second: float
    cpu: dict[str, float]  # for each task run, by process
    busiest: float
    flow_run: float
    idle: float  # for each second
    worker: float  # for each second, an idle worker that asks every two seconds
    memory: float  # MB of Prefect's processes
    load: float


# -------------------------------------------------------------------------------------------------------------- servers


def tests() -> Any:
    """tests/servers.py, as a module of a package of another name."""
    package = types.ModuleType("tests_of_rlm_batch")
    package.__path__ = [str(TESTS)]
    sys.modules[package.__name__] = package
    return importlib.import_module("tests_of_rlm_batch.servers")


@contextlib.contextmanager
def sqlite(home: Path) -> Iterator[Running]:
    """One process, on SQLite."""
    with PrefectServer(home) as server:
        assert server.pid is not None
        yield Running([server.url], {"server": server.pid}, {"server"})


@contextlib.contextmanager
def postgres(home: Path) -> Iterator[Running]:
    """One process, on Postgres."""
    with tests().Postgres() as database, PrefectServer(home, database=database.url) as server:
        assert server.pid is not None
        yield Running([server.url], {"server": server.pid, "postgres": database.pid}, {"server"})


@contextlib.contextmanager
def several(home: Path, settings: dict[str, str]) -> Iterator[Running]:
    """Two API servers, the services apart, Postgres and Redis."""
    with tests().Servers(home, settings=settings) as servers:
        pids = {name: process.pid for name, process in servers.processes.items() if name != "api"}
        beside = {"postgres": servers.postgres.pid, "redis": servers.redis.pid}
        yield Running(servers.urls, {**pids, **beside}, set(pids))


# ------------------------------------------------------------------------------------------------------------ measuring


def used(running: Running) -> dict[str, float]:
    return {name: read_process_seconds(pid) for name, pid in running.pids.items()}


def resident(pid: int) -> float:
    """MB of memory, of the process and those below it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    below = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6 + sum(resident(int(child)) for child in below)


def completed(url: str) -> int:
    """How many task runs the server shows as completed."""
    wanted = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return int(post(url, "/task_runs/count", wanted))


def all_recorded(url: str, count: int) -> None:
    until = time.monotonic() + RECORD_SECONDS
    while (there := completed(url)) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"of {count} task runs the server has recorded {there}")
        time.sleep(0.25)


def loaded(running: Running, task_runs: int, clients: int) -> float:
    """Seconds until the server has recorded that many task runs of each client."""
    before = completed(running.urls[0])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(task_runs)],
            env={**os.environ, "PREFECT_API_URL": running.urls[number % len(running.urls)]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(clients)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has imported Prefect
        begun = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            if process.wait(RECORD_SECONDS) != 0:
                raise RuntimeError("a client has failed")
        all_recorded(running.urls[-1], before + task_runs * clients)
        return time.perf_counter() - begun
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def runs(running: Running) -> None:
    """Some flow runs with one execution each."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    before = completed(running.urls[0])
    with temporary_settings({PREFECT_API_URL: running.urls[0]}):
        for _ in range(RUNS):
            asyncio.run(batch(["SUBMIT(y=1)"], provider="local:none"))
    all_recorded(running.urls[0], before + RUNS)


def at_rest(running: Running) -> dict[str, float]:
    """Seconds of CPU in each second in which nobody asks anything."""
    before = used(running)
    time.sleep(IDLE_SECONDS)
    return {name: (after - before[name]) / IDLE_SECONDS for name, after in used(running).items()}


def with_worker(running: Running, home: Path) -> float:
    """The same, of all together, while a worker asks for runs that are due."""
    url = running.urls[0]
    post(url, "/work_pools/", {"name": WORK_POOL, "type": "process"})
    others = tuple(list_children(os.getpid()))
    home.mkdir()
    worker = PrefectWorker(home, url, WORK_POOL)
    worker.launch()
    try:
        while not post(url, f"/work_pools/{WORK_POOL}/workers/filter", {}):
            if worker.poll_exit_status() is not None:
                raise RuntimeError(f"the worker has ended: see {worker.log}")
            time.sleep(0.2)
        time.sleep(IDLE_SECONDS)  # what it asks once is over
        return sum(at_rest(running).values())
    finally:
        asyncio.run(worker.end(but=others))


def measured(running: Running, home: Path, task_runs: int, clients: int) -> Measured:
    """Everything about one server."""
    loaded(running, 50, clients)  # what is done the first time only
    rest = at_rest(running)

    def beyond_rest(before: dict[str, float], seconds: float, count: int) -> dict[str, float]:
        after = used(running)
        return {name: (after[name] - before[name] - rest[name] * seconds) / count * 1000 for name in after}

    before = used(running)
    seconds = loaded(running, task_runs, clients)
    each = beyond_rest(before, seconds, task_runs * clients)
    load = os.getloadavg()[0]
    runs(running)
    before, begun = used(running), time.perf_counter()
    runs(running)
    a_run = beyond_rest(before, time.perf_counter() - begun, RUNS)
    return Measured(
        a_second=task_runs * clients / seconds,
        cpu=each,
        busiest=max(each[name] for name in running.prefect),
        flow_run=sum(a_run.values()),
        idle=sum(rest.values()) * 1000,
        worker=(with_worker(running, home) - sum(rest.values())) * 1000,
        memory=sum(resident(running.pids[name]) for name in running.prefect),
        load=load,
    )


# ---------------------------------------------------------------------------------------------------------------- table


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task-runs", type=int, default=1000, help="of each client, in one flow run")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--only", default="sqlite,postgres,several")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server's")
    arguments = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    os.environ.update(settings)
    ways = {
        "sqlite": ("SQLite", sqlite),
        "postgres": ("Postgres", postgres),
        "several": ("Postgres, Redis, 2 APIs, services", lambda home: several(home, settings)),
    }
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        for name in arguments.only.split(","):
            title, way = ways[name]
            os.environ["PREFECT_HOME"] = f"{home}/{name}"
            try:
                with way(Path(home, name)) as running:
                    found[title] = measured(
                        running, Path(home, f"{name}-worker"), arguments.task_runs, arguments.clients
                    )
            except pytest.skip.Exception as missing:
                print(f"{title}: {missing}")
                continue
            parts = ", ".join(f"{part} {cost:.1f}" for part, cost in found[title].cpu.items())
            print(f"{title}: ms of CPU for a task run: {parts}", flush=True)
    table = Table(
        title=f"{arguments.clients} clients with {arguments.task_runs} task runs each; {os.cpu_count()} cores", box=None
    )
    columns = ("", "task runs/s", "ratio", "CPU ms each", "ratio", "busiest", "at most/s", "flow run ms")
    for name in (*columns, "idle ms/s", "worker ms/s", "MB", "load"):
        table.add_column(name, justify="left" if not name else "right")
    first = next(iter(found.values()))
    for title, one in found.items():
        each = sum(one.cpu.values())
        table.add_row(
            title, f"{one.a_second:.0f}", f"{one.a_second / first.a_second:.2f}", f"{each:.1f}",
            f"{each / sum(first.cpu.values()):.2f}", f"{one.busiest:.1f}", f"{1000 / one.busiest:.0f}",
            f"{one.flow_run:.0f}", f"{one.idle:.0f}", f"{one.worker:.0f}", f"{one.memory:.0f}", f"{one.load:.1f}",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
