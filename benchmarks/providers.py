"""What a sandbox for each execution costs on a provider: `batch` beside the obvious script over the provider's SDK.

    python benchmarks/providers.py [--executions 100] [--workers 20] [--boots 0.09,2] [--rounds 3]

The provider is the local stand-in of the tests, in a process of its own, told to take that many seconds for a sandbox
to boot. The script is a thread pool over the SDK's synchronous client: create, run, delete. `batch` runs against a
Prefect server of its own, with the settings that we ship. Each way is measured `--rounds` times, in turns; the ratio
is to the script, and the ideal is what the boots alone take. CPU is this process's, client and flow, for each
execution; the server's and the sandboxes' is not in it.
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
    script: Callable[[int, int], None]


@dataclass
class Way:
    """What was measured of one way."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------ providers


@contextlib.contextmanager
def daytona(boot: float) -> Iterator[Any]:
    """The local Daytona; the environment leads the SDK to it."""
    spec = importlib.util.spec_from_file_location("standin_of_daytona", TESTS / "standins" / "daytona.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.Running(boot_s=boot) as running:
        os.environ.update(running.environment)
        yield running


def daytona_script(executions: int, workers: int) -> None:
    """Create, run, delete, in threads."""
    from daytona import Daytona

    client = Daytona()

    def one(x: int) -> int:
        sandbox = client.create()
        try:
            return int(sandbox.process.code_run(f"print({x} + 1)").result)
        finally:
            sandbox.delete()

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(one, range(executions))) == list(range(1, executions + 1))


PROVIDERS = (Provider("daytona", daytona, daytona_script),)


# ------------------------------------------------------------------------------------------------------------ measuring


def through_batch(provider: str, executions: int, workers: int) -> None:
    """The same through the flow."""
    inputs = [{"x": x} for x in range(executions)]
    results = asyncio.run(batch("SUBMIT(y=x + 1)", inputs=inputs, provider=provider, max_workers=workers))
    assert [result.y for result in results] == list(range(1, executions + 1))


def measure(way: Way, work: Callable[[], None]) -> None:
    """Adds one sample."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    way.seconds.append(time.perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF)
    way.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


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
    for name in ("provider", "boot", "way", "seconds", "of the ideal", "ratio", "CPU ms each"):
        table.add_column(name, justify="left" if name in ("provider", "way") else "right")
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            for provider in PROVIDERS:
                for boot in map(float, arguments.boots.split(",")) if provider.name in wanted else ():
                    with provider.standin(boot) as running:
                        ways: dict[str, Callable[[], None]] = {
                            "script": lambda one=provider: one.script(count, workers),
                            "batch": lambda one=provider: through_batch(one.name, count, workers),
                        }
                        provider.script(1, 1)  # imports
                        through_batch(provider.name, 1, 1)
                        found = {name: Way() for name in ways}
                        for _ in range(arguments.rounds):
                            for name, work in ways.items():
                                measure(found[name], work)
                                until = time.monotonic() + 10  # one way's removals are not the next one's load
                                while running.state()["sandboxes"] and time.monotonic() < until:
                                    time.sleep(0.05)
                    ideal = math.ceil(count / workers) * boot
                    script = statistics.median(found["script"].seconds)
                    for name, way in found.items():
                        seconds, cpu = statistics.median(way.seconds), statistics.median(way.cpu)
                        table.add_row(
                            provider.name, f"{boot * 1000:.0f} ms", name, f"{seconds:.2f}", f"{seconds / ideal:.2f}",
                            f"{seconds / script:.2f}", f"{cpu / count * 1000:.1f}",
                        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
