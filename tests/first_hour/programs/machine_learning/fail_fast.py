"""A typing error in the code of a hundred trials: five failures are enough to stop."""

import asyncio

from rlm_batch import ExecutionsFailed, NotRun, batch

try:
    asyncio.run(batch("SUBMIT(y=math.sqrt(x))", [{"x": x} for x in range(100)], max_failures=5))
except ExecutionsFailed as failed:
    run = [failure for failure in failed.failures if not isinstance(failure.error, NotRun)]
    print(f"{len(run)} failed, {len(failed.failures) - len(run)} were not run: {run[0].error.summary}")
    assert 5 <= len(run) < 10
    assert "math" in run[0].error.summary
else:
    raise AssertionError("nothing failed")
