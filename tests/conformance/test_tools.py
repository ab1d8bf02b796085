"""Tests of host functions that code calls by name, in async code and in scripts."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

from ..infra.waiting import HANG_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]
Tools = dict[str, Callable[..., Any]]
Run = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture(params=["async", "sync"])
def run(provider: SandboxProvider, request: pytest.FixtureRequest) -> Run:
    """Return a function that runs code with tools in one of the two interpreters, and returns the submitted fields."""

    def run_in_script(code: str, variables: dict[str, Any] | None, tools: Tools) -> dict[str, Any]:
        with SyncInterpreter(
            lambda: provider.open(provider.labels("")), timeout=HANG_SECONDS, tools=tools
        ) as interpreter:
            return interpreter.execute(dedent(code), variables).outputs

    async def run(code: str, variables: dict[str, Any] | None = None, **tools: Callable[..., Any]) -> dict[str, Any]:
        if request.param == "sync":
            return await asyncio.to_thread(run_in_script, code, variables, tools)
        async with provider.interpreter(timeout=HANG_SECONDS, tools=tools) as interpreter:
            return (await interpreter.execute(dedent(code), variables)).outputs

    return run


@pytest.mark.every_provider
async def test_sync_and_async_tools_return_values(run: Run) -> None:
    async def greet(name: str, *, loud: bool = False) -> str:
        await asyncio.sleep(0.01)
        return name.upper() if loud else name

    class Scale:
        async def __call__(self, x: float) -> float:
            return 10 * x

    result = await run(
        "SUBMIT(sum=add(1, b=2), loud=greet('zoë', loud=True), three=add3(4), ten=scale(0.5), nothing=nothing())",
        add=lambda a, b: a + b,
        add3=functools.partial(lambda a, b: a + b, 3),
        greet=greet,
        scale=Scale(),
        nothing=lambda: None,
    )
    assert result == {"sum": 3, "loud": "ZOË", "three": 7, "ten": 5.0, "nothing": None}


async def test_tools_take_and_return_every_json_value(run: Run) -> None:
    values = [None, True, 0, -(2**70), 0.1, "", 'q"\\\n\0\u2028😀', [], {}, {"a": [{"b": [1.5]}]}]
    result = await run(
        "SUBMIT(back=[same(v) for v in values], tuple=same((1, 2)))", {"values": values}, same=lambda v: v
    )
    assert repr(result["back"]) == repr(values)
    assert result["tuple"] == [1, 2]


@pytest.mark.every_provider
async def test_tools_take_and_return_large_values(run: Run) -> None:
    code = """
        text = repeat("é", 10_000_000)
        length = measure(text[: 2_000_000])
        try:
            measure(text)
        except ValueError as error:
            SUBMIT(received=len(text), length=length, said=str(error))
        """
    result = await run(code, repeat=lambda text, n: text * n, measure=len)
    assert (result["received"], result["length"]) == (10_000_000, 2_000_000)
    assert "pass a path" in result["said"]


class ModelOverloaded(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_error_in_a_tool_is_raised_in_the_code(run: Run) -> None:
    raised = {
        "value": ValueError("bad value"), "key": KeyError("k"), "file": FileNotFoundError(2, "no file", "x"),
        "own": ModelOverloaded("try later"), "stop": StopIteration("stop"), "timeout": TimeoutError("too slow"),
        "unicode": UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "group": ExceptionGroup("g", [ValueError()]),
        "surrogate": ValueError("\ud800"), "assert": AssertionError(), "text": Unprintable(),
    }  # fmt: skip

    def fail(kind: str) -> None:
        raise raised[kind]

    async def cancel() -> None:
        raise asyncio.CancelledError

    def leave() -> None:
        raise SystemExit(3)

    code = """
        def said(tool, *args):
            try:
                tool(*args)
            except Exception as error:
                return [type(error).__name__, isinstance(error, RuntimeError), str(error)]
        SUBMIT(cancelled=said(cancel), left=said(leave), **{kind: said(fail, kind) for kind in kinds})
        """
    result = await run(code, {"kinds": list(raised)}, fail=fail, cancel=cancel, leave=leave)
    assert result["value"] == ["ValueError", False, "bad value"]
    assert result["timeout"] == ["TimeoutError", False, "too slow"]
    assert result["assert"] == ["AssertionError", False, ""]
    assert result["key"] == ["KeyError", False, "'k'"]
    assert result["file"][0] == "FileNotFoundError"
    assert "no file" in result["file"][2]
    assert result["own"] == ["ToolError", True, "ModelOverloaded: try later"]
    assert "bad" in result["unicode"][2]
    assert result["surrogate"][0] == "ValueError"
    assert result["text"][2].startswith("Unprintable")
    assert "ancel" in result["cancelled"][2]
    assert result["left"][2]
    with pytest.raises(CodeError, match=r"raised ToolError \(line 2\): ModelOverloaded: try later") as caught:
        await run("x = 1\nfail('own')", fail=fail)
    assert "driver" not in str(caught.value)


async def test_an_invalid_argument_raises_an_error_that_names_the_tool(run: Run) -> None:
    values = [object(), b"\xff", float("nan"), "\ud800", 10**5000]
    code = """
        def said(kind, call):
            try:
                call()
            except kind as error:
                return str(error)
        values = (object(), b"x", float("nan"), {1: 2}, {3}, chr(0xD800), 10 ** 5000)
        given = [said(TypeError, lambda: take(value)) for value in values]
        given += [said(TypeError, lambda: take(v=[value])) for value in values]
        returned = [said(TypeError, lambda: give(i)) for i in range(5)]
        many = [said(ValueError, lambda: take(*range(1001)))]
        many += [said(ValueError, lambda: take(**{f"x{i}": i for i in range(1001)}))]
        wrong = said(TypeError, lambda: give())
        SUBMIT(given=given, returned=returned, many=many, wrong=wrong, count=take(*range(1000)))
        """

    def take(*args: Any, **kwargs: Any) -> int:
        return len(args) + len(kwargs)

    result = await run(code, take=take, give=lambda i: values[i])
    assert all("take" in text for text in result["given"])
    assert all("give" in text for text in result["returned"])
    assert all("more than 1,000 arguments" in text for text in result["many"])
    assert "missing" in result["wrong"]
    assert result["count"] == 1000


async def test_sync_and_async_tools_of_many_threads_run_concurrently(run: Run) -> None:
    barrier = threading.Barrier(40)
    calls, has_all = list[int](), asyncio.Event()

    async def call(i: int) -> int:
        if i == 0:
            await has_all.wait()
        calls.append(i)
        if len(calls) == 15 * 20:
            has_all.set()
        return i

    code = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(40) as pool:
            met = sorted(pool.map(lambda _: meet(), range(40)))
            SUBMIT(met=met, answers=list(pool.map(lambda i: [call(i) for _ in range(20 if i else 1)], range(16))))
        """
    result = await run(code, meet=lambda: barrier.wait(HANG_SECONDS), call=call)
    assert result["met"] == list(range(40))
    assert result["answers"] == [[0], *([i] * 20 for i in range(1, 16))]


async def test_a_tool_works_from_a_coroutine_and_during_a_submit(run: Run) -> None:
    code = """
        import asyncio
        async def main():
            return await asyncio.gather(*(asyncio.to_thread(double, i) for i in range(5)))
        answers = asyncio.run(main())
        try:
            SUBMIT(answers=answers)
        finally:
            double(1)
        """
    assert (await run(code, double=lambda n: 2 * n))["answers"] == [0, 2, 4, 6, 8]


async def test_a_forked_process_cannot_call_tools(run: Run) -> None:
    code = """
        import os
        reads, writes = os.pipe()
        if os.fork() == 0:
            try:
                double(1)
            except RuntimeError as error:
                os.write(writes, str(error).encode())
            os._exit(0)
        os.wait()
        SUBMIT(said=os.read(reads, 1000).decode(), still=double(2))
        """
    result = await run(code, double=lambda n: 2 * n)
    assert "main process" in result["said"]
    assert result["still"] == 4


async def test_tools_can_be_added_and_removed_while_the_sandbox_is_open(interpreter: Interpreter) -> None:
    interpreter.tools["one"] = lambda: 1
    assert (await interpreter.execute("SUBMIT(one())", context="c")).output == 1
    interpreter.tools["one"] = lambda: 11
    interpreter.tools["two"] = lambda: 2
    assert (await interpreter.execute("SUBMIT(one() + two())", context="c")).output == 13
    del interpreter.tools["one"]
    with pytest.raises(CodeError):
        await interpreter.execute("one()", context="c")
    with pytest.raises(CodeError, match="NameError"):
        await interpreter.execute("one()")


async def test_a_running_tool_call_ends_with_its_execution(interpreter: Interpreter) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    interpreter.tools["wait"] = wait
    running = asyncio.ensure_future(interpreter.execute("wait()"))
    await asyncio.wait_for(has_begun.wait(), HANG_SECONDS)
    running.cancel()
    await asyncio.wait_for(has_ended.wait(), HANG_SECONDS)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_tool_can_run_code_in_the_same_sandbox(interpreter: Interpreter) -> None:
    async def nested(n: int) -> int:
        return int((await interpreter.execute("SUBMIT(n * 2)", {"n": n})).output)

    interpreter.tools["nested"] = nested
    assert (await interpreter.execute("SUBMIT(nested(4))")).output == 8
