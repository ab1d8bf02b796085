"""Tests of code that awaits at its top level, as in a notebook, with and without a context."""

from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeError, CodeSyntaxError, Result
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

ANSWER = """
import asyncio

async def answer(x):
    await asyncio.sleep(0)
    return x

async def count(n):
    for i in range(n):
        yield i

class Manager:
    async def __aenter__(self): return "entered"
    async def __aexit__(self, *_): print("left")

"""
SUBMIT_IN_TASK = """
async def submit():
    SUBMIT(x=1)
try:
    await asyncio.gather(asyncio.sleep(1000), submit())
finally:
    print("finally")
"""
# The printed text of each code, and its submitted fields or last value.
CODES: dict[str, tuple[str, Any]] = {
    "await answer(41) + 1": ("", 42),
    "x = await answer(1)\nprint(x)": ("1\n", None),
    "SUBMIT(x=await answer(1))": ("", {"x": 1}),
    "async for i in count(3):\n    print(i)\n[i async for i in count(3)]": ("0\n1\n2\n", [0, 1, 2]),
    "async with Manager() as name:\n    print(name)": ("entered\nleft\n", None),
    "await answer(1)\nasyncio.create_task(answer(2)) is not None": ("", True),
    "asyncio.run(answer(5))": ("", 5),
    "await asyncio.to_thread(SUBMIT, x=2)": ("", {"x": 2}),
    SUBMIT_IN_TASK: ("finally\n", {"x": 1}),
}


def outcome(result: Result) -> tuple[str, Any]:
    return result.meta.stdout, result.outputs if result.meta.submitted else result.meta.value


async def test_code_awaits_at_its_top_level(interpreter: Interpreter) -> None:
    for code, expected in CODES.items():
        for context in (None, "c", "c"):
            assert outcome(await interpreter.execute(ANSWER + code, context=context)) == expected, code
    failing = "async def fail():\n    1 / 0\nawait fail()"
    for context in (None, "c"):
        with pytest.raises(CodeError, match=r"ZeroDivisionError \(line 2\)") as failed:
            await interpreter.execute(failing, context=context)
        assert "asyncio" not in failed.value.traceback
        with pytest.raises(CodeError, match=r"asyncio.run\(\) cannot be called from a running event loop"):
            await interpreter.execute(ANSWER + "asyncio.run(answer(1))\nawait answer(2)", context=context)
        with pytest.raises(CodeSyntaxError, match="'await' outside async function"):
            await interpreter.execute("def f():\n    await g()", context=context)


async def test_tasks_and_generators_of_a_session_continue_in_its_next_await(interpreter: Interpreter) -> None:
    async def run(code: str) -> Any:
        return (await interpreter.execute(dedent(code), context="c")).meta.value

    await run(ANSWER + "generator = count(3)")
    await run("task = asyncio.create_task(answer('done'))\nawait anext(generator)")
    assert await run("task.done()") is False
    assert await run("[await task, await anext(generator)]") == ["done", 1]
    assert await run("asyncio.run(answer(1))\nasyncio.run(answer(2))") == 2
    await run("loop = asyncio.get_running_loop()\nawait answer(1)")
    assert await run("loop.close()\nloop.is_closed()") is True
    assert await run("await answer('on a new loop')") == "on a new loop"


async def test_tasks_left_by_a_stateless_execution_are_cancelled(interpreter: Interpreter) -> None:
    code = """
        async def work():
            try:
                await asyncio.sleep(1000)
            finally:
                print("cancelled")
        asyncio.create_task(work())
        await asyncio.sleep(0)
        """
    assert (await interpreter.execute("import asyncio\n" + dedent(code))).meta.stdout == "cancelled\n"


async def test_prepare_can_await_and_each_execution_has_a_new_loop(provider: SandboxProvider) -> None:
    prepare = Preparation(ANSWER + "base = await asyncio.to_thread(lambda: 40)")
    async with provider.interpreter(prepare=prepare) as interpreter:
        for context in (None, None, "c", "c"):
            result = await interpreter.execute("base + await answer(2)", context=context)
            assert result.meta.value == 42


# This code parses a text at each garbage collection, like the traceback of a task whose error was never retrieved.
PARSING = """
import ast, gc
class Parsing:
    def __init__(self):
        self.itself = self
    def __del__(self):
        ast.parse("f(x)[0]")
        Parsing()
Parsing()
gc.set_threshold(5)
"""


async def test_garbage_of_an_earlier_execution_does_not_break_the_next_compilation(
    interpreter: Interpreter,
) -> None:
    await interpreter.execute(PARSING, context="c")
    for _ in range(3):
        assert (await interpreter.execute("[1, {'a': (2, [3] * 2)}]", context="c")).meta.value == [
            1,
            {"a": [2, [3, 3]]},
        ]


async def test_an_unawaited_task_that_submits_prints_nothing_in_later_executions(
    interpreter: Interpreter,
) -> None:
    submit = "import asyncio as a\nasync def submit():\n    SUBMIT(x=1)\n"
    ways = (
        "task = a.create_task(submit())\nawait a.sleep(1000)",
        "async def f():\n global task\n task = a.create_task(submit())\n await a.sleep(9)\na.run(f())",
    )
    for way in ways:
        assert (await interpreter.execute(submit + way, context="c")).x == 1
        result = await interpreter.execute("import gc\ndel task\ngc.collect()\n1", context="c")
        assert (result.meta.value, result.meta.stderr) == (1, "")
