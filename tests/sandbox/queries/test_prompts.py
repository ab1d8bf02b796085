"""Tests of the limit on prompts per query, in the sandbox and on the host, and of how many prompts run at a time."""

import asyncio

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.sandbox.queries.budget import Budget, Usage
from rlm_batch.sandbox.queries.recursion import Queries
from rlm_batch.sandbox.queries.session import DEFAULT_OPTIONS, Answer, Message, QuerySession, RequestOptions

from ...infra.stub_model import StubModel

pytestmark = pytest.mark.anyio


class LengthModel(StubModel):
    """A model that answers with the length of the prompt, and counts the tasks of its event loop."""

    most_tasks = 0

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        return Answer(str(len(messages[0]["content"])), Usage(1, 1, 1, 0.0))


async def recurse(*_: object) -> str:
    return ""


def make_queries(model: LengthModel, calls: int | None = None) -> Queries:
    budget = Budget(calls=calls)
    return Queries(QuerySession(root_model=model, flat_model=model, budget=budget, concurrency=4), recurse, max_depth=2)


async def test_too_many_prompts_raise_an_error_and_large_prompts_are_split() -> None:
    model = LengthModel()
    too_many = "try: {}_query_batched([''] * {})\nexcept ValueError as error: SUBMIT(said=str(error))"
    sizes = [2_000_000, 2_000_001, 2_000_002, 3]
    too_long = f"""
try:
    llm_query("x" * 5_000_000)
except ValueError as error:
    SUBMIT(answers=llm_query_batched(["x" * size for size in {sizes}]), said=str(error))
"""
    async with LocalSandbox(isolation="none").interpreter() as interpreter:
        for name, count in (("llm", 1_000_000), ("rlm", 10_001)):
            refused = await interpreter.execute(too_many.format(name, count), queries=make_queries(model))
            assert f"{count:,} prompts are more than 10,000: split them" in refused.said
        assert not model.most_tasks
        result = await interpreter.execute(too_long, queries=make_queries(model))
    assert result.answers == [str(size) for size in sizes]
    assert "pass it to rlm_query as context" in result.said


async def test_the_host_refuses_too_many_prompts() -> None:
    queries = make_queries(LengthModel())
    for name in ("llm_query", "rlm_query_batched"):
        context = {"context": {}} if name.startswith("rlm") else {}
        with pytest.raises(ValueError, match="at most 10000 items"):
            await queries.tools[name]([""] * 10_001, concurrency=None, **context)
        for wrong in ("text", {"a": 1}, [1], [["nested"]], None):
            with pytest.raises(ValueError, match=r"valid (list|string|dictionary)"):
                await queries.tools[name](wrong, concurrency=None, **context)


async def test_thousands_of_prompts_do_not_block_the_event_loop() -> None:
    model, turns = LengthModel(), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    prompts = ["x" * (i % 7) for i in range(10_000)]
    replies = await make_queries(model, calls=8000).tools["llm_query_batched"](prompts, concurrency=None)
    counting.cancel()
    assert replies[:8000] == [{"answer": str(i % 7)} for i in range(8000)]
    assert {reply["error"] for reply in replies[8000:]} == {"BudgetExceeded"}
    assert model.most_tasks < 10
    assert turns >= 10_000 // 4
