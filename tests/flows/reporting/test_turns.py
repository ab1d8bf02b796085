"""The turns and queries of language models in a run's page, and in the text of `rlm-batch report`."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import Failure, Result, RlmAnswer, batch, rlm
from rlm_batch.flows.reporting.document import render_html, render_markdown
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.report import build_report
from rlm_batch.flows.reporting.turns import MAX_TURN_QUERIES, MORE, NOTE, ShownQueries, TurnsReader
from rlm_batch.sandbox.errors import CodeError
from rlm_batch.sandbox.meta import Meta, QuerySummary
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import RunRecord

from ...browser.chromium import Chromium
from ...infra.scripted_turns import make_script
from ...infra.wrong_answer import ORDERS, QUESTION, script_wrong_answer
from ...standins.openai_chat import ChatServer, Reply
from .test_document import HOSTILE, Parsed

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai")]

NAME = "openai/gpt-4o-mini"
ASK_IN_A_THREAD = """
import threading
thread = threading.Thread(target=llm_query, args=['apart'])
thread.start()
thread.join()
print(llm_query_batched(['refused', 'one'], on_error='return'))
"""
USED = {"calls": 1, "prompt_tokens": 46, "completion_tokens": 1, "cost": 7.5e-6}


def read_run(path: str) -> tuple[ShownQueries, str]:
    """Return the executions that a run's page shows, and the page."""
    reader = open_run_ledger(path)
    page = render_html(build_report(reader.summarize(), reader.records), turns=TurnsReader(reader))
    return TurnsReader(reader).read_page(), page


def write_run(path: Path, outcomes: list[Outcome]) -> str:
    """Write the ledger of a run of `rlm`, and return its path."""
    ledger = Ledger(path)
    ledger.create()
    for outcome in outcomes:
        ledger.write_outcome(f"{outcome.meta.index:064x}", outcome)
    ledger.close()
    RunRecord("rlm", str(path), "id-of-run", total=len(outcomes), what="question").finish()
    return str(path)


def make_record(kind: str = "llm_query", text: str = "text", **more: Any) -> dict[str, Any]:
    """Return the record of a query, as an outcome has it."""
    return {"kind": kind, "depth": 2, "model": text, "prompt": text, "seconds": 0.1, "turn": 1, **USED, **more}


@pytest.mark.parametrize("record", ["full", "summary"])
async def test_a_page_of_a_wrong_answer_shows_the_wrong_sub_answer_below_its_turn(
    chat: ChatServer, record: Any
) -> None:
    script_wrong_answer(chat)
    answer = await rlm(QUESTION, NAME, ORDERS, record=record)
    assert answer.value == 35
    shown, page = read_run(answer.results_path)
    (execution,) = shown.shown
    assert (execution.title, execution.answer) == (f"Question 0: {QUESTION}", "35")
    assert [len(turn.queries.shown) for turn in execution.turns] == [0, 3, 0]
    queries = execution.turns[1].queries.shown
    assert [query.answer for query in queries] == ["2", "3", "30"]
    assert queries[2].figures.startswith("1 call, 46 + 1 tokens, $0.000008, ")
    assert ("15: due May 15, arrived May 17" in queries[2].prompt) == (record == "full")
    assert (NOTE in html.unescape(page)) == (record == "summary")
    text = Parsed(page[page.index("Turn 1") :]).text
    places = [text.index(part) for part in ("Turn 2", "35 of 15 orders", "11: due May 11", "Turn 3", "SUBMIT")]
    assert places == sorted(places)
    assert '<pre title="answer">30</pre>' in page


async def test_the_report_in_prefect_names_the_page_with_the_turns(chat: ChatServer) -> None:
    script_wrong_answer(chat)
    answer = await rlm(QUESTION, NAME, ORDERS)
    reader = open_run_ledger(answer.results_path)
    markdown = render_markdown(build_report(reader.summarize(), reader.records))
    name = str(reader.records[-1].name).replace("-", r"\-")
    assert rf"rlm\-batch report {name} writes a page with each turn, its queries and their answers" in markdown


async def test_queries_of_recursive_models_are_below_the_turn_that_asked_them(chat: ChatServer) -> None:
    turns = (
        ("Which half?", "print(llm_query('inner'))\nSUBMIT('the first')"),
        ("Turns left: 19.", "SUBMIT(rlm_query_batched(['Which half?', 'Which half? The other?'], context='x'))"),
        ("", ASK_IN_A_THREAD),
    )
    chat.script = make_script(*turns)
    chat.rule("refused", Reply("refused", status=400))
    answer = await rlm("q", NAME, record="full")
    (execution,) = read_run(answer.results_path)[0].shown
    first, second = execution.turns
    assert [query.prompt for query in first.queries.shown] == ["apart", "refused", "one"]
    assert "refused" in first.queries.shown[1].error
    assert "`context` is a str of 1 characters" in second.queries.shown[0].prompt
    for child in second.queries.shown:
        assert child.answer == "the first"
        assert [query.prompt for query in child.turns[0].queries.shown] == ["inner"]


async def test_queries_that_a_resumed_run_answers_from_the_ledger_are_shown(chat: ChatServer, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    options: dict[str, Any] = {"results_path": path, "record": "full", "on_failure": "return"}
    turns = (("Turns left: 19.", "SUBMIT(llm_query('last'))"), ("", "print(llm_query_batched(['one', 'two']))"))
    chat.script = make_script(*turns)
    interrupted = await rlm("q", NAME, max_llm_calls=4, **options)
    assert isinstance(interrupted, RlmAnswer)
    assert not interrupted.answered
    answer = await rlm("q", NAME, max_llm_calls=10, **options)
    assert answer.queries.cached == 3
    (root,) = read_run(path)[0].shown
    asked = [(query.prompt, query.answer) for turn in root.turns for query in turn.queries.shown]
    assert asked == [(prompt, f"answer to: {prompt}") for prompt in ("one", "two", "last")]
    assert root.turns[0].queries.shown[0].figures.startswith("1 from the cache")


async def test_a_turn_of_many_queries_is_cut_with_a_count_and_keeps_those_that_failed(chat: ChatServer) -> None:
    chat.rule("number 1499 ", Reply("refused", status=400))
    code = "x = llm_query_batched([f'number {i} ' for i in range(1500)], on_error='return')\nSUBMIT(len(x))"
    options: dict[str, Any] = {"max_llm_calls": 2000, "batch_concurrency": 50, "timeout": 500}
    for record in ("full", "summary"):
        chat.script = make_script(("", code))
        answer = await rlm("q", NAME, record=record, **options)
        shown, page = read_run(answer.results_path)
        queries = shown.shown[0].turns[0].queries
        assert (len(queries.shown), queries.omitted_count) == (MAX_TURN_QUERIES, 1500 - MAX_TURN_QUERIES)
        assert f"{1500 - MAX_TURN_QUERIES:,} {MORE}" in page
        if record == "full":  # A summary has only the first thousand.
            assert (queries.shown[-1].number, queries.shown[-1].prompt) == (1500, "number 1499 ")
            assert "refused" in queries.shown[-1].error


async def test_queries_of_plain_code_are_shown_with_the_prompt_of_each(chat: ChatServer) -> None:
    results = await batch("SUBMIT(a=llm_query('one'), x=x)", [{"x": 1}, {"x": 2}], language_model=NAME)
    shown, page = read_run(results.results_path)
    assert [execution.title for execution in shown.shown] == ["Execution 0 with x=1", "Execution 1 with x=2"]
    assert page.count("answer to: one") >= 2


def test_hostile_texts_of_models_and_code_become_no_markup(tmp_path: Path) -> None:
    for number, text in enumerate((*HOSTILE, "</pre></details><script>1</script>", "a\x1b[31m\u202eb")):
        turn = dict.fromkeys(("reasoning", "code", "output", "thoughts", "summary"), text)
        below = [make_record(text, text, answer=text), make_record(text, text, error=text, turn=7)]
        root = make_record(text, text, trajectory=[turn], queries=below, depth=1)
        meta = Meta(index=0, variables={"query": text}, queries=QuerySummary(asked=3, tree=(root,)))
        failure = Failure(CodeError(text), Meta(index=1, variables={"query": text}, queries=meta.queries))
        path = write_run(tmp_path / str(number), [Result({"answer": text}, meta), failure])
        executions, page = read_run(path)
        assert not {"\x1b", "\u202e"} & {*page}
        shown = page[page.index("<h2>Turns and queries</h2>") :]
        parsed = Parsed(shown)
        assert {tag for tag, _ in parsed.tags} <= {
            *("h2", "p", "pre", "details", "summary", "small", "b", "span", "div"),
            *("table", "thead", "tbody", "tr", "th", "td", "h3"),
        }
        assert {name for _, attributes in parsed.tags for name in attributes} <= {"class", "open", "title"}
        if "\x1b" not in text:
            assert parsed.text.count(text) >= 10
        assert len(executions.shown) == 2


def test_a_page_has_limits_and_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 3_999 + "y"
    turn = {"reasoning": long, "code": "1", "output": "", "usage": USED, "seconds": 1.0}
    root = make_record("rlm_query", "q", trajectory=[turn], queries=[make_record(prompt=long)] * 100, depth=1)
    meta = Meta(index=0, variables={"query": "q"}, queries=QuerySummary(asked=1, tree=(root,)))
    outcomes: list[Outcome] = [
        Result({"answer": "a"}, Meta(number, {"query": "q"}, queries=meta.queries)) for number in range(5)
    ]
    path = write_run(tmp_path / "run", outcomes)
    monkeypatch.setattr("rlm_batch.flows.reporting.turns.MAX_SHOWN_BYTES", 1_000_000)
    shown, page = read_run(path)
    assert (len(shown.shown), shown.omitted_count) == (3, 2)
    for execution, count in zip(shown.shown, (100, 100, 45), strict=True):
        queries = execution.turns[0].queries
        assert len(queries.shown) + queries.omitted_count == 100
        assert len(queries.shown) == pytest.approx(count, abs=3)
    assert "2 more are in the ledger" in page


def test_a_long_question_is_cut_in_its_title_and_a_long_error_is_whole(tmp_path: Path) -> None:
    question = "q" * 100_000
    root = make_record("rlm_query", error="cut", trajectory=[{"code": "1"}], prompt=question[:200])
    meta = Meta(index=0, variables={"query": question}, queries=QuerySummary(asked=1, tree=(root,)))
    shown, page = read_run(write_run(tmp_path / "run", [Failure(CodeError("x" * 1_000 + "y"), meta)]))
    turns = page[page.index("<h2>Turns and queries</h2>") :]
    assert shown.shown[0].title == f"Question 0: {'q' * 200}"
    assert "q" * 201 not in turns
    assert "x" * 1_000 + "y" in turns
    assert shown.shown[0].turns[0].figures == "no usage kept"  # Earlier versions kept none.


@pytest.mark.requires("chromium")
async def test_a_browsers_search_opens_the_question_with_the_text(chat: ChatServer, tmp_path: Path) -> None:
    script_wrong_answer(chat)
    answers = await rlm(queries=[QUESTION, "Another?"], language_model=NAME, context=ORDERS)
    (file := tmp_path / "report.html").write_text(read_run(answers.results_path)[1])
    with Chromium() as browser:
        browser.goto(file.as_uri())
        browser.see("Question 1: Another?")
        assert browser.js("[...document.querySelectorAll('.question')].map(e => e.open)") == [False, False]
        assert "Turn 2" not in browser.text()
        # A browser opens what contains the text of a fragment, as its search does.
        browser.goto(f"{file.as_uri()}#:~:text=13%3A%20due%20May%2013")
        browser.see("Turn 2", "13: due May 13, arrived May 15")
        assert browser.js("[...document.querySelectorAll('.question')].map(e => e.open)") == [True, False]
        assert not [address for address in browser.asked if address.startswith("http")]
        assert re.findall("refused", " ".join(browser.errors)) == []
