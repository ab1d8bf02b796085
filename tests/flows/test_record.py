"""`record="full"`: whole requests in the ledger, and their exports."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import LanguageModel, LocalSandbox, RlmAnswer, batch, rlm
from rlm_batch.flows.reporting.conversations import write_conversations
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.sandbox.errors import ConfigurationError

from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer, Reply

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"
KEY = "sk-model-4711-abcdefghijkl"
TOKEN = "tok-of-the-service-0815"
PROMPT = "Which number? " + "x" * 1000
ANSWER = "It is 42. " * 100
TURNS = make_script(
    ("Turns left: 18.", "SUBMIT('forty-two')"),
    ("part of it", "SUBMIT('a part')"),
    ("Turns left: 19.", "rlm_query('What is part of it?', context='part')"),
    ("", "print('y' * 50_000)\nprint(llm_query('Which number? ' + 'x' * 1000))"),
)


@pytest.fixture(autouse=True)
def answers(openai: ChatServer, chat: ChatServer) -> None:
    """Let the model of the environment answer."""
    chat.rule("Which number", ANSWER)
    chat.script = TURNS


def read_lines(ledger: str, pattern: str) -> Iterator[dict[str, Any]]:
    for part in sorted(Path(ledger).glob(pattern)):
        yield from map(json.loads, part.read_text("utf-8").splitlines())


def export(answer: RlmAnswer, file: Path) -> list[dict[str, Any]]:
    write_conversations(open_run_ledger(answer.results_path), file)
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


async def test_conversations_have_whole_prompts_answers_and_the_outcome(chat: ChatServer, tmp_path: Path) -> None:
    answer = await rlm("What is the number?", NAME, "text " * 2_000, record="full")
    whole, flat, deep = export(answer, tmp_path / "messages.jsonl")
    sent = [request.body["messages"] for request in chat.requests]
    assert whole["messages"][:-1] == sent[-1]
    assert whole["messages"][-1] == {
        "role": "assistant",
        "content": "Let me see.\n\n```python\nSUBMIT('forty-two')\n```",
    }
    assert [message["role"] for message in whole["messages"]] == ["system", *["user", "assistant"] * 3]
    assert flat["messages"] == [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ANSWER}]
    assert deep["messages"][1]["content"].startswith("What is part of it?")
    assert [(one["kind"], one["depth"]) for one in (whole, flat, deep)] == [
        ("rlm_query", 1), ("llm_query", 2), ("rlm_query", 2)
    ]  # fmt: skip
    assert flat["parent"] == deep["parent"] == whole["query"]
    assert (whole["execution"], whole["status"], whole["outputs"]) == (0, "succeeded", {"answer": "forty-two"})
    assert whole["variables"] == {"query": "What is the number?"}  # The context is too long.
    assert sum(one["usage"]["calls"] for one in (whole, flat, deep)) == answer.queries.calls == 5
    lines = [line for line in read_lines(answer.results_path, "requests-*.jsonl") if line["status"] == "request"]
    # Each message is in the ledger once: a request has only the new ones.
    assert [len(line["messages"]) for line in lines if line["depth"] == 1] == [2, 1, 1]


async def test_credentials_are_in_no_request_and_no_export(chat: ChatServer, tmp_path: Path) -> None:
    await LanguageModel(model=NAME, api_key=KEY, api_base=chat.url).save("keyed", overwrite=True)  # type: ignore[misc]
    await LocalSandbox(environment={"SERVICE_TOKEN": TOKEN}).save("secret", overwrite=True)  # type: ignore[misc]
    chat.rule("token", f"The key is {KEY}, I think.")
    chat.script = make_script(
        ("Turns left: 19.", "SUBMIT('done')"),
        ("", "import os\nx = llm_query('token ' + os.environ['SERVICE_TOKEN'])"),
    )
    answer = await rlm("q", "rlm-language-model/keyed", provider="rlm-local-sandbox/secret", record="full")
    assert TOKEN in chat.requests[1].text  # The model was sent what the code asked.
    conversations = export(answer, tmp_path / "messages.jsonl")
    assert conversations[1]["messages"] == [
        {"role": "user", "content": "token [...]"},
        {"role": "assistant", "content": "The key is [...], I think."},
    ]
    (part,) = Path(answer.results_path).glob("requests-*.jsonl")
    for text in (part.read_text("utf-8"), (tmp_path / "messages.jsonl").read_text("utf-8")):
        assert KEY not in text
        assert TOKEN not in text


async def test_thoughts_are_kept_apart_from_the_answers(chat: ChatServer, tmp_path: Path) -> None:
    turn = "```python\nSUBMIT(llm_query('flat') + str(llm_query('number', response_format=int)))\n```"
    replies = {"flat": Reply("<think>a</think>\n\nyes", reasoning="Apart."), "number": Reply("</think>42")}
    chat.script = lambda request: replies.get(request.messages[-1], f"<thinking>\nmine\n</thinking>\n{turn}")
    answer = await rlm("q", NAME, record="full")
    assert (answer.answer, answer.trajectory[0]["thoughts"]) == ("yes42", "mine")
    messages = [one["messages"][-1] for one in export(answer, tmp_path / "messages.jsonl")]
    assert messages == [
        {"role": "assistant", "content": turn, "reasoning_content": "mine"},
        {"role": "assistant", "content": "yes", "reasoning_content": "Apart.\n\na"},
        {"role": "assistant", "content": "42"},
    ]
    chat.script = lambda _request: "<think>no end"
    (failure,) = await batch(["llm_query('q')"], language_model=NAME, record="full", on_failure="return")
    assert "gave only thoughts and no answer" in str(failure)


async def test_log_probabilities_are_kept_unless_they_spell_a_credential(chat: ChatServer, tmp_path: Path) -> None:
    model = LanguageModel(model=NAME, api_key=KEY, api_base=chat.url, options={"logprobs": True})  # type: ignore[arg-type]
    await model.save("probable", overwrite=True)  # type: ignore[misc]
    chat.script = lambda request: (
        Reply(f"{KEY} it is", logprobs=True) if "the key" in request.text else Reply("two words", logprobs=True)
    )
    (result,) = await batch(
        ["SUBMIT(a=llm_query_batched(['a', 'the key']))"], language_model="rlm-language-model/probable", record="full"
    )
    assert chat.requests[0].body["logprobs"] is True
    assert result.a == ["two words", "[...] it is"]
    (ledger,) = (tmp_path / "results").glob("*-*")
    write_conversations(open_run_ledger(str(ledger)), tmp_path / "messages.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "messages.jsonl").read_text("utf-8").splitlines()]
    first, second = sorted(lines, key=lambda line: line["messages"][0]["content"])  # Either may be answered first.
    assert [(token["token"], token["logprob"]) for token in first["logprobs"][0]] == [("two", -0.5), ("words", -0.5)]
    assert first["options"] == {"logprobs": True}
    assert "logprobs" not in second


async def test_queries_have_their_answers_and_turns_and_the_usage_of_each_model_is_counted(chat: ChatServer) -> None:
    chat.rule("long", "y" * 3_000)
    turns = (
        ("Which half?", "SUBMIT('the first')"),
        ("Turns left: 19.", "SUBMIT(rlm_query('Which half?', context=llm_query('long', model='openai/gpt-4o')))"),
        ("", "print(llm_query_batched(['one', 'two']))"),
    )
    chat.script = make_script(*turns)
    answers = await rlm(queries=["q", "q"], language_model=NAME, models=["openai/gpt-4o"])
    for answer in answers:
        (root,) = answer.queries.tree
        asked = [(query["turn"], query["prompt"], query["answer"]) for query in root["queries"]]
        cut = f"{'y' * 1_000}\n[... 1,000 characters left out ...]\n{'y' * 1_000}"
        assert sorted(asked[:2]) == [(1, "one", "answer to: one"), (1, "two", "answer to: two")]
        assert asked[2:] == [(2, "long", cut), (2, "Which half?", "the first")]
        assert [turn.get("queries") for turn in answer.trajectory] == [2, 2]
        calls = {name: usage["calls"] for name, usage in answer.queries.usage_by_model.items()}
        assert calls == {NAME: 5, "openai/gpt-4o": 1}
    by_model = answers.queries.usage_by_model
    assert by_model["openai/gpt-4o"] == {"calls": 2, "prompt_tokens": 2, "completion_tokens": 2, "cost": 25e-6}
    assert sum(usage["cost"] for usage in by_model.values()) == pytest.approx(answers.queries.cost)


async def test_records_of_queries_have_no_secrets_of_the_codes_environment(chat: ChatServer) -> None:
    await LocalSandbox(environment={"SERVICE_TOKEN": TOKEN}).save("secret", overwrite=True)  # type: ignore[misc]
    chat.script = lambda request: f"You sent {request.messages[-1]}."
    code = "import os\nSUBMIT(a=llm_query(os.environ['SERVICE_TOKEN']))"
    (result,) = await batch([code], language_model=NAME, provider="rlm-local-sandbox/secret")
    assert result.a == f"You sent {TOKEN}."
    (query,) = result.meta.queries.tree
    assert (query["prompt"], query["answer"]) == ("[...]", "You sent [...].")


async def test_by_default_only_summaries_are_kept(tmp_path: Path) -> None:
    answer = await rlm("What is the number?", NAME)
    assert not list(Path(answer.results_path).glob("requests-*"))
    assert "id" not in answer.queries.tree[0]
    with pytest.raises(ConfigurationError, match="only runs with record='full'"):
        export(answer, tmp_path / "messages.jsonl")


async def test_a_resumed_run_keeps_earlier_conversations_and_exports_each_once(
    chat: ChatServer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"record": "full", "results_path": str(tmp_path / "run"), "language_model": NAME}
    chat.script = None
    chat.rule("", "fine")
    await batch(["SUBMIT(a=llm_query('one'))"], **options)
    results = await batch(["SUBMIT(a=llm_query('one'))", "SUBMIT(b=llm_query('two'))"], **options)
    assert len(results) == chat.stats.requests == 2
    write_conversations(open_run_ledger(str(tmp_path / "run")), tmp_path / "messages.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "messages.jsonl").read_text("utf-8").splitlines()]
    assert [(line["execution"], line["messages"][0]["content"], line["outputs"]) for line in lines] == [
        (0, "one", {"a": "fine"}), (1, "two", {"b": "fine"})
    ]  # fmt: skip
