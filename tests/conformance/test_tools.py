"""Functions of the host that the code calls by name."""

import asyncio
import functools
import threading
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeError, ExecutionTimeout
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


async def run(provider: SandboxProvider, code: str, variables: dict[str, Any] | None = None, **tools: Any) -> Any:
    """What the code submits, where it finds those tools."""
    async with provider.interpreter(timeout=60, tools=tools) as interpreter:
        return (await interpreter.execute(dedent(code), variables)).outputs


@pytest.mark.every_provider
async def test_plain_and_asynchronous_tools_return_values(provider: SandboxProvider) -> None:
    async def greet(name: str, *, loud: bool = False) -> str:
        await asyncio.sleep(0.01)
        return name.upper() if loud else name

    class Scale:
        async def __call__(self, x: float) -> float:
            return 10 * x

    found = await run(
        provider,
        "SUBMIT(sum=add(1, b=2), loud=greet('zoë', loud=True), three=add3(4), ten=scale(0.5), nothing=nothing())",
        add=lambda a, b: a + b,
        add3=functools.partial(lambda a, b: a + b, 3),
        greet=greet,
        scale=Scale(),
        nothing=lambda: None,
    )
    assert found == {"sum": 3, "loud": "ZOË", "three": 7, "ten": 5.0, "nothing": None}


async def test_every_json_value_passes_both_ways(provider: SandboxProvider) -> None:
    values = [None, True, 0, -(2**70), 0.1, "", 'q"\\\n\0\u2028😀', [], {}, {"a": [{"b": [1.5]}]}]
    found = await run(
        provider, "SUBMIT(back=[same(v) for v in values], tuple=same((1, 2)))", {"values": values}, same=lambda v: v
    )
    assert repr(found["back"]) == repr(values)
    assert found["tuple"] == [1, 2]


@pytest.mark.every_provider
@pytest.mark.own_machine
async def test_large_values_pass_both_ways(provider: SandboxProvider) -> None:
    code = """
        text = repeat("é", 10_000_000)
        length = measure(text[: 2_000_000])
        try:
            measure(text)
        except ValueError as error:
            SUBMIT(received=len(text), length=length, said=str(error))
        """
    found = await run(provider, code, repeat=lambda text, n: text * n, measure=len)
    assert (found["received"], found["length"]) == (10_000_000, 2_000_000)
    assert "pass a path" in found["said"]


class ModelOverloaded(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_what_a_tool_raises_is_raised_in_the_code(provider: SandboxProvider) -> None:
    raised = {
        "value": ValueError("bad value"), "key": KeyError("k"), "file": FileNotFoundError(2, "no file", "x"),
        "own": ModelOverloaded("try later"), "stop": StopIteration("stop"), "timeout": TimeoutError("too slow"),
        "unicode": UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "group": ExceptionGroup("g", [ValueError()]),
        "surrogate": ValueError("\ud800"), "assert": AssertionError(), "text": Unprintable(),
    }  # fmt: skip

    def fail(kind: str) -> None:
        raise raised[kind]

    code = """
        def said(kind):
            try:
                fail(kind)
            except Exception as error:
                return [type(error).__name__, isinstance(error, RuntimeError), str(error)]
        SUBMIT(**{kind: said(kind) for kind in kinds})
        """
    async with provider.interpreter(timeout=5, tools={"fail": fail}) as interpreter:
        found = (await interpreter.execute(dedent(code), {"kinds": list(raised)})).outputs
    assert found["value"] == ["ValueError", False, "bad value"]
    assert found["timeout"] == ["TimeoutError", False, "too slow"]
    assert found["assert"] == ["AssertionError", False, ""]
    assert found["key"][0] == "KeyError"
    assert found["file"][0] == "FileNotFoundError"
    assert "no file" in found["file"][2]
    assert found["own"] == ["ToolError", True, "ModelOverloaded: try later"]
    assert "bad" in found["unicode"][2]
    assert found["surrogate"][0] == "ValueError"
    assert found["text"][2].startswith("Unprintable")


async def test_a_tool_that_is_cancelled_is_an_error_in_the_code(provider: SandboxProvider) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    code = "try:\n    cancelled()\nexcept Exception as error:\n    SUBMIT(said=str(error))"
    async with provider.interpreter(timeout=3, tools={"cancelled": cancelled}) as interpreter:
        assert "ancel" in (await interpreter.execute(code)).said


async def test_an_error_of_a_tool_that_the_code_does_not_catch_is_a_code_error(provider: SandboxProvider) -> None:
    def fail() -> None:
        raise ModelOverloaded("try later")

    with pytest.raises(CodeError, match=r"raised ToolError \(line 2\): ModelOverloaded: try later") as caught:
        await run(provider, "x = 1\nfail()", fail=fail)
    assert "driver" not in str(caught.value)


async def test_arguments_that_are_not_json_are_a_type_error_that_names_the_tool(provider: SandboxProvider) -> None:
    code = """
        said = []
        for value in (object(), b"x", float("nan"), {1: 2}, {3}, chr(0xD800), 10 ** 5000):
            for call in (lambda: same(value), lambda: same(v=[value])):
                try:
                    call()
                except TypeError as error:
                    said.append(str(error))
        SUBMIT(said=said)
        """
    found = await run(provider, code, same=lambda v: v)
    assert len(found["said"]) == 14
    assert all("same" in text for text in found["said"])


async def test_results_that_are_not_json_are_a_type_error_that_names_the_tool(provider: SandboxProvider) -> None:
    values = [object(), b"x", float("nan"), {1: 2}, {3}, "\ud800", 10**5000]
    code = """
        said = []
        for i in range(7):
            try:
                give(i)
            except TypeError as error:
                said.append(str(error))
        SUBMIT(said=said)
        """
    found = await run(provider, code, give=lambda i: values[i])
    assert len(found["said"]) == 7
    assert all("give" in text for text in found["said"])


async def test_a_call_with_thousands_of_arguments_is_an_error(provider: SandboxProvider) -> None:
    code = """
        for args, kwargs in ((range(1001), {}), ((), {f"x{i}": i for i in range(1001)})):
            try:
                take(*args, **kwargs)
            except ValueError as error:
                assert "more than 1,000 arguments" in str(error), error
            else:
                raise AssertionError(args)
        SUBMIT(said=take(*range(1000)))
        """
    assert await run(provider, code, take=lambda *args, **kwargs: len(args) + len(kwargs)) == {"said": 1000}


async def test_wrong_arguments_are_a_type_error(provider: SandboxProvider) -> None:
    code = "try:\n    add(1)\nexcept TypeError as error:\n    SUBMIT(said=str(error))"
    assert "missing" in (await run(provider, code, add=lambda a, b: a + b))["said"]


async def test_sixteen_threads_call_at_once_and_none_waits_for_the_slow_one(provider: SandboxProvider) -> None:
    fast_calls = 0
    all_done = asyncio.Event()

    async def call(i: int, k: int) -> int:
        nonlocal fast_calls
        if i == 0:
            await all_done.wait()
        else:
            fast_calls += 1
            if fast_calls == 15 * 20:
                all_done.set()
        return i * 100 + k

    code = """
        from concurrent.futures import ThreadPoolExecutor
        def work(i):
            return [call(i, k) for k in range(1 if i == 0 else 20)]
        with ThreadPoolExecutor(16) as pool:
            SUBMIT(answers=list(pool.map(work, range(16))))
        """
    found = await run(provider, code, call=call)
    assert found["answers"] == [[0], *([i * 100 + k for k in range(20)] for i in range(1, 16))]


async def test_plain_tools_run_at_the_same_time(provider: SandboxProvider) -> None:
    barrier = threading.Barrier(60)
    code = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(60) as pool:
            SUBMIT(met=sorted(pool.map(lambda i: meet(), range(60))))
        """
    assert (await run(provider, code, meet=lambda: barrier.wait(15)))["met"] == list(range(60))


async def test_two_executions_call_at_the_same_time(provider: SandboxProvider) -> None:
    here = 0
    met = asyncio.Event()

    async def meet(who: str) -> str:
        nonlocal here
        here += 1
        if here == 2:
            met.set()
        await met.wait()
        return who

    async with provider.interpreter(timeout=20, tools={"meet": meet}) as interpreter:
        code = "SUBMIT(who=meet(who))"
        first, second = await asyncio.gather(
            interpreter.execute(code, {"who": "a"}), interpreter.execute(code, {"who": "b"}, context="c")
        )
    assert (first.who, second.who) == ("a", "b")


async def test_a_tool_works_from_a_coroutine_and_during_a_submit(provider: SandboxProvider) -> None:
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
    assert (await run(provider, code, double=lambda n: 2 * n))["answers"] == [0, 2, 4, 6, 8]


async def test_a_forked_process_cannot_call(provider: SandboxProvider) -> None:
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
    found = await run(provider, code, double=lambda n: 2 * n)
    assert "own process" in found["said"]
    assert found["still"] == 4


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


async def test_a_call_under_way_ends_with_its_execution(provider: SandboxProvider) -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    async with provider.interpreter(timeout=1.5, tools={"wait": wait}) as interpreter:
        with pytest.raises(ExecutionTimeout, match="line 1"):
            await interpreter.execute("wait()")
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_tool_can_run_code_in_the_same_sandbox(provider: SandboxProvider) -> None:
    async def nested(n: int) -> int:
        return int((await interpreter.execute("SUBMIT(n * 2)", {"n": n})).output)

    async with provider.interpreter(timeout=20, tools={"nested": nested}) as interpreter:
        assert (await interpreter.execute("SUBMIT(nested(4))")).output == 8


async def test_hundreds_of_calls_one_after_the_other(provider: SandboxProvider) -> None:
    found = await run(provider, "SUBMIT(sum=sum(double(i) for i in range(300)))", double=lambda n: 2 * n)
    assert found["sum"] == 89_700
