"""Tests that equal questions are asked once: each waiting query gets the answer, or asks if the first query fails."""

import asyncio
from typing import Any

import pytest

from rlm_batch import BudgetExceeded, DeadlineExceeded, QueryError
from rlm_batch.sandbox.queries.answer_cache import AnswerCache, MemoryAnswers
from rlm_batch.sandbox.queries.budget import Budget, Usage
from rlm_batch.sandbox.queries.session import DEFAULT_OPTIONS, Answer, Message, Query, QuerySession, RequestOptions

from ...infra.stub_model import StubModel

pytestmark = pytest.mark.anyio


class GatedModel(StubModel):
    """A model that waits for its gate, and then answers with its number of calls, or fails if `refuses` is set."""

    name = "gated"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.gate = asyncio.Event()
        self.asked = 0
        self.refuses = False

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        self.asked += 1
        await self.gate.wait()
        if self.refuses:
            raise QueryError("no answer today")
        return Answer(f"answer {self.asked}", Usage(1, 10, 5, 0.25))

    def fingerprint(self) -> dict[str, Any]:
        return self.settings


def begin(model: GatedModel, cache: AnswerCache, prompt: str = "q", **limits: Any) -> asyncio.Task[str]:
    """Ask in a new session, as another execution would; `deadline` is in seconds from now."""
    deadline = limits.pop("deadline", None)
    session = QuerySession(
        root_model=model, flat_model=model, budget=Budget(**limits), concurrency=4, cache=cache
    )  # fmt: skip
    session.deadline = None if deadline is None else asyncio.get_running_loop().time() + deadline

    async def ask() -> str:
        query = Query("llm_query", 1, model.name, prompt)
        text = (await session.ask(model, [{"role": "user", "content": prompt}], query)).text
        return f"{text}, {query.usage.calls} called, {query.cached} cached"

    return asyncio.create_task(ask())


async def settle() -> None:
    """Let every task run until it waits for the model."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_waiter_keeps_its_deadline_and_asks_if_the_first_caller_fails():
    model, cache = GatedModel(), AnswerCache(MemoryAnswers())
    leader = begin(model, cache)
    await settle()
    late = begin(model, cache, deadline=0.05)
    others = [begin(model, cache, calls=0), *(begin(model, cache) for _ in range(5))]
    await settle()
    assert model.asked == 1
    with pytest.raises(DeadlineExceeded):
        await late
    leader.cancel()
    await settle()
    with pytest.raises(BudgetExceeded):  # this task took over the question, but may make no call
        await others.pop(0)
    assert model.asked == 2
    model.gate.set()
    answers = await asyncio.gather(*others)
    assert sorted(answers) == ["answer 2, 0 called, 1 cached"] * 4 + ["answer 2, 1 called, 0 cached"]
    assert leader.cancelled()
    assert await begin(model, cache, calls=0, tokens=0, cost=0.0) == "answer 2, 0 called, 1 cached"
    assert cache.hits == 5


async def test_a_failure_reaches_all_waiters_and_is_not_cached():
    model, cache = GatedModel(), AnswerCache(MemoryAnswers())
    model.refuses = True
    tasks = [begin(model, cache) for _ in range(5)]
    await settle()
    model.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no answer today"] * 5
    model.refuses = False
    assert await begin(model, cache) == "answer 2, 1 called, 0 cached"


async def test_another_model_setting_or_prompt_is_not_answered_from_the_cache():
    cache = AnswerCache(MemoryAnswers())
    models = [GatedModel(**settings) for settings in ({}, {"temperature": 0.5}, {"model": "x"}, {"odd": {1, 2}})]
    for model in models:
        model.gate.set()
        for prompt in ("q", "Q", "q" * 2**20, "\ud800", "q"):
            await begin(model, cache, prompt)
        assert model.asked == 4
    assert cache.hits == len(models)
