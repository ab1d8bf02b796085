"""Tests of simultaneous executions in one sandbox, and of simultaneous sandboxes."""

import asyncio

import pytest

from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = pytest.mark.anyio


async def test_concurrent_executions_share_one_sandbox_and_keep_their_results(provider: SandboxProvider) -> None:
    count, here, is_full = 20, list[int](), asyncio.Event()

    async def meet(i: int) -> None:
        here.append(i)
        if len(here) == count:
            is_full.set()
        await is_full.wait()

    interpreter = provider.interpreter(timeout=90, tools={"meet": meet})
    try:
        code = "print(i); meet(i); SUBMIT(i=i, text=str(i) * 1000)"
        executions = [interpreter.execute(code, {"i": i}) for i in range(count)]
        results = await asyncio.gather(*executions)
        for i, result in enumerate(results):
            assert result.outputs == {"i": i, "text": str(i) * 1000}
            assert result.meta.stdout == f"{i}\n"
        assert len({result.meta.sandbox_id for result in results}) == 1
        await asyncio.gather(interpreter.start(), interpreter.start())
        assert (await interpreter.execute("SUBMIT()")).meta.sandbox_id == results[0].meta.sandbox_id
    finally:
        await interpreter.shutdown()


async def test_concurrent_sandboxes_share_no_files(provider: SandboxProvider) -> None:
    async with provider.interpreter() as first, provider.interpreter() as second:
        await first.execute("open('note.txt', 'w').write('x')")
        code = "import os; SUBMIT(there=os.path.exists('note.txt'))"
        there = [(await interpreter.execute(code)).there for interpreter in (first, second)]
        assert there == [True, False]


@pytest.mark.local_first
async def test_concurrent_large_and_small_results_come_back_complete(interpreter: Interpreter) -> None:
    large = [interpreter.execute("SUBMIT(text='x' * 1_000_000)") for _ in range(4)]
    small = [interpreter.execute("SUBMIT(i=i)", {"i": i}) for i in range(8)]
    results = await asyncio.gather(*large, *small)
    assert [len(result.text) for result in results[:4]] == [1_000_000] * 4
    assert [result.i for result in results[4:]] == list(range(8))
