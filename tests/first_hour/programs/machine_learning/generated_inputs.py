"""Inputs that a generator makes, a Path as the place of the results, and a second run that takes them from there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlm_batch import batch


def cases(count: int) -> Iterator[dict[str, Any]]:
    for seed in range(count):
        yield {"seed": seed}


CODE = "import time\nSUBMIT(drawn=time.time_ns())"
results = Path("results/draws")
first = asyncio.run(batch(CODE, cases(3), results_path=results))
second = asyncio.run(batch(CODE, cases(5), results_path=results))
assert [result.drawn for result in second[:3]] == [result.drawn for result in first], "they are there, so nothing ran"
assert len({result.drawn for result in second}) == 5
