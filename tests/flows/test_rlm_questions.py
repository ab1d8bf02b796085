"""The rlm flow with many questions, and with contexts, types of answers, tools and models of all forms."""

import base64
import csv
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlm_batch import (
    CodeError,
    ConfigurationError,
    LanguageModel,
    RlmAnswers,
    load_report,
    open_rlm,
    rlm,
)
from rlm_batch.flows.plans.rlm import RlmParameters
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.scripted_turns import format_turn, make_script

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai")]

NAME = "openai/gpt-4o-mini"


@pytest.fixture
def uploads(monkeypatch):
    """Return a counter of the files that sandboxes have got, by the sandbox and the path."""
    counts = Counter[tuple[int, str]]()
    upload = Interpreter.upload

    async def count(self: Interpreter, path: str, data: bytes) -> None:
        counts[id(self), path] += 1
        await upload(self, path, data)

    monkeypatch.setattr(Interpreter, "upload", count)
    return counts


async def test_many_questions_return_answers_in_order_with_totals_and_a_table(chat, tmp_path):
    pandas = pytest.importorskip("pandas")
    chat.script = make_script(
        ("What fails?", "1 / 0\n" * 2),
        ("How long?", "SUBMIT(len(context))"),
        ("", "SUBMIT(llm_query(context[:4]))"),
    )
    chat.rule("text", "flat answer")
    queries = ["How long?", "What is it?", "What fails?"]
    answers = await rlm(
        queries=queries, language_model=NAME, context="text", max_errors=1, on_failure="return", max_workers=2
    )
    assert isinstance(answers, RlmAnswers)
    assert [answer.value for answer in answers] == [4, "flat answer", None]
    assert [answer.query for answer in answers] == queries
    assert (answers[0].answer, answers[-1].answered, len(answers[:2])) == ("4", False, 2)
    assert [type(failure.error) for failure in answers.failures] == [CodeError]
    assert answers.queries.calls == sum(answer.queries.calls for answer in answers) == 4 == chat.stats.requests
    assert answers.queries.prompt_tokens == chat.stats.prompt_tokens
    assert (answers.queries.cost or 0) > 0
    header, first, *_, last = answers.rows()
    assert header == ["", "query", "context", "answer", "calls", "cost", ""]
    assert first[:5] == ["0", "How long?", "text", "4", "1"]
    assert "failed in 1 turns in a row" in last[-1]
    assert "How long?" in str(answers)
    frame = answers.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["answer"])[:2] == ["4", "flat answer"]
    assert list(frame["model_calls"]) == [1, 2, 1]
    report = load_report(answers.results_path)
    assert [outcome.meta.variables["query"] for outcome in report.results] == queries

    again = await rlm(
        queries=queries, language_model=NAME, context="text", max_errors=1, on_failure="return",
        results_path=answers.results_path,
    )  # fmt: skip
    assert [answer.value for answer in again] == [4, "flat answer", None]
    assert chat.stats.requests == 5  # Only the failed question was asked again.


async def test_fifty_questions_about_a_long_context_upload_it_once_per_sandbox(chat, tmp_path, uploads):
    """The ledger does not contain the context either."""
    chat.script = make_script(("", "SUBMIT(len(context))"))
    path = tmp_path / "long.txt"
    path.write_text("x" * 5_000_000)
    queries = [f"question {number}" for number in range(50)]
    answers = await rlm(queries=queries, language_model=NAME, context_file=path, max_workers=2)
    assert [answer.value for answer in answers] == [5_000_000] * 50
    assert 1 <= len(uploads) <= 2
    assert set(uploads.values()) == {1}
    assert sum(part.stat().st_size for part in Path(answers.results_path).glob("part-*")) < 500_000
    uploads.clear()
    answers = await rlm(queries=queries[:3], language_model=NAME, context="y" * 100_000, reuse_sandboxes=False)
    assert [answer.value for answer in answers] == [100_000] * 3
    assert list(uploads.values()) == [1, 1, 1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"queries": [f"{number} {'q ' * 4000}" for number in range(75)]},
        {"queries": ["short", "q " * 300_000]},
        {"query": "q " * 300_000, "instructions": "i " * 300_000},
        # Each of these is short enough for Prefect, and together they are too long.
        {"query": "q" * 200_000, "instructions": "i" * 200_000, "system_prompt": "Write Python. " * 15_000},
    ],
    ids=["many", "a long one", "instructions", "together"],
)
async def test_questions_and_instructions_may_be_longer_than_prefects_parameters(chat, parameters):
    chat.script = lambda _: format_turn("SUBMIT(1)")
    result = await rlm(language_model=NAME, **parameters)
    answers = result if isinstance(result, RlmAnswers) else [result]
    queries = parameters.get("queries") or [parameters["query"]]
    assert [(answer.value, answer.query) for answer in answers] == [(1, query) for query in queries]
    instructions = parameters.get("instructions", "")
    assert all(instructions in request.messages[0] for request in chat.requests)


async def test_an_image_as_context_is_a_data_url_that_a_query_takes(chat, tmp_path):
    content = b"\x89PNG" + bytes(range(256))
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    (tmp_path / "photo").write_bytes(content)
    (tmp_path / "notes.txt").write_text("a note")
    chat.script = make_script(
        ("a dict of 2 keys", "SUBMIT(llm_query(context['notes.txt'], images=[context['photo']]))"),
        ("an image, as a data URL", "SUBMIT(llm_query('What is it?', images=[context]))"),
    )
    chat.rule("", "a cat")
    answer = await rlm("q", NAME, context_file=str(tmp_path / "photo"))
    both = await rlm("q", NAME, context=[tmp_path / "photo", tmp_path / "notes.txt"])
    async with open_rlm(NAME, context=tmp_path / "photo") as session:
        told = (await session.ask("q")).value
    assert [answer.value, both.value, told] == ["a cat"] * 3
    sent = [request.body["messages"][-1]["content"] for request in chat.requests[1::2]]
    assert [parts[1]["image_url"]["url"] for parts in sent] == [url] * 3
    assert [parts[0]["text"] for parts in sent] == ["What is it?", "a note", "What is it?"]


@pytest.mark.parametrize("form", ["list", "jsonl", "csv"])
async def test_rows_have_a_question_and_a_context_of_their_own(chat, tmp_path, form):
    chat.script = make_script(("", "SUBMIT(repr(context))"))
    (tmp_path / "file.txt").write_text("from a file")
    rows = [
        {"query": "1", "context": "own text", "context_file": "", "id": "a"},
        {"query": "2", "context": "", "context_file": str(tmp_path / "file.txt"), "id": "b"},
        {"query": "3", "context": "", "context_file": "", "id": "c"},
    ]
    inputs: Any = rows
    if form == "jsonl":
        inputs = tmp_path / "rows.jsonl"
        inputs.write_text("\n".join(map(json.dumps, rows)))
    elif form == "csv":
        inputs = tmp_path / "rows.csv"
        with inputs.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    own = await rlm(inputs=rows[:2], language_model=NAME, context="shared", context_file="unused")
    assert [answer.answer for answer in own] == ["'own text'", "'from a file'"]
    answers = await rlm(inputs=inputs, language_model=NAME, context="shared")
    assert [answer.answer for answer in answers] == ["'own text'", "'from a file'", "'shared'"]
    assert [answer.query for answer in answers] == ["1", "2", "3"]
    assert [answer.result.meta.variables["id"] for answer in answers] == ["a", "b", "c"]


async def test_a_context_may_be_missing_json_a_file_or_several_files(chat, tmp_path):
    code = """
    if 'context' not in globals():
        SUBMIT(None)
    SUBMIT([type(context).__name__, len(context), sorted(context)[0]])
    """
    chat.script = make_script(("", code))
    long = tmp_path / "long.txt"
    long.write_text("é" * 70_000 + "\r\nZ", newline="")
    (tmp_path / "one").mkdir()
    files = [tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "one" / "a.txt"]
    for file in files:
        file.write_text(f"content of {file.name}")
    cases: list[tuple[dict[str, Any], list[Any] | None]] = [
        ({}, None),
        ({"context_file": str(long)}, ["str", 70_003, "\n"]),
        ({"context": ["b", "a"]}, ["list", 2, "a"]),
        ({"context": {"b": 1, "a": [2]}}, ["dict", 2, "a"]),
        ({"context": [f"{number:06}" for number in range(20_000)]}, ["list", 20_000, "000000"]),
        ({"context": files[0]}, ["str", 16, " "]),
        ({"context": files[:2]}, ["dict", 2, "a.txt"]),
        ({"context_file": [str(file) for file in files[:1]]}, ["dict", 1, "b.txt"]),
        ({"context_file": files}, ["dict", 3, "one/a.txt"]),
    ]
    answers = [await rlm("q", NAME, **parameters) for parameters, _ in cases]
    assert [answer.value for answer in answers] == [expected for _, expected in cases]


class Order(BaseModel):
    number: int
    late: bool


@dataclass
class Point:
    x: float
    y: float


async def test_answers_have_the_type_that_the_caller_asks_for(chat):
    cases: list[tuple[Any, str, Any]] = [
        (int, "'42'", 42),
        (list[str], "['a', 'b']", ["a", "b"]),
        (Order, "{'number': '7', 'late': True}", Order(number=7, late=True)),
        (list[Point], "[{'x': 1, 'y': 2}]", [Point(1.0, 2.0)]),
        ({"type": "object", "required": ["n"]}, "{'n': 1}", {"n": 1}),
    ]
    for output_type, submitted, value in cases:
        chat.script = make_script(("", f"SUBMIT({submitted})"))
        for _ in range(2):
            answer = await rlm("q", NAME, output_type=output_type, cache_results=True)
            assert answer.value == value
            assert type(answer.value) is type(value)
    assert chat.stats.requests == len(cases)
    chat.script = make_script(("", "SUBMIT(len(context))"))
    answers = await rlm(queries=["a", "b"], language_model=NAME, context="text", output_type=int)
    assert [answer.value for answer in answers] == [4, 4]
    if pytest.importorskip("pandas"):
        assert list(answers.to_dataframe()["value"]) == [4, 4]


async def test_the_models_code_finds_tools_and_prepared_names(chat):
    chat.script = make_script(("", "SUBMIT(population('Ghent') + double(1))"))

    def population(city: str, key: str = "sk-secret") -> int:
        """How many people live there."""
        return {"Ghent": 265_000}[city]

    answer = await rlm("q", NAME, tools={"population": population}, prepare="def double(x): return 2 * x")
    assert answer.value == 265_002
    assert "population(city: str, key: str = ...) -> int`: How many people live there." in chat.requests[0].text
    assert answer.result.meta.tool_calls == {"population": 1}


async def test_models_may_be_objects_saved_blocks_and_names(chat, monkeypatch):
    chat.script = make_script(("", "SUBMIT(llm_query('flat'))"))
    chat.rule("flat", "x")
    monkeypatch.delenv("OPENAI_API_BASE")
    monkeypatch.delenv("OPENAI_API_KEY")
    block = LanguageModel(model=NAME, api_base=chat.url, api_key="sk-secret")  # type: ignore[arg-type]
    saved = LanguageModel(model="openai/other", api_base=chat.url, api_key="sk-secret", temperature=0.5)  # type: ignore[arg-type]
    await saved.save("other-model", overwrite=True)  # type: ignore[misc]
    for sub_model in (None, "openai/small", saved, "rlm-language-model/other-model"):
        assert (await rlm("q", block, sub_model=sub_model)).answer == "x"
    models = [request.model for request in chat.requests]
    assert models == ["gpt-4o-mini"] * 3 + ["small", "gpt-4o-mini", "other", "gpt-4o-mini", "other"]
    assert chat.requests[-1].body["temperature"] == 0.5
    assert {request.headers["authorization"] for request in chat.requests} == {"Bearer sk-secret"}


async def test_questions_of_one_sandbox_do_not_see_each_others_names(chat):
    chat.script = make_script(
        ("first", "secret = 1\nSUBMIT(context)"), ("second", "SUBMIT([context, 'secret' in globals()])")
    )
    answers = await rlm(queries=["first", "second"], language_model=NAME, context="text", max_workers=1)
    assert [answer.value for answer in answers] == ["text", ["text", False]]


async def test_a_context_that_the_code_changed_is_not_used_again(chat, tmp_path):
    chat.script = make_script(
        ("first", "import glob\nopen(glob.glob('.rlm-contexts/*')[0], 'w').write('changed')\nSUBMIT(1)"),
        ("second", "SUBMIT(len(context))"),
    )
    path = tmp_path / "text.txt"
    path.write_text("text")
    answers = await rlm(
        queries=["first", "second"], language_model=NAME, context_file=path, max_workers=1, on_failure="return"
    )
    assert answers[0].value == 1
    assert "set reuse_sandboxes to False" in str(answers[1].error)


async def test_wrong_questions_are_refused_with_one_sentence(chat, results):
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "pass one of `query`, `queries` or `inputs`"),
        ({"query": "q", "queries": ["q"]}, "pass one of `query`, `queries` or `inputs`"),
        ({"queries": []}, "`queries` is empty"),
        ({"queries": ["a", " "]}, "question 2 is not a text"),
        ({"queries": "What is this?"}, "the file .*What is this.* cannot be read"),
        ({"inputs": [{"query": "a"}, {"context": "b"}]}, "question 2 is not a text"),
        ({"inputs": [{"query": "a", "context_file": 3}]}, "question 1 has context_file 3: give a path"),
        ({"inputs": [{"query": "a", "context_file": "/nosuch"}]}, "/nosuch cannot be read"),
        ({"inputs": [{"query": "a", "context": "b", "context_file": "c"}]}, "given twice"),
        ({"query": "q", "context": "a", "context_file": "b"}, "given twice"),
        ({"query": "q", "output_type": "no such type"}, "output_type"),
        ({"query": "q", "language_model": ""}, "`language_model` is missing: name a model"),
        ({"query": "q", "types": "json"}, "`types` needs `inputs`"),
        ({"query": "q", "max_depth": 0}, "`max_depth` is 0"),
    ]
    for parameters, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            await rlm(**{"language_model": NAME, **parameters})
    assert chat.stats.requests == 0
    assert not list(results.glob("*"))


def test_the_parameters_for_prefect_are_json(tmp_path, monkeypatch):
    """A class becomes its JSON schema, and a model of this process a name without its key."""
    parameters = RlmParameters.parse(
        {
            "queries": ("a", "b"),
            "language_model": LanguageModel(model=NAME, api_key="sk-secret"),  # type: ignore[arg-type]
            "output_type": Order,
            "context": [tmp_path / "a.txt", tmp_path / "b.txt"],
        }
    )
    text = json.dumps(parameters.list_values())
    assert "sk-secret" not in text
    assert json.loads(text)["output_type"]["title"] == "Order"
    assert json.loads(text)["context_file"] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert RlmParameters.parse(json.loads(text)).answer_type == parameters.answer_type
