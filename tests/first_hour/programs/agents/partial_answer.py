"""A budget that was too small: what the model found out so far is kept, with what it took and what to raise."""

import asyncio

from rlm_batch import ConfigurationError, rlm

REPORT = "\n".join(f"order {n} was {'late' if n % 7 == 0 else 'on time'}" for n in range(50))
answer = asyncio.run(
    rlm("How many orders were late?", "openai/gpt-4o-mini", REPORT, max_llm_calls=2, on_failure="return")
)
print(answer.answer, answer.error)
assert not answer.answered
assert "8 late" in answer.answer, "what its code printed"
assert "max_llm_calls" in str(answer.error)
assert answer.queries.calls == 2
assert len(answer.trajectory) == 2
try:
    asyncio.run(rlm("How many?", "openai/gpt-4o-mini", REPORT, max_llm_calls=0))
except ConfigurationError as error:
    print(error)
