"""Budgets of recursive queries: queries leave the model its last turn, and a raised limit pays for nothing twice."""

import random
from functools import partial
from typing import Any

import pytest

from rlm_batch import LanguageModel, rlm

from ..infra.scripted_turns import MARK, format_turn
from ..standins.openai_chat import ChatServer, Reply, Request

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai")]

NAME = "openai/gpt-4o-mini"
LAST = "Reply with one block of Python that only calls SUBMIT"


def make_priced_model() -> LanguageModel:
    """Return a model whose tokens cost $0.00001 in prompts and $0.00005 in answers."""
    return LanguageModel(
        model=NAME, max_tokens=400,
        input_cost_per_token=0.00001, output_cost_per_token=0.00005,
    )  # fmt: skip


def count_turns(request: Request) -> int:
    """Return the number of the turn that a request asks for, from 1."""
    return sum(message["role"] == "assistant" for message in request.body["messages"]) + 1


@pytest.mark.parametrize("form", ["llm_query_batched", "rlm_query_batched"])
async def test_a_batch_that_leaves_no_call_for_the_last_turn_is_refused_before_it_pays(chat, form):
    def script(request: Request) -> str:
        if "Turns left: 19." not in request.text:
            return format_turn(f"answers = {form}([str(n) for n in range(60)])")
        return format_turn(f"SUBMIT({form}(['one', 'two'])[1])") if MARK in request.text else "never"

    chat.script = lambda request: script(request) if "QUESTION" in request.text else format_turn("SUBMIT('found')")
    answer = await rlm("QUESTION", NAME)
    assert "found" in answer.answer
    refused, _ = answer.trajectory
    assert "the 60 calls cannot be made: of 50 calls 48 are left beside the last turns" in refused["output"]
    assert answer.queries.calls == chat.stats.requests == 4


async def test_sub_queries_leave_the_last_call_to_the_model(chat):
    """The model asks one query after another, until its budget has only its own last turn."""
    code = """
        count = 0
        try:
            while True:
                llm_query(f"{count}")
                count += 1
        except BudgetExceeded:
            pass
    """

    def script(request: Request) -> str | None:
        if MARK not in request.text:
            return None
        return format_turn("SUBMIT(count)" if "Your budget allows one more reply." in request.text else code)

    chat.script = script
    answer = await rlm("q", NAME, max_llm_calls=10)
    assert answer.value == 8
    assert answer.queries.calls == chat.stats.requests == 10


async def test_a_last_turn_without_an_answer_names_the_limit(chat):
    chat.script = lambda _: format_turn("print('found', 1)")
    answer = await rlm("q", NAME, on_failure="return", max_llm_calls=3)
    assert "submitted no answer in its last turn" in str(answer.error)
    assert "raise `max_llm_calls`" in str(answer.error)
    assert LAST in chat.requests[-1].text
    assert [LAST in request.text for request in chat.requests] == [False, False, True]


async def test_a_deeper_model_cannot_use_the_last_call_of_the_one_that_asks(chat):
    def script(request: Request) -> str:
        if any(message.startswith("DEEP") for message in request.messages):
            return format_turn(
                "for n in range(99): llm_query(str(n))" if LAST not in request.text else "SUBMIT('deep')"
            )
        if MARK not in request.text:
            return "flat"
        return format_turn("print(rlm_query('DEEP'))" if count_turns(request) == 1 else "SUBMIT('whole')")

    chat.script = script
    answer = await rlm("q", NAME, max_llm_calls=12)
    assert answer.value == "whole"
    assert "deep" in answer.trajectory[0]["output"]
    assert chat.stats.requests == answer.queries.calls <= 12


class Work:
    """A script of questions that read 20 parts of a text in four turns, and then answer with the number of parts.

    Of its requests, `fault_rate` fail.
    """

    def __init__(self, fault_rate: float = 0.0) -> None:
        self._fault_rate, self._dice = fault_rate, random.Random(7)
        self.last_turns = 0  # answered

    def __call__(self, request: Request) -> Reply | str:
        if self._dice.random() < self._fault_rate:
            return Reply("busy", status=500)
        if MARK not in request.text:
            return Reply("yes " * self._dice.randint(1, 30), delay=0.002)
        if LAST in request.text:
            self.last_turns += 1
            return format_turn("SUBMIT(found)")
        turn = count_turns(request)
        if turn == 5:
            return format_turn("SUBMIT(found)")
        start = "found = 0" if turn == 1 else ""
        ask = f"[f'part {{n}}: ' + 'word ' * 60 for n in range({5 * turn})]"
        code = (
            f"answers = llm_query_batched({ask}, on_error='return')\nfound += sum(isinstance(a, str) for a in answers)"
        )
        return format_turn(f"{start}\n{code}\nprint('text ' * {100 * turn})")


async def measure_cost(chat: ChatServer, count: int) -> float:
    """Return the cost of so many questions without a limit."""
    chat.script = Work()
    model = make_priced_model()
    answers = await rlm(queries=[f"question {n}" for n in range(count)], language_model=model, max_llm_calls=None)
    assert [answer.value for answer in answers] == [50] * count
    return answers.queries.cost or 0.0


@pytest.mark.parametrize(
    ("count", "workers", "fault_rate"),
    [
        (6, 6, 0.0),
        (6, 3, 0.05),
        pytest.param(30, 8, 0.0, marks=pytest.mark.full),
        pytest.param(30, 8, 0.05, marks=pytest.mark.full),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", ["max_cost", "max_total_llm_tokens", "max_total_llm_calls", "max_llm_calls"])
async def test_no_question_is_lost_with_a_budget_for_two_fifths_of_the_work(chat, count, workers, fault_rate, limit):
    cost = await measure_cost(chat, 2) / 2 * count
    per_question = chat.stats.answered / 2, (chat.stats.prompt_tokens + chat.stats.completion_tokens) / 2
    values = {
        "max_cost": 0.4 * cost,
        "max_total_llm_calls": int(0.4 * count * per_question[0]),
        "max_total_llm_tokens": int(0.4 * count * per_question[1]),
        "max_llm_calls": int(0.4 * per_question[0]),
    }
    before = chat.stats.answered, chat.stats.prompt_tokens, chat.stats.completion_tokens
    work = chat.script = Work(fault_rate)
    answers = await rlm(
        queries=[f"question {n}" for n in range(count)], language_model=make_priced_model(), max_workers=workers,
        on_failure="return", **{"max_llm_calls": None, limit: values[limit]},
    )  # fmt: skip
    calls, prompt, completion = (
        now - then
        for now, then in zip(
            (chat.stats.answered, chat.stats.prompt_tokens, chat.stats.completion_tokens), before, strict=True
        )
    )
    spent = prompt * 0.00001 + completion * 0.00005
    answered = [answer for answer in answers if answer.answered]
    print(
        f"{limit}={values[limit]:.4g}: {len(answered)} of {count} answered, {work.last_turns} by a last turn; spent "
        f"${spent:.4f}, {calls} calls, {prompt + completion} tokens; "
        f"found {[answer.value for answer in answers]}"
    )
    used = answers.queries
    assert (used.calls, used.prompt_tokens, used.completion_tokens) == (calls, prompt, completion)
    assert used.cost == pytest.approx(spent)
    real = {"max_cost": spent, "max_total_llm_calls": calls, "max_total_llm_tokens": prompt + completion}
    if limit in real:
        assert 0.6 * values[limit] < real[limit] <= values[limit] * 1.000001
    for answer in answers:
        if answer.answered:
            continue
        assert limit in str(answer.error)
        assert not answer.queries.calls, "a question that has begun has its last turn"
    assert len(answered) >= count // 3


class TenTurns:
    """A script of a question with ten turns of three queries each, and then the answer."""

    def __init__(self) -> None:
        self.last_turns = 0

    def __call__(self, request: Request) -> str:
        if MARK not in request.text:
            return f"answer {request.messages[-1]}"
        if LAST in request.text:
            self.last_turns += 1
            return format_turn("1 / 0")
        turn = count_turns(request)
        if turn > 10:
            return format_turn("SUBMIT('done')")
        return format_turn(f"print(llm_query_batched(['{turn} a', '{turn} b', '{turn} c']))")


@pytest.mark.parametrize("cache", [False, True])
async def test_more_turns_calls_or_dollars_pay_for_nothing_twice(chat, tmp_path, cache):
    """Each run has a higher limit than the last, and only replies to the demand to submit at once are of no use."""
    script = chat.script = TenTurns()
    model = LanguageModel(
        model=NAME,
        max_tokens=30,
        input_cost_per_token=0,
        output_cost_per_token=0.001,
    )
    ask = partial(rlm, "q", model, results_path=tmp_path / "results", on_failure="return", cache_queries=cache)
    limits: dict[str, Any] = {"max_turns": 3, "max_llm_calls": 50, "max_cost": 1.0}
    kept: list[int] = []
    for raised in (
        {},
        {"max_turns": 4, "turn_timeout": 90},
        {"max_turns": 30, "max_llm_calls": 14},
        {"max_llm_calls": 80, "max_cost": 0.06},
        {"max_cost": 1.0},
    ):
        limits |= raised
        answer = await ask(**limits)
        kept.append(answer.queries.cached)
        assert answer.answered == (raised == {"max_cost": 1.0})
    assert kept == sorted(set(kept)), "each run goes on where the last one ended"
    assert answer.value == "done"
    assert answer.queries.calls + answer.queries.cached == 41
    assert chat.stats.answered == 41 + script.last_turns
    answered = chat.stats.answered
    assert (await ask(max_turns=5)).value == "done"
    assert chat.stats.answered == answered, "an answer does not depend on the limits"


async def test_a_model_that_fails_within_its_limits_starts_afresh(chat, tmp_path):
    """Its replies would fail again. With more turns they might not."""
    codes = iter(["print(1)", "1 / 0", "print(2)", "1 / 0", "SUBMIT('late')"])
    chat.script = lambda _: format_turn(next(codes))
    ask = partial(rlm, "q", NAME, results_path=tmp_path / "results", on_failure="return")
    assert (await ask(max_turns=1)).trajectory[0]["code"] == "print(1)"
    assert (await ask(max_turns=1)).trajectory[0]["code"] == "print(2)"
    answer = await ask(max_turns=2)
    assert (answer.value, answer.queries.cached, answer.queries.calls) == ("late", 1, 1)


async def test_a_run_on_a_ledger_of_version_1_0_continues_with_its_keys(chat, tmp_path, monkeypatch):
    chat.script = TenTurns()
    ask = partial(rlm, "q", NAME, results_path=tmp_path / "results", on_failure="return", max_turns=12)
    with monkeypatch.context() as old:
        old.setattr("rlm_batch.flows.engine.run.KEY_VERSION", 2)
        assert not (await ask(max_llm_calls=14)).answered
    answer = await ask()
    assert answer.value == "done"
    assert answer.queries.cached >= 12
    calls = chat.stats.answered
    assert (await ask()).value == "done"
    assert chat.stats.answered == calls
