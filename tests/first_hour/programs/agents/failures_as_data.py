"""An agent's attempts: each failure is data, with the type, the line and what was printed."""

import asyncio

from rlm_batch import CodeError, CodeSyntaxError, ExecutionTimeout, Failure, batch

ATTEMPTS = [
    "```python\nSUBMIT(answer=6 * 7)\n```",
    "print('looking')\nvalue = {}['answer']",
    "def f(:",
    "while True: pass",
    "answer = 42",
]
results = asyncio.run(batch(ATTEMPTS, timeout=2, on_failure="return"))
answered, raised, malformed, slow, silent = results
assert answered.answer == 42, "a Markdown fence around code is taken off"
assert isinstance(raised, Failure)
assert isinstance(raised.error, CodeError)
assert (raised.error.type, raised.error.line, raised.meta.stdout) == ("KeyError", 2, "looking\n")
assert isinstance(malformed, Failure)
assert isinstance(malformed.error, CodeSyntaxError)
assert isinstance(slow, Failure)
assert isinstance(slow.error, ExecutionTimeout)
assert not silent.meta.submitted
try:
    print(silent.answer)
except AttributeError as error:
    print(error)
    assert "SUBMIT" in str(error)
