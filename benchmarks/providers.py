"""What a sandbox for each execution costs on a provider: `batch` beside the obvious script over the provider's SDK.

    python benchmarks/providers.py [--executions 100] [--workers 20] [--boots 0.09,2] [--rounds 3]

The provider is the local stand-in of the tests, in a process of its own, told to take that many seconds for a sandbox
to boot. The script is a thread pool over the SDK's synchronous client: create, run, delete. `tasks` are that script's
calls, each a task of a Prefect flow: what it costs that Prefect shows each execution, and nothing else. `batch` runs
against the same Prefect server, with the settings that we ship. Each way is measured `--rounds` times, in turns; the
ratio is to the script, and the ideal is what the boots alone take. CPU is for each execution: this process's, client
and flow, and the whole machine's, with the stand-in, the sandboxes, the Prefect server, and whatever else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

from rich.console import Console
from rich.table import Table

from rlm_batch import batch
from rlm_batch.deployments.server import PrefectServer

TESTS = Path(__file__).resolve().parents[1] / "tests"


@dataclass(frozen=True)
class Provider:
    """A provider to measure: its stand-in, which boots sandboxes in the seconds that it is given, and its script."""

    name: str
    standin: Callable[[float], contextlib.AbstractContextManager[Any]]
    calls: Callable[[], contextlib.AbstractContextManager[Callable[[int], int]]]


@dataclass
class Way:
    """What was measured of one way."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    machine: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------ providers


def loaded(name: str, file: str) -> Any:
    """A module of the stand-ins', under a name that is not an SDK's."""
    spec = importlib.util.spec_from_file_location(name, TESTS / "standins" / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def daytona(boot: float) -> Iterator[Any]:
    """The local Daytona; the environment leads the SDK to it."""
    module = loaded("standin_of_daytona", "daytona/running.py")
    with module.Running(boot_s=boot) as running:
        os.environ.update(running.environment)
        yield running


@contextlib.contextmanager
def daytona_calls() -> Iterator[Callable[[int], int]]:
    """Create, run, delete."""
    from daytona import Daytona

    client = Daytona()

    def one(x: int) -> int:
        sandbox = client.create()
        try:
            return int(sandbox.process.code_run(f"print({x} + 1)").result)
        finally:
            sandbox.delete()

    yield one


class RunningModal:
    """The local Modal, as it is asked here."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def state(self) -> dict[str, Any]:
        """What is alive in it."""
        return self._process.ask("state")


@contextlib.contextmanager
def modal(boot: float) -> Iterator[RunningModal]:
    """The local Modal; the environment leads the client to it."""
    module = loaded("standin_process", "process.py")
    with module.StandinProcess("modal") as process:
        process.ask("set", boot_delay=boot)
        names = {"url": "MODAL_SERVER_URL", "token_id": "MODAL_TOKEN_ID", "token_secret": "MODAL_TOKEN_SECRET"}
        os.environ.update({name: process.hello[key] for key, name in names.items()})
        yield RunningModal(process)


@contextlib.contextmanager
def modal_calls() -> Iterator[Callable[[int], int]]:
    """Create, run, terminate; the client, the app and the image are made once."""
    import modal

    client = modal.Client.from_credentials(os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"])
    app = modal.App.lookup("script", create_if_missing=True, client=client)
    image = modal.Image.debian_slim(python_version="3.12").build(app)

    def one(x: int) -> int:
        sandbox = modal.Sandbox.create(app=app, image=image, timeout=600, client=client)
        try:
            process = sandbox.exec("python", "-c", f"print({x} + 1)", timeout=60)
            answer = int(process.stdout.read())
            process.wait()
            return answer
        finally:
            sandbox.terminate()
            sandbox.detach()

    yield one
    client.close()


PROVIDERS = (Provider("daytona", daytona, daytona_calls), Provider("modal", modal, modal_calls))


# ------------------------------------------------------------------------------------------------------------ measuring


def script(provider: Provider, executions: int, workers: int) -> None:
    """In threads."""
    with provider.calls() as one, ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(one, range(executions))) == list(range(1, executions + 1))


def tasks(provider: Provider, executions: int, workers: int) -> None:
    """In threads, each call a Prefect task."""
    from prefect import flow, task
    from prefect.task_runners import ThreadPoolTaskRunner

    with provider.calls() as one:

        @task
        def tracked(x: int) -> int:
            return one(x)

        @flow(task_runner=ThreadPoolTaskRunner(workers))  # type: ignore[arg-type]
        def calls() -> list[int]:
            return tracked.map(range(executions)).result()  # type: ignore[no-any-return]

        assert calls() == list(range(1, executions + 1))


def through_batch(provider: str, executions: int, workers: int) -> None:
    """The same through the flow."""
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(batch("SUBMIT(y=x + 1)", inputs=inputs, provider=provider, max_workers=workers))
    assert [result.y for result in results] == list(range(1, executions + 1))


def busy() -> float:
    """CPU seconds that the machine has spent, all of its processes together."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _waiting, interrupts, soft = map(int, words[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def measure(way: Way, work: Callable[[], None]) -> None:
    """Adds one sample."""
    all_before, before, begun = busy(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    way.seconds.append(time.perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF)
    way.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    way.machine.append(busy() - all_before)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--boots", default="0.09,2", help="seconds that a sandbox takes to boot, comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--providers", default=",".join(provider.name for provider in PROVIDERS))
    arguments = parser.parse_args()
    count, workers, wanted = arguments.executions, arguments.workers, arguments.providers.split(",")
    table = Table(title=f"{count} executions, {workers} at once: medians of {arguments.rounds}", box=None)
    for name in ("provider", "boot", "way", "seconds", "of the ideal", "ratio", "CPU ms each", "machine's"):
        table.add_column(name, justify="left" if name in ("provider", "way") else "right")
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            for provider in PROVIDERS:
                for boot in map(float, arguments.boots.split(",")) if provider.name in wanted else ():
                    with provider.standin(boot) as running:
                        ways: dict[str, Callable[[], None]] = {
                            "script": lambda one=provider: script(one, count, workers),
                            "tasks": lambda one=provider: tasks(one, count, workers),
                            "batch": lambda one=provider: through_batch(one.name, count, workers),
                        }
                        script(provider, 1, 1)  # imports
                        tasks(provider, 1, 1)
                        through_batch(provider.name, 1, 1)
                        found = {name: Way() for name in ways}
                        for _ in range(arguments.rounds):
                            for name, work in ways.items():
                                measure(found[name], work)
                                until = time.monotonic() + 10  # one way's removals are not the next one's load
                                while running.state()["sandboxes"] and time.monotonic() < until:
                                    time.sleep(0.05)
                    ideal = math.ceil(count / workers) * boot
                    peer = statistics.median(found["script"].seconds)
                    for name, way in found.items():
                        seconds, cpu = statistics.median(way.seconds), statistics.median(way.cpu)
                        machine = statistics.median(way.machine)
                        table.add_row(
                            provider.name, f"{boot * 1000:.0f} ms", name, f"{seconds:.2f}", f"{seconds / ideal:.2f}",
                            f"{seconds / peer:.2f}", f"{cpu / count * 1000:.1f}", f"{machine / count * 1000:.1f}",
                        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
