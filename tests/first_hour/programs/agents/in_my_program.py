"""Two batches at once in an asynchronous program of one's own, inside a Prefect flow."""

import asyncio

from prefect import flow, task

from rlm_batch import batch


@task
async def describe(total: int) -> str:
    return f"{total} points"


@flow
async def evaluate() -> str:
    tests = ["SUBMIT(points=1)", "SUBMIT(points=2)"]
    first, second = await asyncio.gather(batch(tests, max_workers=2), batch(tests[:1], max_workers=1))
    return await describe(sum(result.points for result in [*first, *second]))


assert asyncio.run(evaluate()) == "4 points"
