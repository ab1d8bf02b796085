"""The time that code waits for its sandbox: our interpreter on each isolation level, and peers without isolation.

    python benchmarks/interpreter.py [--rounds 40]

The rows are medians in milliseconds:
- the first answer of a new interpreter
- a warm call that keeps its state
- a call from the code to a function of the host and back
- a call with a variable of 1 MiB
- a stateless execution, forked in a warm sandbox
- a stateless execution, forked from a process that has run `prepare`

The peers are `dspy.LocalInterpreter`, which is a subprocess without isolation or stateless executions, and a bare
worker of a dozen lines over two pipes. Ratios are to dspy: for a time, at most 1.0 means not slower than dspy. The last
rows count the new interpreters that answer and shut down per second, on one core and on all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # Otherwise importing dspy waits for the network.

import dspy
from rich.console import Console
from rich.table import Table

from rlm_batch.blocks.local.block import LocalSandbox
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.errors import ConfigurationError
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

BIG = "x" * (1 << 20)
LEVELS = ("bubblewrap", "landlock", "none")
FRESH_SECONDS = 5.0
CALLS = 50  # calls of the host in one execution; each call has this share of the execution's own time
WORKER = """
import json, sys
names = {}
def echo(value):
    print(json.dumps({"call": value}), flush=True)
    return json.loads(sys.stdin.readline())["value"]
names["echo"] = echo
for line in sys.stdin:
    request = json.loads(line)
    names.update(request["variables"])
    exec(request["code"], names)
    print(json.dumps({"done": True}), flush=True)
"""


class PipeWorker:
    """A worker process with nothing around it: the least that an interpreter can cost."""

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def execute(self, code: str, variables: dict[str, Any] | None = None) -> None:
        self._say({"code": code, "variables": variables or {}})
        assert self._process.stdout is not None
        while "done" not in (answer := json.loads(self._process.stdout.readline())):
            self._say({"value": answer["call"]})

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def shutdown(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def echo(value: Any) -> Any:
    """Return the value: the function of the host that the code calls."""
    return value


def make_ours(level: str) -> SyncInterpreter:
    """Return our interpreter on a level; `list_usable_levels` has probed the level already."""
    provider = LocalSandbox(isolation=level)  # type: ignore[arg-type]
    return SyncInterpreter(lambda: provider.open({}), tools={"echo": echo})


def time_work(work: Callable[[], Any]) -> float:
    """Return the milliseconds that the work takes."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1000


def measure_calls(make: Callable[[], Any], rounds: int, samples: dict[str, list[float]]) -> None:
    """Measure one round of all rows except the stateless ones, and add the times to the samples."""
    interpreter = make()

    def first() -> None:
        interpreter.start()
        interpreter.execute("x = 1")

    samples.setdefault("first answer", []).append(time_work(first))
    for _ in range(rounds):
        samples.setdefault("warm call", []).append(time_work(lambda: interpreter.execute("x += 1")))
    milliseconds = time_work(lambda: interpreter.execute(f"for _ in range({CALLS}): echo(1)"))
    samples.setdefault("host call", []).append(milliseconds / CALLS)
    for _ in range(3):
        samples.setdefault("1 MiB variable", []).append(time_work(lambda: interpreter.execute("x = 1", {"v": BIG})))
    interpreter.shutdown()


def count_fresh(name: str, cores: int) -> float:
    """Return the new interpreters that answer once and shut down per second, with one thread for each core."""
    done = subprocess.run(
        [sys.executable, __file__, "--fresh", name, "--cores", str(cores)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def print_fresh(make: Callable[[], Any], cores: int) -> None:
    """Limit this process and its children to `cores` cores, and print how many new interpreters answer per second."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    counts: list[int] = []

    def run_until(end: float) -> None:
        count = 0
        while time.perf_counter() < end:
            interpreter = make()
            interpreter.start()
            interpreter.execute("x = 1")
            interpreter.shutdown()
            count += 1
        counts.append(count)

    run_until(time.perf_counter() + 0.5)  # The first one imports modules and starts a zygote.
    counts.clear()
    begun = time.perf_counter()
    threads = [threading.Thread(target=run_until, args=(begun + FRESH_SECONDS,)) for _ in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts) / (time.perf_counter() - begun))


async def measure_stateless(level: str, rounds: int, prepare: Preparation | None = None) -> list[float]:
    """Return the milliseconds of stateless executions in one warm sandbox."""
    samples: list[float] = []
    async with LocalSandbox(isolation=level).interpreter(prepare=prepare) as interpreter:  # type: ignore[arg-type]
        await interpreter.execute("SUBMIT(x=1)")
        await asyncio.sleep(0.2)
        for _ in range(rounds):
            begun = time.perf_counter()
            await interpreter.execute("SUBMIT(x=1)")
            samples.append((time.perf_counter() - begun) * 1000)
    return samples


def list_usable_levels() -> list[str]:
    """Return the levels that this machine has; `none` is for comparison."""
    levels: list[str] = []
    for level in LEVELS:
        try:
            asyncio.run(LocalSandbox(isolation=level).check())  # type: ignore[arg-type]
        except ConfigurationError as error:
            print(f"{level} is left out: {error}", file=sys.stderr)
        else:
            levels.append(level)
    return levels


def main() -> None:
    """Measure every interpreter, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="interpreters of each kind")
    parser.add_argument(
        "--fresh", metavar="NAME", help="print how many of that kind answer in a second, and nothing else"
    )
    parser.add_argument("--cores", type=int, default=1, help="cores for that")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    makers: dict[str, Callable[[], Any]] = {
        "dspy": lambda: dspy.LocalInterpreter(tools={"echo": echo}),
        "pipe worker": PipeWorker,
        **{level: lambda level=level: make_ours(level) for level in LEVELS},
    }
    if arguments.fresh is not None:
        print_fresh(makers[arguments.fresh], arguments.cores)
        return
    levels = list_usable_levels()
    makers = {name: make for name, make in makers.items() if name not in LEVELS or name in levels}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in makers}
    for _ in range(rounds):
        for name, make in makers.items():
            measure_calls(make, 20, samples[name])
    for level in levels:
        samples[level]["stateless"] = asyncio.run(measure_stateless(level, 20 * rounds))
        samples[level]["prepared"] = asyncio.run(measure_stateless(level, 20 * rounds, Preparation("import decimal")))
    table = Table(title=f"Interpreters: medians of {rounds} rounds, ms (ratio to dspy)", box=None)
    table.add_column("")
    for name in makers:
        table.add_column(name, justify="right")
    for row in ("first answer", "warm call", "host call", "1 MiB variable", "stateless", "prepared"):
        cells = [row]
        peer = statistics.median(samples["dspy"][row]) if row in samples["dspy"] else None
        for rows in samples.values():
            if row not in rows:
                cells.append("")
                continue
            median = statistics.median(rows[row])
            cells.append(f"{median:.2f}" + (f" ({median / peer:.2f})" if peer else ""))
        table.add_row(*cells)
    for cores in sorted({1, len(os.sched_getaffinity(0))}):
        fresh = {name: count_fresh(name, cores) for name in makers}
        cells = (f"{count:.0f} ({count / fresh['dspy']:.1f})" for count in fresh.values())
        table.add_row(f"a second, {cores} core{'s' if cores > 1 else ''}", *cells)
    Console(width=110).print(table)
    leaked = [thread.name for thread in threading.enumerate() if not thread.daemon]
    assert leaked == ["MainThread"], leaked


if __name__ == "__main__":
    main()
