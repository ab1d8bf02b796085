"""What a sweep that searches finds, and what it costs, beside Optuna alone in the same run.

    python benchmarks/search.py [quality] [pruning] [overhead] [--seeds N]

quality: Branin and the six-dimensional Hartmann, 100 trials with 8 workers, seeds from 0, by tpe here and by Optuna's
own `optimize` with as many threads; each trial takes 20 ms in both. A one-sided Mann-Whitney test says whether ours are
worse. pruning: a training loop of 27 steps, 81 trials, with asha and without. overhead: 1,000 trivial trials by random
beside the same as points, and by tpe beside the points' time and what Optuna's ask and tell cost alone.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")

import optuna
from rich.console import Console
from rich.table import Table

from rlm_batch import sweep
from rlm_batch.deployments.server import PrefectServer
from rlm_batch.flows.search.study import derive_seed

BRANIN = """
import math
b, c, t = 5.1 / (4 * math.pi**2), 5 / math.pi, 1 / (8 * math.pi)
loss = (x2 - b * x1 * x1 + c * x1 - 6) ** 2 + 10 * (1 - t) * math.cos(x1) + 10
"""
HARTMANN = """
import math
A = [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
P = [
    [1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
    [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381],
]
x = [x1, x2, x3, x4, x5, x6]
rows = zip([1.0, 1.2, 3.0, 3.2], A, P)
loss = -sum(f * math.exp(-sum(a * (v - p / 1e4) ** 2 for a, v, p in zip(row, x, place))) for f, row, place in rows)
"""
BOUNDS = {
    "Branin": (BRANIN, {"x1": (-5.0, 10.0), "x2": (0.0, 15.0)}),
    "Hartmann 6": (HARTMANN, {f"x{number}": (0.0, 1.0) for number in range(1, 7)}),
}
WAIT = "import time\ntime.sleep(0.02)\n"
OPTIONS: dict[str, Any] = {"provider": "local:none", "reuse_sandboxes": True, "log_output": False}

TRAINING = """
import math, random
draw = random.Random(f"{seed} {lr}")
for step in range(27):
    loss = 1 + (math.log10(lr) + 2) ** 2 + 3 / (step + 1) + draw.gauss(0, 0.005)
    report(loss, step)
SUBMIT(loss=loss)
"""


def make_space(bounds: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The space of a function, as a sweep takes it."""
    return {name: {"low": low, "high": high} for name, (low, high) in bounds.items()}


def compute_p_value(ours: list[float], theirs: list[float]) -> float:
    """The one-sided Mann-Whitney p-value of ours being greater, by the normal approximation with ties."""
    ranked = sorted([(value, 0) for value in ours] + [(value, 1) for value in theirs])
    ranks, ties, place = [0.0, 0.0], 0.0, 0
    while place < len(ranked):
        end = place
        while end < len(ranked) and ranked[end][0] == ranked[place][0]:
            end += 1
        ties += (end - place) ** 3 - (end - place)
        for _, whose in ranked[place:end]:
            ranks[whose] += (place + 1 + end) / 2
        place = end
    n, m = len(ours), len(theirs)
    u = ranks[0] - n * (n + 1) / 2
    deviation = math.sqrt(n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1))))
    return 1 - statistics.NormalDist().cdf((u - n * m / 2 - 0.5) / deviation)


async def measure_quality(seeds: int, table: Table) -> None:
    """The best of 100 trials, ours and Optuna's, for each seed."""
    for name, (text, bounds) in BOUNDS.items():
        code, space = f"{WAIT}{text}\nSUBMIT(loss=loss)", make_space(bounds)
        compiled = compile(WAIT + text, name, "exec")
        ours: list[float] = []
        theirs: list[float] = []

        def run_trial(trial: Any, bounds: Any = bounds, compiled: Any = compiled) -> float:
            found = {name: trial.suggest_float(name, low, high) for name, (low, high) in bounds.items()}
            exec(compiled, found)
            return found["loss"]

        for seed in range(seeds):
            report = await sweep(code, space=space, trials=100, seed=seed, objective="loss", max_workers=8, **OPTIONS)
            ours.append(report.best.loss)
            study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
            await asyncio.to_thread(study.optimize, run_trial, n_trials=100, n_jobs=8)
            theirs.append(study.best_value)
        p = compute_p_value(ours, theirs)
        figures = f"{statistics.median(ours):.4f} and {statistics.median(theirs):.4f}"
        table.add_row(f"{name}, {seeds} seeds: median best, ours and Optuna's", figures, "")
        table.add_row(f"{name}: p that ours is worse", f"{p:.3f}", "at least 0.05")


async def measure_pruning(table: Table) -> None:
    """The steps of 81 trials with asha and without, and the best values: medians of five."""
    space = {"lr": {"low": 1e-5, "high": 1.0, "log": True}}
    shares: list[float] = []
    ratios: list[float] = []
    for seed in range(5):
        found: dict[str | None, tuple[int, float]] = {}
        for pruner in (None, "asha"):
            code = f"seed = {seed}\n{TRAINING}"
            report = await sweep(
                code, space=space, trials=81, seed=seed, pruner=pruner, objective="loss", max_workers=4, **OPTIONS
            )
            steps = sum(len(trial.meta.reports) for trial in report.trials)
            found[pruner] = steps, report.best.loss
        shares.append(found["asha"][0] / found[None][0])
        ratios.append(found["asha"][1] / found[None][1])
    table.add_row("asha: share of the steps without", f"{statistics.median(shares):.3f}", "at most 0.45")
    table.add_row("asha: best value by that without", f"{statistics.median(ratios):.4f}", "within 0.02 of 1")


async def measure_overhead(table: Table) -> None:
    """The seconds of 1,000 trivial trials: medians of three."""
    space = {f"x{number}": {"low": 0.0, "high": 1.0} for number in range(4)}
    code = "SUBMIT(loss=x0 + x1 + x2 + x3)"
    draw = random.Random(0)
    points = [{name: draw.random() for name in space} for _ in range(1000)]
    seconds: dict[str, list[float]] = {}
    for _ in range(3):
        cases: dict[str, dict[str, Any]] = {
            "points": {"points": points},
            "random": {"space": space, "trials": 1000, "sampler": "random"},
            "tpe": {"space": space, "trials": 1000, "sampler": "tpe"},
        }
        for name, parameters in cases.items():
            begun = time.perf_counter()
            await sweep(code, objective="loss", max_workers=4, **parameters, **OPTIONS)
            seconds.setdefault(name, []).append(time.perf_counter() - begun)
        begun = time.perf_counter()
        ask_and_tell_alone(list(space))
        seconds.setdefault("alone", []).append(time.perf_counter() - begun)
    typical = {name: statistics.median(values) for name, values in seconds.items()}
    table.add_row("1,000 trials: points", f"{typical['points']:.2f} s", "")
    table.add_row("random by points", f"{typical['random'] / typical['points']:.3f}", "at most 1.1")
    table.add_row("Optuna's ask and tell alone, tpe", f"{typical['alone']:.2f} s", "")
    share = (typical["tpe"] - typical["points"]) / typical["alone"]
    table.add_row("tpe: what it takes over the points, by that", f"{share:.3f}", "at most 1.1")


def ask_and_tell_alone(names: list[str]) -> None:
    """1,000 trials of a study with four under way, with the seeds that we give."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=derive_seed(0, 0), constant_liar=True))
    distributions: dict[str, Any] = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names}
    running: list[Any] = []
    for _ in range(1000):
        running.append(study.ask(distributions))
        if len(running) == 4:
            trial = running.pop(0)
            study.tell(trial, sum(trial.params.values()))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["quality", "pruning", "overhead"])
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    table = Table("what", "measured", "bound")
    if "overhead" in arguments.what:
        await measure_overhead(table)
    if "pruning" in arguments.what:
        await measure_pruning(table)
    if "quality" in arguments.what:
        await measure_quality(arguments.seeds, table)
    Console().print(table)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ |= {"PREFECT_API_URL": server.url, "RLM_BATCH_RESULTS": f"{home}/results"}
        asyncio.run(main())
