"""How many prompts one query takes, on either side of the wire, and how many of them are under way at a time."""

import asyncio
import time
from typing import Any

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.sandbox.queries.budget import Budget, Usage
from rlm_batch.sandbox.queries.recursion import Queries
from rlm_batch.sandbox.queries.session import Answer, Message, QuerySession
from rlm_batch.sandbox.result import Result

pytestmark = pytest.mark.anyio


class LengthModel:
    """A model that answers with the length of the prompt, and counts the tasks of its event loop."""

    name = "length"
    most_tasks = 0

    async def ask(self, messages: list[Message]) -> Answer:
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        return Answer(str(len(messages[0]["content"])), Usage(1, 1, 1, 0.0))

    async def estimate_max_usage(self, messages: list[Message]) -> tuple[int, float]:
        return 1, 0.0

    def fingerprint(self) -> dict[str, Any]:
        return {"model": self.name}


async def recurse(*_: object) -> str:
    return ""


def make_queries(model: LengthModel, calls: int | None = None) -> Queries:
    budget = Budget(calls=calls)
    return Queries(QuerySession(root_model=model, flat_model=model, budget=budget, concurrency=4), recurse, max_depth=2)


async def ask(code: str, model: LengthModel) -> Result:
    async with LocalSandbox(isolation="none").interpreter(timeout=60) as interpreter:
        return await interpreter.execute(code, queries=make_queries(model))


async def test_a_million_prompts_are_an_error_in_the_code_that_says_the_limit_and_the_remedy() -> None:
    model = LengthModel()
    code = "try: llm_query_batched([''] * 1_000_000)\nexcept ValueError as error: SUBMIT(said=str(error))"
    assert "1,000,000 prompts, and takes 10,000 at most: ask in several calls" in (await ask(code, model)).said
    code = code.replace("llm", "rlm").replace("1_000_000", "10_001")
    assert "10,001 prompts, and takes 10,000 at most" in (await ask(code, model)).said
    assert not model.most_tasks


async def test_the_host_refuses_too_many_prompts_whatever_the_sandbox_lets_through() -> None:
    queries = make_queries(LengthModel())
    for name in ("llm_query", "rlm_query_batched"):
        context = {"context": {}} if name.startswith("rlm") else {}
        with pytest.raises(ValueError, match="10,001 prompts, and one call takes 10,000 at most"):
            await queries.tools[name]([""] * 10_001, concurrency=None, **context)
        for wrong in ("text", {"a": 1}, [1], [["nested"]], None):
            with pytest.raises(TypeError, match="a list of texts"):
                await queries.tools[name](wrong, concurrency=None, **context)


async def test_as_many_prompts_as_there_may_be_make_no_more_coroutines_than_may_run() -> None:
    model = LengthModel()
    prompts = ["x" * (i % 7) for i in range(10_000)]
    replies = await make_queries(model).tools["llm_query_batched"](prompts, concurrency=None)
    assert replies == [{"answer": str(i % 7)} for i in range(10_000)]
    assert model.most_tasks < 10


async def test_thousands_of_prompts_that_a_budget_refuses_do_not_hold_the_event_loop() -> None:
    last, turns = time.monotonic(), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    replies = await make_queries(LengthModel(), calls=10).tools["llm_query_batched"]([""] * 2000, concurrency=None)
    counting.cancel()
    assert [reply.get("error") for reply in replies[-3:]] == ["BudgetExceeded"] * 3
    assert turns > 400, f"{time.monotonic() - last} s"


async def test_prompts_that_are_too_many_bytes_for_one_call_are_asked_in_several() -> None:
    code = """
sizes = [2_000_000, 2_000_001, 2_000_002, 3]
try:
    llm_query("x" * 5_000_000)
except ValueError as error:
    SUBMIT(answers=llm_query_batched(["x" * size for size in sizes]), said=str(error))
"""
    found = await ask(code, LengthModel())
    assert found.answers == ["2000000", "2000001", "2000002", "3"]
    assert "hand its text to rlm_query as context" in found.said
