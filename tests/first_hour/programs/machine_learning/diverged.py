"""A learning rate that is too high: the trial that diverged is a result, and comes last whichever way is best."""

import asyncio
import json
import math
from pathlib import Path

from rlm_batch import sweep

DESCEND = """
x, curve = 1.0, []
for _ in range(400):
    x -= lr * 4 * x ** 3
    if abs(x) > 1e100:
        x = float("nan")
    curve.append(x ** 4)
SUBMIT(loss=curve[-1], curve=curve[-3:])
"""


async def main() -> None:
    for direction in ("minimize", "maximize"):
        report = await sweep(DESCEND, {"lr": [0.1, 2.0, 0.01]}, objective="loss", direction=direction)
        print(report)
        assert report.best.meta.variables["lr"] != 2.0
        diverged = report.trials[1]
        assert math.isnan(diverged.loss)
        assert math.isnan(diverged.curve[0])
        lines = [json.loads(line) for path in Path(report.results_path).glob("*.jsonl") for line in path.open()]
        (line,) = [line for line in lines if line["index"] == 1]
        assert line["outputs"]["loss"] is None, "for programs that read strict JSON"


asyncio.run(main())
