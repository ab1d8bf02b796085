"""How much memory a trial needs: limits for one run, with no saved block."""

import asyncio

from rlm_batch import CodeCrashed, CodeError, Failure, batch

ALLOCATE = "data = bytearray(megabytes * 2**20)\nSUBMIT(size=len(data))"
sizes = [{"megabytes": megabytes} for megabytes in (10, 1500)]
small = asyncio.run(batch(ALLOCATE, sizes, provider_options={"memory_mib": 1024}, on_failure="return"))
assert small[0].size == 10 * 2**20
assert isinstance(small[1], Failure)
assert isinstance(small[1].error, CodeError | CodeCrashed)
print(small[1].error.summary)
assert "memory_mib" in small[1].error.summary, "the setting that gives it more"
