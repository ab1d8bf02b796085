"""A sampler of one's own that asks and tells, as Optuna does, with an interpreter in each of four threads."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from rlm_batch import LocalInterpreter

OBJECTIVE = "SUBMIT(loss=(x - 1) ** 2 + (y + 2) ** 2)"
lock, chance = threading.Lock(), random.Random(0)
trials: list[tuple[float, dict[str, float]]] = []


def ask() -> dict[str, float]:
    with lock:
        centre = min(trials)[1] if len(trials) > 10 else {"x": 0.0, "y": 0.0}
        return {name: value + chance.uniform(-2, 2) for name, value in centre.items()}


def work(count: int) -> None:
    with LocalInterpreter(timeout=10) as interpreter:
        for _ in range(count):
            point = ask()
            loss = interpreter.execute(OBJECTIVE, point).loss
            with lock:
                trials.append((loss, point))


with ThreadPoolExecutor(4) as threads:
    list(threads.map(work, [10] * 4))
best, point = min(trials, key=lambda trial: trial[0])
print(len(trials), "trials, the best", best, point)
assert len(trials) == 40
assert best < 2
