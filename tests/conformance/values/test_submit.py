"""What SUBMIT hands back, and that it ends the execution wherever it is called."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import SubmitError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


@pytest.mark.every_provider
async def test_fields_come_back_as_items_and_attributes(interpreter: Interpreter) -> None:
    result = await interpreter.execute("SUBMIT(total=sum(range(10)), name='Zoë', pair=(1, 2.5), none=None)")
    assert result.total == result["total"] == 45
    assert result.outputs == {"total": 45, "name": "Zoë", "pair": [1, 2.5], "none": None}
    assert result.meta.submitted


async def test_one_positional_value_is_the_output(interpreter: Interpreter) -> None:
    assert (await interpreter.execute("SUBMIT([1])")).outputs == {"output": [1]}
    assert (await interpreter.execute("SUBMIT('a', n=1)")).outputs == {"output": "a", "n": 1}


async def test_no_field_is_a_result_too(interpreter: Interpreter) -> None:
    result = await interpreter.execute("SUBMIT()")
    assert result.outputs == {}
    assert result.meta.submitted


async def test_code_that_ends_without_submit_gives_a_result_with_no_fields(interpreter: Interpreter) -> None:
    result = await interpreter.execute("x = 1")
    assert result.outputs == {}
    assert not result.meta.submitted
    with pytest.raises(AttributeError, match="the code ended without calling SUBMIT"):
        _ = result.loss


@pytest.mark.parametrize("arguments", ["1, 2", "1, output=2"])
async def test_positions_that_have_no_name_are_an_error(interpreter: Interpreter, arguments: str) -> None:
    with pytest.raises(SubmitError, match=r"positional|by position"):
        await interpreter.execute(f"SUBMIT({arguments})")


async def test_fields_may_have_any_name(interpreter: Interpreter) -> None:
    code = "SUBMIT(self=1, values=2, fields=3, outputs=4, meta=5, expected=6, args=7)"
    result = await interpreter.execute(code)
    assert result.outputs == {
        "self": 1, "values": 2, "fields": 3, "outputs": 4, "meta": 5, "expected": 6, "args": 7,
    }  # fmt: skip


async def test_submit_inside_except_exception_still_ends_the_execution(interpreter: Interpreter) -> None:
    code = """
        try:
            SUBMIT(x=1)
        except Exception:
            print("swallowed")
        print("went on")
        SUBMIT(x=2)
        """
    result = await interpreter.execute(dedent(code))
    assert result.outputs == {"x": 1}
    assert result.meta.stdout == ""


@pytest.mark.parametrize("context", [None, "c"])
async def test_submit_inside_a_bare_except_stands(interpreter: Interpreter, context: str | None) -> None:
    code = """
        try:
            SUBMIT(x=1)
        except:
            pass
        SUBMIT(x=2)
        """
    result = await interpreter.execute(dedent(code), context=context)
    assert result.outputs == {"x": 1}


@pytest.mark.full
async def test_submit_in_a_loop_that_swallows_everything_ends_the_execution(interpreter: Interpreter) -> None:
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


@pytest.mark.parametrize("context", [None, "c"])
async def test_submit_from_a_thread_ends_the_execution(interpreter: Interpreter, context: str | None) -> None:
    code = """
        import threading, time
        threading.Thread(target=lambda: SUBMIT(x=1)).start()
        time.sleep(1000)
        """
    result = await interpreter.execute(dedent(code), context=context)
    assert result.x == 1
    assert result.meta.stderr == ""


async def test_submit_in_a_task_that_nobody_awaits_ends_the_execution(interpreter: Interpreter) -> None:
    code = """
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
        """
    result = await interpreter.execute(dedent(code))
    assert result.x == 1
    assert result.meta.stdout == "closed\n"


async def test_submit_from_a_thread_that_the_code_has_joined_or_left_counts(interpreter: Interpreter) -> None:
    joined = """
        import threading
        thread = threading.Thread(target=lambda: SUBMIT(x=1))
        thread.start()
        thread.join()
        print("went on")
        """
    left = """
        import threading, time
        def late():
            time.sleep(0.2)
            SUBMIT(x=2)
        threading.Thread(target=late).start()
        """
    assert (await interpreter.execute(dedent(joined))).x == 1
    assert (await interpreter.execute(dedent(left))).x == 2


async def test_the_first_of_many_threads_to_submit_is_the_only_one(interpreter: Interpreter) -> None:
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


async def test_submit_in_finally_replaces_the_error(interpreter: Interpreter) -> None:
    code = """
        try:
            raise ValueError("lost")
        finally:
            SUBMIT(x=1)
        """
    assert (await interpreter.execute(dedent(code))).x == 1


async def test_finally_blocks_run_after_submit(interpreter: Interpreter) -> None:
    code = """
        try:
            SUBMIT(x=1)
        finally:
            print("closed")
        """
    assert (await interpreter.execute(dedent(code))).meta.stdout == "closed\n"


@pytest.mark.every_provider
async def test_a_crash_after_submit_does_not_undo_it(interpreter: Interpreter) -> None:
    code = """
        import os
        try:
            SUBMIT(x=1)
        finally:
            os._exit(3)
        """
    assert (await interpreter.execute(dedent(code))).x == 1


async def test_files_left_open_are_written_when_the_execution_ends(interpreter: Interpreter) -> None:
    await interpreter.execute("file = open('left.txt', 'w'); file.write('all of it'); SUBMIT()")
    assert (await interpreter.execute("SUBMIT(text=open('left.txt').read())")).text == "all of it"


async def test_a_refused_submit_can_be_corrected(interpreter: Interpreter) -> None:
    code = """
        try:
            SUBMIT(x=1j)
        except ValueError as error:
            SUBMIT(x=None, why=str(error))
        """
    result = await interpreter.execute(dedent(code))
    assert result.x is None
    assert "x is a complex" in result.why


async def test_two_identical_executions_are_two_executions(interpreter: Interpreter) -> None:
    code = "import os, uuid; SUBMIT(pid=os.getpid(), id=str(uuid.uuid4()))"
    first, second = await interpreter.execute(code), await interpreter.execute(code)
    assert first.id != second.id
    assert first.pid != second.pid


async def test_random_numbers_differ_between_executions(interpreter: Interpreter) -> None:
    codes = ["import random; SUBMIT(n=random.random())", "import tempfile; SUBMIT(n=tempfile.mktemp())"]
    for code in codes:
        assert len({(await interpreter.execute(code)).n for _ in range(3)}) == 3
