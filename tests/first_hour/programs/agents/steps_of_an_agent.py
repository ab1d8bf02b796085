"""The turns of an agent as steps of one session; a step that failed is told, and the next one repairs it."""

import asyncio

from rlm_batch import Failure, sequence

STEPS = [
    "rows = [3, 1, 2]\nprint(len(rows), 'rows')",
    "first = sorted(row)[0]",
    "first = sorted(rows)[0]\nSUBMIT(first=first)",
]
loaded, broken, repaired = asyncio.run(sequence(STEPS, stop_on_error=False, on_failure="return"))
assert loaded.meta.stdout == "3 rows\n"
assert isinstance(broken, Failure)
assert "row" in broken.error.summary
assert repaired.first == 1
