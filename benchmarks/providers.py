"""The cost of one sandbox per execution on a remote provider: `batch` compared with a script that uses only the SDK.

    python benchmarks/providers.py [--executions 60] [--workers 20] [--boots 0.09,1] [--round-trip 0.05] [--rounds 5]
        [--set-up]

The provider is the local stand-in of the tests, in a separate process. A sandbox takes the seconds of `--boots` to
boot, and each call first waits for `--round-trip` seconds. The variants run in turns, `--rounds` times each:
- `script` creates, runs and deletes sandboxes in coroutines, with the SDK's asynchronous client
- `tasks` makes each execution of the script a task of a Prefect flow, which shows the cost of Prefect's records alone
- `batch` uses the same Prefect server, with the shipped settings

With `--set-up` the variants are `batch`, and two runs of it with a repository whose clone takes 3 s and a package that
pip downloads in 10 s: `first`, which sets a sandbox up, and `later`. The table then counts the clones, the downloads of
pip and the calls that make a snapshot or an image.

The ratio is to the first variant. The ideal is the time of the boots alone. The calls are one execution's calls to the
provider. CPU is per execution: the time of this process, which has the client and the flow, and the time of the whole
machine, which includes the stand-in, the sandboxes, the Prefect server and all other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

from processor_time import read_machine_seconds
from rich.console import Console
from rich.table import Table

from rlm_batch import batch
from rlm_batch.flows.server.process import ServerProcess

TESTS = Path(__file__).resolve().parents[1] / "tests"


Call = Callable[[int], Awaitable[int]]


@dataclass(frozen=True)
class Provider:
    """A provider to measure. `standin` takes the seconds of a boot and of a round trip; `calls` opens the script."""

    name: str
    standin: Callable[[float, float], contextlib.AbstractContextManager[Standin]]
    calls: Callable[[], contextlib.AbstractAsyncContextManager[Call]]


@dataclass(frozen=True)
class Standin:
    """A running stand-in."""

    read_state: Callable[[], dict[str, Any]]

    def count_calls(self) -> int:
        """Return how many calls the stand-in has answered."""
        return sum(self.read_state()["counts"].values())

    def count_snapshots(self) -> int:
        """Return how many snapshots, or images with a repository, were made."""
        state = self.read_state()
        if "snapshots" in state:
            return sum(count for call, count in state["counts"].items() if call.endswith("/snapshot"))
        return sum("git fetch" in line for lines in state["images"].values() for line in lines)

    def count_sandboxes(self) -> int:
        """Return how many sandboxes the stand-in has."""
        return len(self.read_state()["sandboxes"])


@dataclass
class Way:
    """The samples of one variant."""

    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    machine: list[float] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # clones, downloads of pip and snapshots


def load_module(name: str) -> Any:
    """Return a module of the stand-ins."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module(f"standins.{name}")


@contextlib.contextmanager
def run_daytona(boot: float, round_trip: float) -> Iterator[Standin]:
    """Run the stand-in of Daytona, and set the environment variables that direct the SDK to it."""
    module = load_module("process")
    with module.DaytonaStandin(boot_s=boot) as running:
        if round_trip:
            running.set(fault_rate=1.0, faults=["delay"], fault_delay_s=round_trip)
        os.environ.update(running.environment)
        yield Standin(running.state)


@contextlib.asynccontextmanager
async def open_daytona() -> AsyncIterator[Call]:
    """Yield the script's function for one execution: create a sandbox, run code, delete the sandbox."""
    from daytona import AsyncDaytona

    async with AsyncDaytona() as client:

        async def call(x: int) -> int:
            sandbox = await client.create()
            try:
                return int((await sandbox.process.code_run(f"print({x} + 1)")).result)
            finally:
                await sandbox.delete()

        yield call


@contextlib.contextmanager
def run_modal(boot: float, round_trip: float) -> Iterator[Standin]:
    """Run the stand-in of Modal, and set the environment variables that direct the client to it."""
    module = load_module("process")
    with module.StandinProcess("modal") as process:
        process.ask("set", boot_delay=boot)
        process.ask("faults", rules=[{"delay": round_trip}] if round_trip else [])
        names = {"url": "MODAL_SERVER_URL", "token_id": "MODAL_TOKEN_ID", "token_secret": "MODAL_TOKEN_SECRET"}
        os.environ.update({name: process.hello[key] for key, name in names.items()})
        yield Standin(lambda: process.ask("state"))


@contextlib.asynccontextmanager
async def open_modal() -> AsyncIterator[Call]:
    """Yield the script's function for one execution: create a sandbox, run code, terminate the sandbox.

    The client, the app and the image are created once.
    """
    import modal

    credentials = os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"]
    client = await modal.Client.from_credentials.aio(*credentials)
    app = await modal.App.lookup.aio("script", create_if_missing=True, client=client)
    image = await modal.Image.debian_slim(python_version="3.12").build.aio(app)

    async def call(x: int) -> int:
        sandbox = await modal.Sandbox.create.aio(app=app, image=image, timeout=600, client=client)
        try:
            process = await sandbox.exec.aio("python", "-c", f"print({x} + 1)", timeout=60)
            answer = int(await process.stdout.read.aio())
            await process.wait.aio()
            return answer
        finally:
            await sandbox.terminate.aio()
            await sandbox.detach.aio()

    yield call


PROVIDERS = (Provider("daytona", run_daytona, open_daytona), Provider("modal", run_modal, open_modal))


async def gather_calls(call: Call, executions: int, workers: int) -> None:
    """Make the calls, at most `workers` at once."""
    limit = asyncio.Semaphore(workers)

    async def make_call(x: int) -> int:
        async with limit:
            return await call(x)

    answers = await asyncio.gather(*map(make_call, range(executions)))
    assert answers == list(range(1, executions + 1))


def run_script(provider: Provider, executions: int, workers: int) -> None:
    """Run the script in coroutines."""

    async def run() -> None:
        async with provider.calls() as call:
            await gather_calls(call, executions, workers)

    asyncio.run(run())


def run_tasks(provider: Provider, executions: int, workers: int) -> None:
    """Run the script in coroutines, with each execution as a Prefect task."""
    from prefect import flow, task

    @flow
    async def calls() -> None:
        async with provider.calls() as call:
            await gather_calls(task(call), executions, workers)

    asyncio.run(calls())


def run_batch(provider: str, executions: int, workers: int, options: Mapping[str, Any] | None = None) -> None:
    """Run the same executions with the flow `batch`."""
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(
        batch(
            "SUBMIT(y=x + 1)",
            inputs=inputs,
            provider=provider,
            provider_options=dict(options or {}),
            max_workers=workers,
        )
    )
    assert [result.y for result in results] == list(range(1, executions + 1))


def measure(way: Way, work: Callable[[], None], standin: Standin, downloads: Mapping[str, int]) -> None:
    """Run the work and add its sample to `way`."""

    def count_made() -> list[int]:
        return [downloads.get("clone", 0), downloads.get("wheel", 0), standin.count_snapshots()]

    calls, made = standin.count_calls(), count_made()
    all_before, before, begun = read_machine_seconds(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    way.seconds.append(time.perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF)
    way.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    way.machine.append(read_machine_seconds() - all_before)
    way.calls.append(standin.count_calls() - calls)
    way.made.append(", ".join(str(after - before) for before, after in zip(made, count_made(), strict=True)))


def main() -> None:
    """Measure every variant on every provider, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=60)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--boots", default="0.09,1", help="seconds that a sandbox takes to boot, comma-separated")
    parser.add_argument("--round-trip", type=float, default=0.0, help="seconds before the provider begins with a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set-up", action="store_true", help="measure runs with a set-up")
    parser.add_argument("--providers", default=",".join(provider.name for provider in PROVIDERS))
    arguments = parser.parse_args()
    count, workers, wanted = arguments.executions, arguments.workers, arguments.providers.split(",")
    trip = f"{arguments.round_trip * 1000:.0f} ms of round trip"
    table = Table(title=f"{count} executions, {workers} at once, {trip}: medians of {arguments.rounds}", box=None)
    for name in (
        "provider",
        "boot",
        "way",
        "seconds",
        "of the ideal",
        "ratio",
        "calls each",
        "CPU ms each",
        "machine's",
        *(["clones, pips, snapshots"] if arguments.set_up else []),
    ):
        table.add_column(name, justify="left" if name in ("provider", "way") else "right")
    with tempfile.TemporaryDirectory() as home, ServerProcess.start(Path(home)) as server:
        os.environ |= {"RLM_BATCH_RESULTS": f"{home}/results", "RLM_BATCH_CACHE": f"{home}/cache"}
        files = load_module("git_server").GitServer(Path(home, "repository"))
        files.delays |= {"clone": 3.0, "wheel": 10.0}
        package = files.add_wheel("package_of_ten_seconds")
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            for provider in PROVIDERS:
                for boot in map(float, arguments.boots.split(",")) if provider.name in wanted else ():
                    with provider.standin(boot, arguments.round_trip) as running:
                        ways: dict[str, Callable[[], None]] = {
                            "script": lambda one=provider: run_script(one, count, workers),
                            "tasks": lambda one=provider: run_tasks(one, count, workers),
                            "batch": lambda one=provider: run_batch(one.name, count, workers),
                        }
                        options: dict[str, Any] = {"repo_url": files.url, "packages": [package]}
                        if arguments.set_up:
                            work = partial(run_batch, provider.name, count, workers, options)
                            ways = {"batch": ways["batch"], "first": work, "later": work}
                        else:
                            run_script(provider, 1, 1)  # The first run of a variant imports modules.
                            run_tasks(provider, 1, 1)
                        run_batch(provider.name, 1, 1)
                        samples = {name: Way() for name in ways}
                        for number in range(arguments.rounds):
                            options["setup"] = f"echo {number}"
                            for name, work in ways.items():
                                measure(samples[name], work, running, files.downloads)
                                until = time.monotonic() + 10  # Deletions must not slow down the next variant.
                                while running.count_sandboxes() and time.monotonic() < until:
                                    time.sleep(0.05)
                    ideal = math.ceil(count / workers) * boot
                    peer = statistics.median(samples[next(iter(samples))].seconds)
                    for name, way in samples.items():
                        seconds, cpu = statistics.median(way.seconds), statistics.median(way.cpu)
                        machine = statistics.median(way.machine)
                        table.add_row(
                            provider.name, f"{boot * 1000:.0f} ms", name, f"{seconds:.2f}", f"{seconds / ideal:.2f}",
                            f"{seconds / peer:.2f}", f"{statistics.median(way.calls) / count:.1f}",
                            f"{cpu / count * 1000:.1f}", f"{machine / count * 1000:.1f}",
                            *([" | ".join(sorted(set(way.made)))] if arguments.set_up else []),
                        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
