"""The name of a file in the place of code is a sentence that says what to do."""

import asyncio
from pathlib import Path

from rlm_batch import ConfigurationError, batch

path = Path("hello.py")
path.write_text("SUBMIT(greeting='hello')")
try:
    asyncio.run(batch(["hello.py"]))
except ConfigurationError as error:
    print(error)
    assert "Path('hello.py').read_text()" in str(error)
else:
    raise AssertionError("it ran")
(result,) = asyncio.run(batch([path.read_text()]))
assert result.greeting == "hello"
