"""Executions of one sandbox run at the same time, and sandboxes beside each other."""

import asyncio

import pytest

from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = pytest.mark.anyio


async def test_forty_executions_at_once_keep_their_results(interpreter: Interpreter) -> None:
    code = "import time; time.sleep(0.3); print(i); SUBMIT(i=i, text=str(i) * 1000)"
    results = await asyncio.gather(*(interpreter.execute(code, {"i": i}) for i in range(40)))
    for i, result in enumerate(results):
        assert result.outputs == {"i": i, "text": str(i) * 1000}
        assert result.meta.stdout == f"{i}\n"


@pytest.mark.local_first
async def test_many_executions_one_after_the_other(interpreter: Interpreter) -> None:
    for i in range(100):
        assert (await interpreter.execute("SUBMIT(i=i)", {"i": i})).i == i


async def test_an_execution_starts_the_sandbox_once_however_many_there_are(provider: SandboxProvider) -> None:
    interpreter = provider.interpreter(timeout=20)
    try:
        results = await asyncio.gather(*(interpreter.execute("SUBMIT()") for _ in range(5)), interpreter.start())
        assert len({result.meta.sandbox_id for result in results[:5]}) == 1  # type: ignore[union-attr]
    finally:
        await interpreter.shutdown()


@pytest.mark.own_machine
async def test_sandboxes_do_not_share_files(provider: SandboxProvider) -> None:
    async with provider.interpreter(timeout=20) as first, provider.interpreter(timeout=20) as second:
        await first.execute("open('note.txt', 'w').write('x')")
        code = "import os; SUBMIT(there=os.path.exists('note.txt'))"
        there = [(await interpreter.execute(code)).there for interpreter in (first, second)]
        assert there == [True, False]


@pytest.mark.local_first
async def test_ten_sandboxes_at_once(provider: SandboxProvider) -> None:
    async def one(i: int) -> tuple[int, str]:
        async with provider.interpreter(timeout=20) as interpreter:
            result = await interpreter.execute("SUBMIT(i=i)", {"i": i})
            return result.i, result.meta.sandbox_id

    found = await asyncio.gather(*(one(i) for i in range(10)))
    assert [i for i, _ in found] == list(range(10))
    assert len({name for _, name in found}) == 10


async def test_starting_twice_does_nothing(interpreter: Interpreter) -> None:
    await interpreter.start()
    await asyncio.gather(interpreter.start(), interpreter.start())
    assert (await interpreter.execute("SUBMIT(x=1)")).x == 1


@pytest.mark.local_first
@pytest.mark.own_machine
async def test_a_large_result_of_one_does_not_hold_up_another(interpreter: Interpreter) -> None:
    large = [interpreter.execute("SUBMIT(text='x' * 1_000_000)") for _ in range(8)]
    small = [interpreter.execute("SUBMIT(i=i)", {"i": i}) for i in range(8)]
    results = await asyncio.gather(*large, *small)
    assert [len(result.text) for result in results[:8]] == [1_000_000] * 8
    assert [result.i for result in results[8:]] == list(range(8))
