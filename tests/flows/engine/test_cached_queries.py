"""The `cache_queries` parameter: one question per flow run, and answers for later runs from the ledgers."""

import json
from pathlib import Path

import pytest

from rlm_batch import LanguageModel, LocalInterpreter, batch, load_report, rlm
from rlm_batch.cli.report import report

from ...infra.scripted_turns import make_script
from ...standins.openai_chat import ChatServer, Reply

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"


@pytest.fixture(autouse=True)
def model_server(openai: ChatServer) -> ChatServer:
    """Return the server that replaces OpenAI's."""
    return openai


async def test_executions_and_later_runs_share_one_cached_answer(
    chat: ChatServer, results: Path, capsys: pytest.CaptureFixture[str]
):
    chat.rule("refused", Reply("refused", status=400))
    # These answers are not in the cache, so they are asked twice.
    chat.rule("long", Reply("half", finish_reason="length"))
    chat.rule("pensive", "<think>half")
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    answers = set(pool.map(llm_query, ["the same"] * 4))
failed = {type(error).__name__ for error in llm_query_batched(["refused", "long", "pensive"], on_error="return")}
SUBMIT(answers=sorted(answers), failed=list(failed))
"""
    outcomes = await batch([code, code], language_model=NAME, max_workers=1, max_llm_calls=4, cache_queries=True)
    assert [outcome.outputs for outcome in outcomes] == [
        {"answers": ["answer to: the same"], "failed": ["QueryError"]}
    ] * 2  # fmt: skip
    queries = [outcome.meta.queries for outcome in outcomes]
    assert sum(one.asked for one in queries) == 14
    assert (sum(one.calls for one in queries), sum(one.cached for one in queries)) == (5, 7)
    assert sum(one.prompt_tokens for one in queries) == chat.stats.prompt_tokens
    requests = chat.stats.requests
    assert requests - sum("refused" in request.text for request in chat.requests) == 5
    (ledger,) = results.glob("*/")
    (part,) = ledger.glob("answers-*.jsonl")
    line = json.loads(part.read_text())
    assert (line["status"], line["model"], line["answer"]) == ("answered", NAME, "answer to: the same")
    assert len(line["key"]) == 64
    assert set(line) == {"version", "key", "at", "status", "model", "answer"}
    assert report(ledger.name, show_queries=True) == 0
    printed = capsys.readouterr()
    assert "14 asked; the model was called 5 times: " in printed.err
    assert "; 7 answers came from the cache" in printed.err
    assert printed.out.count(": 1 from the cache, ") == 7
    assert len(load_report(ledger.name).results) == 2  # readers of outcomes skip the answers

    with part.open("ab") as file:  # the writer was killed, or the machine lost power
        file.write(b'{"version": 1, "key": "torn')
    (again,) = await batch(["SUBMIT(a=llm_query('the same'))"], language_model=NAME, cache_queries=True)
    assert again.meta.queries.cached == 1
    assert again.meta.queries.cost == 0
    assert chat.stats.requests == requests
    await batch(["SUBMIT(a=llm_query('the same'))"], language_model=NAME)
    assert chat.stats.requests == requests + 1


@pytest.mark.full
async def test_turns_of_a_recursive_query_are_cached(chat: ChatServer, tmp_path: Path):
    chat.script = make_script(("", "SUBMIT(answer=llm_query('deeper'))"))
    first = await rlm("think", NAME, cache_queries=True)
    assert (first.answer, chat.stats.requests) == ("answer to: deeper", 2)
    again = await rlm("think", NAME, cache_queries=True, results_path=tmp_path / "elsewhere")
    assert (again.answer, again.queries.cached, again.queries.calls) == (first.answer, 2, 0)
    assert chat.stats.requests == 2
    await LanguageModel(model=NAME, api_key="sk-x", api_base=chat.url, temperature=0.5).save("warm", overwrite=True)  # type: ignore[misc,arg-type]
    assert (await rlm("think", "rlm-language-model/warm", cache_queries=True)).queries.cached == 0


@pytest.mark.full
def test_an_interpreter_caches_answers_while_it_is_open(chat: ChatServer):
    with LocalInterpreter(language_model=NAME, cache_queries=True, max_llm_calls=1) as interpreter:
        for _ in range(3):
            assert interpreter.execute("SUBMIT(a=llm_query('q'))").a == "answer to: q"
    assert interpreter.execute("SUBMIT(a=llm_query('q'))").meta.queries.cached == 1
    interpreter.shutdown()
    assert chat.stats.requests == 1
