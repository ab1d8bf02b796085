"""The working tree's speed beside an earlier commit's, so that a change that slows it is seen.

    python benchmarks/compare.py BASE [--only "warm call"] [--rounds 10]

BASE is checked out in a temporary folder. Both sides run the same programs with this Python, in turns, and each side is
first in every other round. A line of the table has the medians of the rounds and the ratio of the medians with a 95 %
interval, by bootstrap over the rounds. Less is better in all lines. The exit status is 1 if an interval lies wholly
above 1.05. Run it on a machine that does nothing else; it takes ten minutes.

A program may use only what BASE has too: the public names of `rlm_batch`, and the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL_SERVER = ROOT / "tests" / "standins" / "openai_chat.py"
LIMIT = 1.05
RESAMPLES = 4000
PROGRAM_SECONDS = 300  # time limit of one program
FRESH_SECONDS = 1.0
BATCH = 200  # executions; with 500, all figures took 18 minutes
COMMAND = "from rlm_batch.cli.main import main; import sys; sys.exit(main())"
QUERIES = "SUBMIT(count=len(llm_query_batched([f'question {i}' for i in range(100)], concurrency=16)))"


def measure_interpreter(level: str) -> dict[str, float]:
    """Return the milliseconds of an interpreter's first answer, calls and whole life."""
    from rlm_batch import LocalInterpreter

    def make() -> Any:
        return LocalInterpreter(isolation=level, tools={"echo": lambda value: value})  # type: ignore[arg-type]

    first: list[float] = []
    warm: list[float] = []
    host: list[float] = []
    large: list[float] = []
    for number in range(13):
        interpreter = make()

        def answer(interpreter: Any = interpreter) -> None:
            interpreter.start()
            interpreter.execute("x = 1")

        seconds = time_work(answer)
        if number:  # The first interpreter starts a zygote.
            first.append(seconds)
        warm += [time_work(lambda: interpreter.execute("x += 1")) for _ in range(40)]  # noqa: B023
        host.append(time_work(lambda: interpreter.execute("for _ in range(50): echo(1)")) / 50)  # noqa: B023
        large += [time_work(lambda: interpreter.execute("x = 1", {"v": "x" * (1 << 20)})) for _ in range(3)]  # noqa: B023
        interpreter.shutdown()
    cycles = [time_work(lambda: run_cycle(make)) for _ in range(60)]
    samples = {"first answer": first, "warm call": warm, "host call": host, "1 MiB variable": large, "cycle": cycles}
    return {name: 1000 * statistics.median(seconds) for name, seconds in samples.items()}


def time_work(work: Callable[[], Any]) -> float:
    """Return the seconds that the work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def run_cycle(make: Callable[[], Any]) -> None:
    """Start an interpreter, get one answer, and shut it down."""
    interpreter = make()
    interpreter.start()
    interpreter.execute("x = 1")
    interpreter.shutdown()


def measure_fresh(level: str, cores: int) -> dict[str, float]:
    """Return the milliseconds that a fresh sandbox takes, with a thread of cycles for each core."""
    from rlm_batch import LocalInterpreter

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    counts: list[int] = []

    def run_until(end: float) -> None:
        count = 0
        while time.perf_counter() < end:
            run_cycle(lambda: LocalInterpreter(isolation=level))  # type: ignore[arg-type]
            count += 1
        counts.append(count)

    run_until(time.perf_counter() + 0.5)  # The first one imports modules and starts a zygote.
    counts.clear()
    end = time.perf_counter() + FRESH_SECONDS
    threads = [threading.Thread(target=run_until, args=(end,)) for _ in range(cores)]
    seconds = time_work(lambda: ([thread.start() for thread in threads], [thread.join() for thread in threads]))
    return {f"fresh sandbox, {level}, {cores} core{'s' if cores > 1 else ''}": 1000 * seconds / sum(counts)}


def measure_flows() -> dict[str, float]:
    """Return the seconds of batches, after two that import everything and find the server."""
    from rlm_batch import batch

    numbers = [{"x": x} for x in range(BATCH)]

    async def run(inputs: list[dict[str, int]], **options: Any) -> None:
        results = await batch("SUBMIT(y=x + 1)", inputs=inputs, **options)
        assert [result.y for result in results] == [item["x"] + 1 for item in inputs]

    async def measure(url: str) -> dict[str, float]:
        os.environ.update({"OPENAI_API_KEY": "sk-x", "OPENAI_API_BASE": url})

        async def ask() -> None:
            limits: dict[str, Any] = {"batch_concurrency": 16, "max_llm_calls": None}
            (result,) = await batch([QUERIES], language_model="openai/gpt-4o-mini", **limits)
            assert result.count == 100

        async def run_at_once() -> None:
            await asyncio.gather(*(run(numbers[:1]) for _ in range(16)))

        works = {
            f"batch of {BATCH}, a sandbox and a task run each": lambda: run(numbers, executions_per_task=1),
            f"batch of {BATCH}, reused": lambda: run(numbers, executions_per_task=50, reuse_sandboxes=True),
            "100 queries": ask,
            "16 flows at once": run_at_once,
        }
        seconds: dict[str, float] = {}
        await run(numbers[:4])
        await ask()
        for name, work in works.items():
            begun = time.perf_counter()
            await work()
            seconds[name] = time.perf_counter() - begun
        return seconds

    model_server = subprocess.Popen(
        [sys.executable, str(MODEL_SERVER), "--delay", "0.2"], stdout=subprocess.PIPE, text=True
    )
    with model_server:
        try:
            assert model_server.stdout is not None
            return asyncio.run(measure(model_server.stdout.readline().strip()))
        finally:
            model_server.terminate()


def measure_command() -> dict[str, float]:
    """Return the seconds of a command; the uncounted first round has started its server."""
    Path("hello.py").write_text("SUBMIT(greeting='hello')")
    command = [sys.executable, "-c", COMMAND, "batch", "hello.py"]
    return {"second command": time_work(lambda: subprocess.run(command, capture_output=True, check=True))}


PROGRAMS: dict[str, Callable[[], dict[str, float]]] = {
    "interpreter": lambda: measure_interpreter("bubblewrap"),
    **{
        f"fresh {level} {cores}": lambda level=level, cores=cores: measure_fresh(level, cores)
        for level in ("bubblewrap", "landlock")
        for cores in (1, 2)
    },
    "flows": measure_flows,
    "command": measure_command,
}
FIGURES = {
    "first answer": "interpreter",
    "warm call": "interpreter",
    "host call": "interpreter",
    "1 MiB variable": "interpreter",
    "cycle": "interpreter",
    "fresh sandbox, bubblewrap, 1 core": "fresh bubblewrap 1",
    "fresh sandbox, bubblewrap, 2 cores": "fresh bubblewrap 2",
    "fresh sandbox, landlock, 1 core": "fresh landlock 1",
    "fresh sandbox, landlock, 2 cores": "fresh landlock 2",
    f"batch of {BATCH}, a sandbox and a task run each": "flows",
    f"batch of {BATCH}, reused": "flows",
    "100 queries": "flows",
    "16 flows at once": "flows",
    "second command": "command",
}


class Side:
    """A checkout with a separate home, which runs programs. Its server lives from the first round to the last."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        imports, self._home = folder / "imports", folder / "home"
        imports.mkdir(parents=True)
        self._home.mkdir()
        (imports / "rlm_batch").symlink_to(checkout)
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RLM_BATCH_"))}
        keep.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environment = keep | {
            "PYTHONPATH": str(imports), "HOME": str(self._home), "RLM_BATCH_SERVER": "shared",
            "DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_LOGGING_LEVEL": "CRITICAL",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }  # fmt: skip

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this Python with the side's package."""
        return subprocess.run(
            [sys.executable, *arguments], cwd=self._home, env=self._environment, capture_output=True, text=True,
            timeout=PROGRAM_SECONDS, check=False,
        )  # fmt: skip

    def measure(self, program: str) -> dict[str, float]:
        """Return the program's figures by their names. Exits if the program fails."""
        done = self.run(__file__, "--measure", program)
        if done.returncode:
            sys.exit(f"the program {program!r} failed:\n{done.stderr[-2000:]}")
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures


@contextmanager
def open_sides(base: str) -> Iterator[tuple[Side, Side]]:
    """Check BASE out beside the working tree; remove it and stop both servers at the end."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        checkout = Path(folder, "base")
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), base], check=True)
        sides = Side(checkout, Path(folder, "1")), Side(ROOT, Path(folder, "2"))
        try:
            yield sides
        finally:
            for side in sides:
                side.run("-c", COMMAND, "server", "stop")
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def find_interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the ratio of the medians, and the ends of its 95 % interval."""
    draw = random.Random(1).choices

    def find_ratio(rounds: list[tuple[float, float]]) -> float:
        before, after = zip(*rounds, strict=True)
        return statistics.median(after) / statistics.median(before)

    ratios = sorted(find_ratio(draw(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return find_ratio(pairs), ratios[round(0.025 * RESAMPLES)], ratios[round(0.975 * RESAMPLES) - 1]


def main() -> None:
    """Measure both sides, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="the commit to compare with")
    parser.add_argument("--only", action="append", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--measure", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(PROGRAMS[arguments.measure]()))
        return
    if arguments.base is None:
        parser.error("name the commit to compare with, such as v1.0.0")
    names = [name for name in FIGURES if name in (arguments.only or FIGURES)]
    programs = dict.fromkeys(FIGURES[name] for name in names)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in FIGURES}
    with open_sides(arguments.base) as sides:
        for number in range(arguments.rounds + 1):
            for program in programs:
                if not number and program.startswith("fresh"):
                    continue
                order = (0, 1) if number % 2 else (1, 0)
                figures = {place: sides[place].measure(program) for place in order}
                if number:  # The round before the first compiles modules and starts servers.
                    for name in figures[0]:
                        samples[name].append((figures[0][name], figures[1][name]))
    print(f"{arguments.rounds} rounds: medians of {arguments.base} and of the working tree, and their ratio")
    slower: list[str] = []
    for name in names:
        ratio, low, high = find_interval(samples[name])
        before, after = (statistics.median(values) for values in zip(*samples[name], strict=True))
        unit = "s" if FIGURES[name] in ("flows", "command") else "ms"
        print(f"{name:45} {before:8.3f} {after:8.3f} {unit:2}  {ratio:.2f} ({low:.2f} to {high:.2f})")
        if low > LIMIT:
            slower.append(name)
    if slower:
        sys.exit(f"slower than {arguments.base}: {', '.join(slower)}")


if __name__ == "__main__":
    main()
