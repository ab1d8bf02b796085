"""A table that is loaded once in each sandbox, and forty executions that find it."""

import asyncio

from rlm_batch import batch

LOAD = "import time\ntable = {n: n * n for n in range(1000)}\nloaded = time.monotonic_ns()"
results = asyncio.run(
    batch("SUBMIT(y=table[x], loaded=loaded)", [{"x": x} for x in range(40)], prepare=LOAD, max_workers=2)
)
assert [result.y for result in results] == [x * x for x in range(40)]
assert len({result.loaded for result in results}) <= 2, "once for each worker"
