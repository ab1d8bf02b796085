"""Queries of a flow's code to language models: their limits, their cost and their records."""

import json
import os
import re
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
from prefect.logging.handlers import APILogHandler

from rlm_batch import (
    CodeError,
    ConfigurationError,
    LanguageModel,
    Result,
    batch,
    chunks,
    sequence,
    sweep,
)

from ..infra.programs import run_program
from ..infra.scripted_turns import make_script
from ..infra.waiting import wait_until_async
from ..standins.openai_chat import ChatServer, Reply
from .conftest import find_run_id

pytestmark = pytest.mark.anyio

KEY = "sk-of-a-person-51f0ab37"
NAME = "openai/gpt-4o-mini"
PRICE_IN, PRICE_OUT = 1.5e-7, 6e-7  # US dollars per token, from LiteLLM's list
# Code that asks until a limit is reached.
COUNT = """
count = 0
try:
    while True:
        llm_query("question")
        count += 1
except BudgetExceeded as error:
    SUBMIT(count=count, said=str(error))
"""


@pytest.fixture(autouse=True)
def credentials(chat, monkeypatch):
    """Set the address and key that LiteLLM uses by default."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)


async def save_model(chat: ChatServer, **settings: Any) -> str:
    """Save a block, and return its name for a flow's `language_model`."""
    settings = {"model": NAME, "api_key": KEY, "api_base": chat.url, **settings}
    block = LanguageModel(**settings)
    await block.save("chat", overwrite=True)  # type: ignore[misc]
    return "rlm-language-model/chat"


async def test_exactly_ten_calls_reach_the_model_and_their_usage_is_counted(chat, caplog):
    code = """
replies = llm_query_batched([f"question {i}" for i in range(20)], on_error="return")
SUBMIT(answers=[reply for reply in replies if isinstance(reply, str)])
"""
    first, second = await batch([code, code], language_model=NAME, max_llm_calls=10, batch_concurrency=8)
    for result in (first, second):
        assert len(result.answers) == 10
        queries = result.meta.queries
        assert (queries.asked, queries.failed, queries.calls) == (20, 10, 10)
    assert chat.stats.requests == 20
    queries = [result.meta.queries for result in (first, second)]
    assert sum(one.prompt_tokens for one in queries) == chat.stats.prompt_tokens
    assert sum(one.completion_tokens for one in queries) == chat.stats.completion_tokens
    cost = chat.stats.prompt_tokens * PRICE_IN + chat.stats.completion_tokens * PRICE_OUT
    assert sum(one.cost or 0 for one in queries) == pytest.approx(cost)
    said = f"called 20 times: {chat.stats.prompt_tokens} + {chat.stats.completion_tokens} tokens, for ${cost:.6f}"
    assert said in caplog.text


@pytest.mark.parametrize(
    ("limits", "counts", "message"),
    [
        ({"max_total_llm_calls": 5}, (5, 0), "all 5 calls of the model are used up.*raise `max_total_llm_calls`"),
        # A call is expected to use two tokens of the prompt and three of the answer, as the first one did.
        ({"max_total_llm_tokens": 140}, (35, 0), "of 140 0 are left.*raise `max_total_llm_tokens`"),
        # The first call reserves 124 tokens at $0.001 and uses 4, so each further call reserves about 4.
        ({"max_cost": 0.2}, (50, 0), r"of \$0.2 \$0.000000 are left"),
    ],
)
async def test_limits_hold_for_the_whole_flow_run(chat, limits, counts, message):
    model = await save_model(chat, max_tokens=100, input_cost_per_token=0.001, output_cost_per_token=0.001)
    first, second = await batch([COUNT, COUNT], language_model=model, max_llm_calls=None, max_workers=1, **limits)
    assert (first.count, second.count) == counts
    assert re.search(message, first.said)
    assert re.search(message, second.said)
    assert chat.stats.requests == counts[0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"language_model": "openai/no-such-model", "max_cost": 1.0},
            "the price of the model openai/no-such-model is unknown",
        ),
        ({"language_model": "rlm-language-model/nosuch"}, "no block rlm-language-model/nosuch"),
    ],
)
async def test_a_model_with_an_unknown_price_or_name_is_refused(parameters, message, results):
    with pytest.raises(ConfigurationError, match=message):
        await batch(["SUBMIT(1)"], **parameters)
    assert not list(results.glob("*"))


@pytest.mark.full
async def test_the_model_is_in_the_key_and_credentials_and_limits_are_not(chat):
    code = ["SUBMIT(answer=llm_query('q'))"]
    cases: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({}, {}, 1),
        ({"api_key": "sk-another", "request_timeout": 7}, {"max_llm_calls": 3, "batch_concurrency": 2}, 1),
        ({"sub_model": "openai/gpt-4o"}, {}, 2),
    ]
    for settings, parameters, requests in cases:
        await batch(code, language_model=await save_model(chat, **settings), cache_results=True, **parameters)
        assert chat.stats.requests == requests


async def read_task_runs(run_id: uuid.UUID) -> list[TaskRun]:
    async with get_client() as client:
        return await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))


async def test_each_query_is_a_child_task_run_with_its_cost(chat, results):
    chat.rule("refused", Reply("refused", status=400))
    chat.script = make_script(("", "SUBMIT(answer=llm_query('deeper'))"))
    code = """
llm_query("a \\x1b[2Jlong\\n question " + "x" * 100)
llm_query_batched(["refused"], on_error="return")
SUBMIT(answer=rlm_query("think"))
"""
    await batch([code], language_model=NAME, timeout=500)  # the first recursive query imports DSPy
    run_id = find_run_id(results)

    async def find_five_that_are_over() -> list[TaskRun]:
        task_runs = await read_task_runs(run_id)
        return task_runs if len(task_runs) == 5 and all(run.state and run.state.is_final() for run in task_runs) else []

    runs = sorted(await wait_until_async(find_five_that_are_over), key=lambda run: (run.name, run.state_name))
    assert [(run.name, run.state_name) for run in runs] == [
        ("execution 0", "Completed"),
        (f"llm_query: a \\x1b[2Jlong question {'x' * 57}...", "Completed"),
        ("llm_query: refused", "Failed"),
        ("rlm_query: think", "Completed"),
        ("turn 1, llm_query: deeper", "Completed"),
    ]
    _, flat, failed, above, deeper = runs
    assert flat.state is not None
    assert flat.state.message == f"{NAME}: 1 call, 4 + 6 tokens, $0.000004"
    assert failed.state is not None
    assert str(failed.state.message).startswith("QueryError: the model openai/gpt-4o-mini did not answer")
    assert str(above.id) in json.dumps(deeper.model_dump(mode="json")["task_inputs"])


@pytest.mark.full
async def test_queries_beyond_a_few_hundred_are_summarized(chat, results, monkeypatch):
    monkeypatch.setattr("rlm_batch.tasks.query.MAX_TRACKED_QUERIES", 3)
    (result,) = await batch(["SUBMIT(n=len(llm_query_batched([str(i) for i in range(40)])))"], language_model=NAME)
    assert (result.n, result.meta.queries.asked, len(result.meta.queries.tree)) == (40, 40, 40)
    run_id = find_run_id(results)

    async def has_execution_ended() -> bool:  # the server gets this event last
        return any(run.name == "execution 0" and run.state_name == "Completed" for run in await read_task_runs(run_id))

    await wait_until_async(has_execution_ended)
    assert len(await read_task_runs(run_id)) == 4


@pytest.mark.full
async def test_the_key_is_never_logged_stored_or_shown(chat, caplog, results):
    caplog.set_level("DEBUG")
    chat.rule("refuse", Reply(f"Incorrect API key provided: {KEY}. You can find yours elsewhere.", status=401))
    chat.script = make_script(
        ("", "print(llm_query('q'))\nSUBMIT(answer=str(llm_query_batched(['refuse'], on_error='return')))")
    )
    code = ["SUBMIT(a=llm_query('q'), b=rlm_query('x'))", "llm_query('refuse')"]
    outcomes = []
    for model in (NAME, await save_model(chat)):
        outcomes += await batch(code, language_model=model, on_failure="return")
    await APILogHandler.aflush()
    assert "Error code: 401" in outcomes[0].b
    assert "Error code: 401" in str(outcomes[1].error)
    assert KEY not in repr([(one.outputs if isinstance(one, Result) else str(one.error), one.meta) for one in outcomes])
    assert KEY not in caplog.text
    home = Path(os.environ["PREFECT_HOME"]).parent
    with_key, names = list[Path](), set[str]()
    for path in (path for root in (home, results) for path in root.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):  # the servers remove files meanwhile
            names.add(path.name)
            if path.is_file() and KEY.encode() in path.read_bytes():
                with_key.append(path)
    assert "prefect.db" in names
    assert with_key == []


@pytest.mark.usefixtures("short_delays")
async def test_a_retry_has_a_new_budget_and_every_call_is_logged(chat, caplog):
    code = "llm_query('q')\n1 / 0"
    (failure,) = await batch([code], language_model=NAME, retries=1, retry_code_errors=True, max_llm_calls=1,
                             on_failure="return")  # fmt: skip
    assert isinstance(failure.error, CodeError)
    assert failure.error.type == "ZeroDivisionError"
    assert failure.meta.queries.calls == 1
    assert chat.stats.requests == 2
    assert "the model was called 2 times" in caplog.text


@pytest.mark.full
def test_a_missing_extra_names_the_package_to_install(chat, tmp_path, server):
    """Run a new process that cannot find LiteLLM."""
    program = """
import asyncio, importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("litellm", "dspy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("litellm", "dspy") else find(name, *more)
from rlm_batch import ConfigurationError, LocalInterpreter, batch
try:
    asyncio.run(batch(["SUBMIT(1)"], language_model="openai/gpt-4o-mini"))
except ConfigurationError as error:
    print(error)
try:
    from rlm_batch import InterpreterFactory
except ConfigurationError as error:
    print(error)
print(asyncio.run(batch(["SUBMIT(1)"]))[0].output)
"""
    command = [sys.executable, "-c", program]
    done = run_program(command, cwd=tmp_path)
    assert done.stdout.count("pip install 'rlm-batch[rlm]'") == 2, done.stderr
    assert done.stdout.rstrip().endswith("1")


async def test_steps_chunks_and_trials_can_query_and_uncaught_errors_fail_them(chat):
    first, second = await sequence(
        ["answer = llm_query('one')", "SUBMIT(both=[answer, llm_query('two')])"], language_model=NAME, max_llm_calls=1
    )
    assert (first.meta.queries.calls, second.meta.queries.calls) == (1, 1)
    assert second.both == ["answer to: one", "answer to: two"]
    report = await chunks(
        "SUBMIT(answer=llm_query(data))", {"a": "x", "b": "y"}, reduce="SUBMIT(n=len(results))", language_model=NAME
    )
    assert [report["a"].answer, report["b"].answer] == ["answer to: x", "answer to: y"]
    assert report.reduction.n == 2
    chat.rule("3", Reply("refused", status=400))
    code = "SUBMIT(answer=llm_query(str(x)))"
    good, bad = (await sweep(code, points=[{"x": 1}, {"x": 3}], language_model=NAME, on_failure="return")).trials
    assert good.answer == "answer to: 1"
    assert isinstance(bad.error, CodeError)
    assert (bad.error.type, bad.meta.queries.failed) == ("QueryError", 1)
    assert "refused" in str(bad.error)


@pytest.mark.parametrize("limits", [{"max_cost": 2.0}, {"max_llm_tokens": 150_000}])
async def test_parallel_queries_do_not_fail_on_an_unused_budget(chat, limits):
    """One answer of gpt-5 may have 128,000 tokens, which cost $1.28."""
    model = await save_model(chat, model="openai/gpt-5")
    code = "SUBMIT(answers=llm_query_batched([f'q{i}' for i in range(16)]))"
    results = await batch([code] * 3, language_model=model, batch_concurrency=16, **limits)
    assert [result.answers for result in results] == [[f"answer to: q{i}" for i in range(16)]] * 3


async def test_a_cost_limit_works_with_two_models(chat):
    model = await save_model(chat, model="openai/gpt-4", sub_model=NAME, max_tokens=1000)
    (result,) = await batch(["SUBMIT(answer=llm_query('q'))"], language_model=model, max_cost=0.001)
    assert result.answer == "answer to: q"
