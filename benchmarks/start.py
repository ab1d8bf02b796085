"""Seconds to the first answer: of an interpreter in a new Python, and of a command with each kind of Prefect server.

    python benchmarks/start.py [--rounds 5] [--at-once 50]

Each variant is a separate process, and the variants take turns. An uncounted first round fills the caches of their
shared home directory. `from rlm_batch import LocalInterpreter`, alone and with a first answer, is compared with a bare
Python. `rlm-batch batch hello.py`, from start to end, is compared with a script whose flow does nothing. Prefect starts
a server for that script too. With the shared server, the first command starts it and the next one finds it. A wrong
option is refused. Processor seconds are those of the command and of its own server. At last, a script on the shared
server calls `batch` many times in a row and as often at once.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORT = """
import sys
from rlm_batch import LocalInterpreter
assert "prefect" not in sys.modules
"""
ANSWER = f"""{IMPORT}
with LocalInterpreter() as interpreter:
    interpreter.execute("SUBMIT(x=1)")
"""
FLOW = """
from prefect import flow

@flow
def hello():
    return "hello"

hello()
"""
MANY = """
import asyncio, sys, time
from rlm_batch import batch

async def measure():
    runs = int(sys.argv[1])
    await batch(["SUBMIT(x=1)"])
    begun = time.perf_counter()
    for _ in range(runs):
        await batch(["SUBMIT(x=1)"])
    in_a_row = time.perf_counter() - begun
    await asyncio.gather(*(batch(["SUBMIT(x=1)"]) for _ in range(runs)))
    print(in_a_row, time.perf_counter() - begun - in_a_row)

asyncio.run(measure())
"""
EMBEDDED = "rlm-batch batch hello.py, embedded server"
FIRST = "rlm-batch batch hello.py, first on the shared server"
NEXT = "rlm-batch batch hello.py, next on the shared server"
WRONG = "rlm-batch batch hello.py --wrong"
TARGETS = {
    EMBEDDED: "the target is 1.2 times",
    FIRST: "the target is 8 s",
    NEXT: "the target is 2 s and 2 processor seconds",
    WRONG: "the target is 0.3 s",
}


def main() -> None:
    """Measure each way, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=50, help="calls of batch at once; 0 leaves them out")
    arguments = parser.parse_args()
    rounds: int = arguments.rounds
    many: list[list[float]] = []
    python, command = sys.executable, str(Path(sys.executable).with_name("rlm-batch"))
    ways = {
        "bare Python": [python, "-c", "pass"],
        "import of LocalInterpreter": [python, "-c", IMPORT],
        "first answer of LocalInterpreter": [python, "-c", ANSWER],
        "a flow that does nothing": [python, "-c", FLOW],
        EMBEDDED: [command, "batch", "hello.py"],
        FIRST: [command, "batch", "hello.py"],
        NEXT: [command, "batch", "hello.py"],
        WRONG: [command, "batch", "hello.py", "--wrong"],
    }
    processor_seconds: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as home:
        Path(home, "hello.py").write_text("SUBMIT(greeting='hello')")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {"HOME": home, "DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        environment["RLM_BATCH_SERVER"] = "shared"
        # On a busy machine, Prefect's own server does not start within its default of 20 s.
        environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
        for number in range(rounds + 1):
            for name, command_line in ways.items():
                settings = environment | ({"RLM_BATCH_SERVER_IDLE": "0"} if name == EMBEDDED else {})
                begun, used = time.perf_counter(), measure_children()
                done = subprocess.run(command_line, cwd=home, env=settings, capture_output=True, text=True, check=False)
                assert done.returncode == (2 if name == WRONG else 0), done.stderr
                if number:  # The first round makes the database and compiles the modules.
                    seconds[name].append(time.perf_counter() - begun)
                    processor_seconds[name].append(measure_children() - used)
            if number and arguments.at_once:
                script = [python, "-c", MANY, str(arguments.at_once)]
                done = subprocess.run(script, cwd=home, env=environment, capture_output=True, text=True, check=True)
                many.append([float(word) for word in done.stdout.split()])
            subprocess.run([command, "server", "stop"], env=environment, capture_output=True, check=True)
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    bare, peer = medians["bare Python"], medians["a flow that does nothing"]
    for name in ("import of LocalInterpreter", "first answer of LocalInterpreter"):
        print(f"{name}: {medians[name]:.2f} s, {medians[name] - bare:.2f} s more than a bare Python")
    print(f"a flow that does nothing: {peer:.2f} s")
    for name, target in TARGETS.items():
        samples, used = seconds[name], statistics.median(processor_seconds[name])
        print(
            f"{name}: {medians[name]:.2f} s ({min(samples):.2f} to {max(samples):.2f}), {used:.2f} processor seconds, "
            f"{medians[name] / peer:.2f} times that flow; {target}"
        )
    if many:
        row, at_once = (statistics.median(samples) for samples in zip(*many, strict=True))
        ratio = statistics.median(gathered / one_by_one for one_by_one, gathered in many)
        print(
            f"{arguments.at_once} calls of batch: {row:.1f} s in a row, {at_once:.1f} s at once, {ratio:.2f} times; ",
            end="",
        )
        print("the target is 0.6")


def measure_children() -> float:
    """Return the processor seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
