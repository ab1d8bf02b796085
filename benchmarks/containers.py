"""What a batch in containers costs beside the engine's own `run`: the same executions and flags, in one run.

    python benchmarks/containers.py [--executions 100] [--workers 4] [--rounds 3] [--image NAME] [--runtime runc]

A Prefect server with the settings that we ship runs as a process of its own. The peer is a pool of as many threads,
each of whose executions is `podman run --rm` (or Docker's) of the image with all flags that a sandbox of ours has. Task
runs that do nothing, as many at once, are what Prefect costs by itself. The line below the table has what the target is
about: a batch's seconds less those, beside the peer's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batch import Sample, Way, build_table, measure, run_batch, run_empty_tasks
from rich.console import Console

from rlm_batch import ContainerInterpreter, ContainerSandbox
from rlm_batch.blocks.container.command import build_run_command
from rlm_batch.blocks.container.deletion import make_name
from rlm_batch.blocks.container.engine import find_engine
from rlm_batch.deployments.server import PrefectServer

BARE_CODE = "import sys\nprint(int(sys.argv[1]) + 1)"
CODE = "SUBMIT(y=x + 1)"
PEER, NOTHING, FRESH, REUSED = "engine's run", "task runs that do nothing", "a container each", "reused, 50 a task"


def run_containers(provider: ContainerSandbox, executions: int, workers: int) -> None:
    """The peer: a thread pool, and for each execution a container that the engine runs."""
    engine = asyncio.run(find_engine(provider.engine))

    def run_one(x: int) -> int:
        words = build_run_command(engine, provider, provider.image, BARE_CODE, labels={}, name=make_name())
        done = subprocess.run([*words, str(x)], stdin=subprocess.DEVNULL, capture_output=True, check=True)
        return int(done.stdout)

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(run_one, range(executions))) == list(range(1, executions + 1))


def run_interpreters(provider: ContainerSandbox, executions: int, workers: int) -> None:
    """A peer: a thread pool over sandboxes of ours, without a flow."""
    fields = {"image": provider.image, "runtime": provider.runtime}

    def run_one(x: int) -> int:
        with ContainerInterpreter(**fields) as interpreter:  # type: ignore[arg-type]
            return interpreter.execute(CODE, {"x": x}).y

    with ThreadPoolExecutor(workers) as threads:
        assert list(threads.map(run_one, range(executions))) == list(range(1, executions + 1))


def main() -> None:
    """Measures, and prints the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--image", default=ContainerSandbox.model_fields["image"].default)
    parser.add_argument("--runtime")
    arguments = parser.parse_args()
    count, workers = arguments.executions, arguments.workers
    provider = ContainerSandbox(image=arguments.image, runtime=arguments.runtime)
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            provider.save("measured", overwrite=True)  # type: ignore[unused-coroutine]
            ours = {"provider": "container-sandbox/measured"}
            reused = {**ours, "reuse_sandboxes": True, "executions_per_task": 50}
            run_batch(workers, workers, "auto", **ours)  # imports, and the probe of the image
            print(asyncio.run(provider.check()))
            ways = {
                PEER: Way(lambda: run_containers(provider, count, workers)),
                "thread pool, a sandbox each": Way(lambda: run_interpreters(provider, count, workers)),
                NOTHING: Way(lambda: run_empty_tasks(count, workers), count),
                FRESH: Way(lambda: run_batch(count, workers, "auto", executions_per_task=1, **ours), count),
                REUSED: Way(lambda: run_batch(count, workers, "auto", **reused), -(-count // 50)),
            }
            found: dict[str, list[Sample]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, way in ways.items():
                    found[name].append(measure(way, server))
    title = f"{count} executions, {workers} workers: medians of {arguments.rounds}; CPU for each execution"
    Console(width=120).print(build_table(found, count, title))
    seconds = {name: statistics.median(sample.seconds for sample in samples) for name, samples in found.items()}
    each = (seconds[FRESH] - seconds[NOTHING]) / seconds[PEER]
    again = seconds[REUSED] / seconds[PEER]
    print(f"less task runs that do nothing: {each:.2f} of the engine's run; reused: {again:.2f}")


if __name__ == "__main__":
    main()
