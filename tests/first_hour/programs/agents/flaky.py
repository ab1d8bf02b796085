"""Code that fails now and then: it is tried again where that is asked for, and the earlier error is kept."""

import asyncio

from rlm_batch import batch

CODE = """
try:
    load_from_volume("been_here")
except VolumeError:
    save_to_volume("been_here", "yes")
    raise ConnectionError("the service was asleep")
SUBMIT(done=True)
"""
(result,) = asyncio.run(
    batch([CODE], retries=1, retry_code_errors=True, provider_options={"volume_name": "flaky"}, log_output=False)
)
print(result.meta.attempt, result.meta.earlier_errors)
assert result.done
assert result.meta.attempt == 2
assert "the service was asleep" in str(result.meta.earlier_errors)
