"""Tests of SUBMIT, which returns values to the host and ends the execution wherever it is called."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import SubmitError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


async def test_fields_come_back_as_items_and_attributes(interpreter: Interpreter) -> None:
    result = await interpreter.execute("SUBMIT(total=sum(range(10)), name='Zoë', pair=(1, 2.5), none=None)")
    assert result.total == result["total"] == 45
    assert result.outputs == {"total": 45, "name": "Zoë", "pair": [1, 2.5], "none": None}
    assert result.meta.submitted
    fields = {"self": 1, "values": 2, "fields": 3, "outputs": 4, "meta": 5, "expected": 6, "args": 7}
    assert (await interpreter.execute("SUBMIT(**fields)", {"fields": fields})).outputs == fields


async def test_one_positional_value_is_the_output_and_null_is_a_result(interpreter: Interpreter) -> None:
    assert (await interpreter.execute("SUBMIT([1])")).outputs == {"output": [1]}
    assert (await interpreter.execute("SUBMIT('a', n=1)")).outputs == {"output": "a", "n": 1}
    for arguments in ("1, 2", "1, output=2"):
        with pytest.raises(SubmitError, match=r"positional|by position"):
            await interpreter.execute(f"SUBMIT({arguments})")
    result = await interpreter.execute("SUBMIT()")
    assert (result.outputs, result.meta.submitted) == ({}, True)
    result = await interpreter.execute("x = 1")
    assert (result.outputs, result.meta.submitted) == ({}, False)
    with pytest.raises(AttributeError, match="the code ended before SUBMIT"):
        _ = result.loss


ENDING = {
    "inside except Exception": """
try:
    SUBMIT(x=1)
except Exception:
    print("swallowed")
print("went on")
SUBMIT(x=2)
""",
    "inside a bare except": """
try:
    SUBMIT(x=1)
except:
    pass
SUBMIT(x=2)
""",
    "in finally": """
try:
    raise ValueError("lost")
finally:
    SUBMIT(x=1)
""",
    "before finally": """
try:
    SUBMIT(x=1)
finally:
    print("closed")
""",
    "before a crash": """
import os
try:
    SUBMIT(x=1)
finally:
    os._exit(3)
""",
    "in a coroutine": """
import asyncio
async def main():
    await asyncio.sleep(0.01)
    SUBMIT(x=1)
asyncio.run(main())
""",
    "in a task that nothing awaits": """
import asyncio
async def submit():
    SUBMIT(x=1)
async def main():
    task = asyncio.create_task(submit())
    await asyncio.sleep(1000)
try:
    asyncio.run(main())
finally:
    print("closed")
""",
    "in a thread": """
import threading, time
threading.Thread(target=lambda: SUBMIT(x=1)).start()
time.sleep(1000)
""",
    "in a thread that the code joins": """
import threading
thread = threading.Thread(target=lambda: SUBMIT(x=1))
thread.start()
thread.join()
""",
    "after a refused one": """
try:
    SUBMIT(x=1j)
except ValueError as error:
    assert "x is a complex" in str(error)
    SUBMIT(x=1)
""",
}


async def test_submit_ends_the_execution_wherever_it_is_called(interpreter: Interpreter) -> None:
    for place, code in ENDING.items():
        # Each case has its own context, because a case's tasks may write to the context's output later.
        for context in (None, place):
            result = await interpreter.execute(code, context=context)
            assert result.outputs == {"x": 1}, place
            assert result.meta.stdout == ("closed\n" if "closed" in code else ""), place
            assert result.meta.stderr == "" or place != "in a thread"
    left = """
        import threading, time
        def late():
            time.sleep(0.1)
            SUBMIT(x=2)
        threading.Thread(target=late).start()
        """
    assert (await interpreter.execute(dedent(left))).x == 2


@pytest.mark.full
async def test_submit_in_a_loop_that_catches_all_errors_ends_the_execution(interpreter: Interpreter) -> None:
    stubborn = """
        while True:
            try:
                SUBMIT(x=1)
            except:
                pass
        """
    asleep = """
        import time
        try:
            SUBMIT(x=2)
        except BaseException:
            time.sleep(1000)
        """
    results = await asyncio.gather(
        interpreter.execute(dedent(stubborn)),
        interpreter.execute(dedent(asleep)),
        interpreter.execute(dedent(asleep), context="c"),
    )
    assert [result.x for result in results] == [1, 2, 2]


async def test_only_the_first_submitting_thread_counts(interpreter: Interpreter) -> None:
    code = """
        import threading
        gate = threading.Barrier(8)
        def run(i):
            gate.wait()
            SUBMIT(i=i, square=i * i)
        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """
    for _ in range(5):
        result = await interpreter.execute(dedent(code))
        assert result.square == result.i**2


async def test_two_identical_executions_both_run_with_different_random_numbers(interpreter: Interpreter) -> None:
    drawn = "[os.getpid(), str(uuid.uuid4()), random.random(), tempfile.mktemp()]"
    code = f"import os, random, tempfile, uuid; SUBMIT({drawn})"
    first, second = await interpreter.execute(code), await interpreter.execute(code)
    assert all(one != other for one, other in zip(first.output, second.output, strict=True))
