"""What a sweep costs beside a pool of processes that runs the same function, whose import takes longer than it does.

    pip install scikit-learn    # beside rlm-batch, in the same environment
    python benchmarks/digits.py [--workers 4] [--rounds 3]

24 trials of a support vector machine on scikit-learn's digits, three folds each, in one run and in turns. The peer is
`concurrent.futures.ProcessPoolExecutor` with as many workers, new ones in each round: each of them imports scikit-learn
with its first trial. The sweep has what is installed here (`packages="environment"`), on the strongest level of
isolation that there is; a Prefect server runs as a process of its own. With `prepare` each sandbox imports
scikit-learn once; without, as code that was not made for this does, each trial does.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

from rlm_batch import sweep
from rlm_batch.deployments.server import PrefectServer

GRID = {"C": [0.1, 0.3, 1, 3, 10, 30], "gamma": [0.0003, 0.001, 0.003, 0.01]}
LIMIT = 1.5  # times the pool


def evaluate(C: float, gamma: float) -> float:
    """The function of a trial: accuracy over three folds."""
    from sklearn.datasets import load_digits  # type: ignore[reportMissingImports]
    from sklearn.model_selection import cross_val_score  # type: ignore[reportMissingImports]
    from sklearn.svm import SVC  # type: ignore[reportMissingImports]

    X, y = load_digits(return_X_y=True)
    return float(cross_val_score(SVC(C=C, gamma=gamma), X, y, cv=3).mean())


PREPARE = """
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC
load_digits()
"""
CODE = f"{inspect.getsource(evaluate)}\nSUBMIT(accuracy=evaluate(C, gamma))"


def run_pool(workers: int) -> list[float]:
    """The peer."""
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(evaluate, *zip(*itertools.product(*GRID.values()), strict=True)))


def run_sweep(workers: int, prepare: str | None) -> list[float]:
    """The flow."""
    report = asyncio.run(
        sweep(
            CODE,
            GRID,
            objective="accuracy",
            direction="maximize",
            max_workers=workers,
            prepare=prepare,
            reuse_sandboxes=True,
            provider_options={"packages": "environment"},
        )
    )
    return [trial.accuracy for trial in report.trials]


def main() -> None:
    """Measures, and prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ways: dict[str, Callable[[int], list[float]]] = {
        "ProcessPoolExecutor": run_pool,
        "sweep, with prepare": lambda workers: run_sweep(workers, PREPARE),
        "sweep, an import for each trial": lambda workers: run_sweep(workers, None),
    }
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ |= {"RLM_BATCH_RESULTS": f"{home}/results", "RLM_BATCH_CACHE": f"{home}/cache"}
        from prefect.logging.handlers import APILogWorker
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            expected = run_pool(arguments.workers)  # what is compiled is on disk from here on
            run_sweep(arguments.workers, PREPARE)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, run in ways.items():
                    begun = time.perf_counter()
                    assert run(arguments.workers) == expected
                    seconds[name].append(time.perf_counter() - begun)
            APILogWorker.drain_all()  # while the server is there
    peer = statistics.median(seconds["ProcessPoolExecutor"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name}: {median:.2f} s, {median / peer:.2f} times the pool ({min(found):.2f} to {max(found):.2f} s)")
    print(f"{len(expected)} trials, {arguments.workers} workers; the target with prepare is {LIMIT} times the pool")


if __name__ == "__main__":
    main()
