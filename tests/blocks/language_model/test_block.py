"""The language model block, with the real client over real connections."""

import asyncio
import base64
import json
import logging
import socket
from dataclasses import replace
from textwrap import dedent
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from rlm_batch import ConfigurationError, LanguageModel, LocalInterpreter, QueryError
from rlm_batch.blocks.language_model import litellm_client
from rlm_batch.blocks.language_model.credentials import find_environment_credentials
from rlm_batch.blocks.language_model.model_access import open_model_access
from rlm_batch.blocks.local.provider import LocalProvider
from rlm_batch.sandbox.queries.budget import Usage
from rlm_batch.sandbox.queries.session import EmptyAnswerError

from ...standins.openai_chat import Reply

pytestmark = pytest.mark.anyio

KEY = "sk-of-this-room-83bc"
NAME = "openai/gpt-4o-mini"


def model(chat, **settings: Any):
    settings = {"model": NAME, "api_key": KEY, "api_base": chat.url, **settings}
    return LanguageModel(**settings)


async def ask(block, prompt="a question"):
    return await block.make_flat_model().ask([{"role": "user", "content": prompt}])


async def test_an_answer_has_its_text_tokens_and_cost(chat):
    chat.rule("question", "an answer of five words")
    answer = await ask(model(chat))
    assert answer.text == "an answer of five words"
    assert replace(answer.usage, cost=None) == Usage(1, 2, 5, None)
    assert answer.usage.cost == pytest.approx(2 * 1.5e-7 + 5 * 6e-7)


async def test_settings_reach_the_server_and_flat_queries_go_to_the_sub_model(chat):
    block = model(
        chat, sub_model="openai/gpt-4o", temperature=0.25, top_p=0.5, max_tokens=7, options={"frequency_penalty": 0.125}
    )
    await ask(block)
    await block.make_root_model().ask([{"role": "user", "content": "x"}])
    flat, root = chat.requests
    assert (flat.model, root.model) == ("gpt-4o", "gpt-4o-mini")
    sent = {name: flat.body.get(name) for name in ("temperature", "top_p", "max_tokens", "frequency_penalty")}
    assert sent == {"temperature": 0.25, "top_p": 0.5, "max_tokens": 7, "frequency_penalty": 0.125}
    assert flat.headers["authorization"] == f"Bearer {KEY}"


async def test_a_transient_fault_is_retried_and_counts_as_one_call(chat):
    faults = [
        Reply(status=500),
        Reply(status=429, retry_after=1.2),
        Reply(drop=True),
        Reply(body=b"<html>"),
    ]
    for number, fault in enumerate(faults):
        chat.rule(f"question {number}", fault, "well")
    answers = await asyncio.gather(*(ask(model(chat), f"question {number}") for number in range(len(faults))))
    assert [(answer.text, answer.usage.calls) for answer in answers] == [("well", 1)] * len(faults)
    assert chat.stats.requests == 2 * len(faults)
    first, second = (request.at for request in chat.requests if "question 1" in request.messages[-1])
    assert second - first >= 1.2  # as long as the server asks


async def test_a_busy_server_is_waited_for_beyond_the_retries(chat, monkeypatch):
    monkeypatch.setattr(litellm_client, "FIRST_BACKOFF_SECONDS", 0.0)
    chat.rule("question", *[Reply(status=429)] * 6, "well")
    assert (await ask(model(chat, retries=1))).text == "well"
    chat.rule("broke", Reply("insufficient_quota", status=429))
    with pytest.raises(QueryError, match="insufficient_quota"):
        await ask(model(chat, retries=1), "broke")


async def test_a_permanent_fault_is_an_error_after_the_retries(chat):
    chat.rule("on fire", Reply("the server is on fire", status=500))
    chat.rule("late", Reply("late", delay=1000))
    unused = socket.socket()
    unused.bind(("127.0.0.1", 0))  # no server listens on this port
    nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    settings: dict[str, Any]
    for prompt, settings, message in (
        ("on fire", {"retries": 1}, f"{NAME} did not answer in 2 tries: .*the server is on fire"),
        ("late", {"retries": 1, "request_timeout": 0.5}, f"{NAME} did not answer in 2 tries: "),
        ("nobody", {"retries": 0, "api_base": nowhere}, r"did not answer: .*[Cc]onnect"),
    ):
        with pytest.raises(QueryError, match=message):
            await ask(model(chat, **settings), prompt)
    unused.close()


async def test_an_answer_that_trickles_in_times_out(chat, monkeypatch):
    await ask(model(chat))  # the first request of a process imports packages, which takes time
    # Now the client waits 1 s for the whole answer, and 60 s between bytes.
    monkeypatch.setattr(litellm_client, "LATE_SECONDS", -59.0)
    chat.rule("for ever", Reply(trickle=True))
    with pytest.raises(QueryError, match="its answer was not complete after 60 s"):
        await ask(model(chat, request_timeout=60, retries=0), "for ever")


@pytest.mark.parametrize("usage", [(-500, -7), (5, -70_000)])
async def test_a_negative_token_count_of_the_server_raises_no_limit(chat, usage):
    chat.rule("question", Reply("well", usage=usage))
    used = (await ask(model(chat))).usage
    assert used.prompt_tokens > 0
    assert used.completion_tokens >= 0
    assert used.cost >= 0


async def test_a_refusal_is_an_immediate_error_that_hides_the_key(chat, monkeypatch):
    statuses = (400, 401, 403, 404, 422)
    monkeypatch.setenv("SOME_API_KEY", "sk-in-the-environment")
    for status in statuses:
        chat.rule(f"question {status}", Reply(f"refused for {KEY} and sk-in-the-environment", status=status))
        with pytest.raises(QueryError, match="refused for") as raised:
            await ask(model(chat), f"question {status}")
        assert KEY not in str(raised.value)
        assert "sk-in-the-environment" not in str(raised.value)
        assert raised.value.__suppress_context__
    assert chat.stats.requests == len(statuses)


CREDENTIALS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCY",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEBYaD",
    "AZURE_AD_TOKEN": "azure-ad-83bc",
    "AZURE_CLIENT_SECRET": "azure-client-83bc",
    "DATABRICKS_TOKEN": "dapi-83bc83bc",
    "WATSONX_APIKEY": "watsonx-83bc",
    "VERTEXAI_CREDENTIALS": '{"private_key": "-----BEGIN 83bc\\nEND-----"}',
    "LITELLM_LICENSE": "license-83bc",
    "PGPASSWORD": "pg-83bc",
    "SSHPASS": "ssh-83bc",
    "QUEUE_CONNSTR": "amqp-83bc",
    "VAULT_SECRET_ID": "vault-83bc",
    "NEXUS_CREDS": "nexus-83bc",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=team;AccountKey=YWNjb3VudC1rZXktODNiYw==",
    "DATABASE_URL": "postgres://user:p%40ss83bc@127.0.0.1/db",
    "GATEWAY_URL": "https://127.0.0.1/v1?api-key=gateway-83bc&team=a",
    "SOME_PASSWORD": 'with "quotes" & spaces',
}
OTHERS = {
    "AUTH_TOKEN": "true",
    "API_KEY": "1",
    "SECRET": "enabled",
    "SOME_KEY": "abc",
    "TEAM": "team-of-83bc",
    "KEY_FILE": "/etc/passwd",
}
PARTS = ["p%40ss83bc", "p@ss83bc", "gateway-83bc"]


async def test_an_error_shows_no_credential_of_the_environment(chat, monkeypatch):
    for name, value in {**CREDENTIALS, **OTHERS}.items():
        monkeypatch.setenv(name, value)
    values = [value for name, value in CREDENTIALS.items() if not name.endswith("_URL")] + PARTS
    forms = {form for value in values for form in (value, quote(value, safe=""), json.dumps(value)[1:-1])}
    chat.rule(
        "all", Reply("refused " + " | ".join(forms) + " of team-of-83bc: true abc 1 enabled /etc/passwd", status=401)
    )
    monkeypatch.setattr(litellm_client, "MAX_MESSAGE_LENGTH", 5000)
    with pytest.raises(
        QueryError, match=r"refused \[\.\.\.\] .* of team-of-83bc: true abc 1 enabled /etc/passwd"
    ) as raised:
        await ask(model(chat, retries=0), "all")
    assert [form for form in forms if form in str(raised.value)] == []
    assert "83bc" not in str(raised.value).replace("team-of-83bc", "")


async def test_neither_an_error_nor_the_code_sees_the_clients_headers(chat):
    basic = base64.b64encode(b"user:geheim-83bc").decode()
    sent = {"Authorization": f"Basic {basic}", "X-Team-Token": "team-token-83bc83bc", "X-Amz-Date": "20261122T000000Z"}
    echo = f"{basic} | Basic {basic} | team-token-83bc83bc | {KEY} | 20261122T000000Z"
    block = model(chat, options={"extra_headers": sent}, retries=0)
    chat.rule("refuse", Reply(f"refused {echo}", status=403))
    with pytest.raises(QueryError, match=r"refused \[\.\.\.\] \| ") as raised:
        await ask(block, "refuse")
    assert chat.requests[-1].headers["x-team-token"] == "team-token-83bc83bc"
    chat.rule("answer", f"an answer with {echo}")
    answer = (await ask(block, "answer")).text
    assert answer.startswith("an answer with [...] | ")
    for text in (str(raised.value), answer):
        assert [value for value in (basic, "team-token-83bc", KEY) if value in text] == []
        assert "20261122T000000Z" in text


async def test_every_credential_that_litellm_asks_for_is_hidden(chat, monkeypatch):
    await ask(model(chat))
    import litellm

    asked = {
        name
        for provider in litellm.provider_list
        for name in litellm.validate_environment(f"{getattr(provider, 'value', provider)}/x")["missing_keys"]
    }
    places = {name for name in asked if name.endswith(("_BASE", "_VERSION", "_PROJECT", "_LOCATION", "_ACCOUNT_ID"))}
    assert len(asked - places) > 30
    for name in asked - places:
        monkeypatch.setenv(name, f"value-of-{name}")
    assert {f"value-of-{name}" for name in asked - places} - find_environment_credentials() == set()


async def test_the_clients_own_log_lines_have_no_credential(chat, monkeypatch, caplog):
    await ask(model(chat))
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-83bc83bc")
    for name in ("LiteLLM", "httpx"):
        try:
            raise RuntimeError("refused dapi-83bc83bc")
        except RuntimeError:
            logging.getLogger(name).exception("a request with %s", "dapi-83bc83bc")
    assert caplog.text.count("a request with [...]") == 2
    assert caplog.text.count("RuntimeError: refused [...]") == 2
    assert "dapi-83bc83bc" not in caplog.text


async def test_tokens_are_counted_where_the_server_counts_none(chat):
    chat.rule("question", Reply("an answer of five words", no_usage=True))
    usage = (await ask(model(chat))).usage
    assert usage.prompt_tokens > 2
    assert usage.completion_tokens >= 5
    assert usage.cost == pytest.approx(usage.prompt_tokens * 1.5e-7 + usage.completion_tokens * 6e-7)


async def test_a_configured_price_beats_the_list_and_an_unknown_price_is_null(chat):
    chat.rule("question", "three words only")
    own = model(chat, input_cost_per_token=0.5, output_cost_per_token=0.25)
    assert (await ask(own)).usage.cost == 2 * 0.5 + 3 * 0.25
    assert (await ask(model(chat, model="openai/of-my-own"))).usage.cost is None


async def test_the_reserved_maximum_is_never_less_than_a_calls_use(chat):
    block = model(chat, max_tokens=10)
    for prompt in ("a", "é" * 100, "word " * 500, "\U0001f600" * 50):
        messages = [{"role": "user", "content": prompt}]
        most = await block.make_flat_model().estimate_max_usage(messages)
        import litellm

        counted = litellm.token_counter(model="gpt-4o-mini", messages=messages)
        assert most.tokens >= counted + 10
        assert most.cost >= counted * 1.5e-7 + 10 * 6e-7


async def test_a_cost_limit_needs_a_known_price_and_length(chat):
    unknown = model(chat, model="openai/of-my-own", max_tokens=10)
    with pytest.raises(ConfigurationError, match="the price of the model openai/of-my-own is unknown"):
        await open_model_access(unknown, max_cost=1.0)
    unbounded = model(chat, model="openai/mine", input_cost_per_token=0, output_cost_per_token=0)
    with pytest.raises(ConfigurationError, match=r"the longest answer .* is unknown"):
        await open_model_access(unbounded, max_cost=1.0)
    for unlisted in (unknown, unbounded):
        await open_model_access(unlisted, max_llm_tokens=1000)
    await open_model_access(model(chat), max_cost=1.0)


def test_a_script_interpreter_can_query_with_one_cost_limit_for_all_executions(chat):
    settings = {"max_tokens": 5, "input_cost_per_token": 0.01, "output_cost_per_token": 0.01}
    with LocalInterpreter(
        language_model=model(chat, **settings), max_cost=0.25, max_llm_calls=3, batch_concurrency=1
    ) as interpreter:
        first = interpreter.execute("answers = llm_query_batched(['a', 'b', 'c']); SUBMIT(answers=answers)")
        assert first.answers == ["answer to: a", "answer to: b", "answer to: c"]
        assert first.meta.queries.cost == pytest.approx(3 * 0.04)
        second = interpreter.execute(
            "SUBMIT(kept=len(answers), said=str(llm_query_batched(['a'] * 4, on_error='return')[-1]))"
        )
        assert second.kept == 3
        assert "all 3 calls" in second.said
        third = interpreter.execute("SUBMIT(said=str(llm_query_batched(['d'], on_error='return')[0]))")
        assert "max_cost" in third.said


LIMIT = ": raise max_tokens, or ask for less"


@pytest.mark.parametrize("name", [NAME, "openai/o3-mini", "mistral/mistral-small"])
@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply("half an", finish_reason="length"), f"gave an incomplete answer (finish_reason: length){LIMIT}"),
        (Reply("half an", finish_reason="model_length"), f"answer (finish_reason: model_length){LIMIT}"),
        (Reply("half an", finish_reason="SAFETY"), "incomplete answer (finish_reason: SAFETY): ask in another way"),
        (Reply("half an", finish_reason="error"), "incomplete answer (finish_reason: error): ask again"),
        (Reply("", finish_reason="length"), f"answered without a text (finish_reason: length){LIMIT}"),
        (Reply("half an", no_text=True, refusal="I will not."), "refused to answer: I will not. (finish_reason: stop)"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
async def test_an_answer_that_is_not_whole_is_an_error(chat, reply, problem, name):
    chat.rule("question", replace(reply, usage=(40, 60)))
    with pytest.raises(EmptyAnswerError) as caught:
        await ask(model(chat, model=name))
    assert str(caught.value).startswith(f"the model {name} ")
    assert problem in str(caught.value)
    answer = caught.value.answer
    assert (answer.text, answer.finish_reason) == ("" if reply.no_text else reply.text, reply.finish_reason)
    assert (answer.usage.calls, answer.usage.completion_tokens) == (1, 60)


@pytest.mark.parametrize("reason", [None, "STOP", "tool_calls", "a word of its own"])
async def test_an_answer_that_ended_by_itself_is_whole(chat, reason):
    chat.rule("question", Reply("an answer", finish_reason=reason))
    answer = await ask(model(chat))
    assert (answer.text, answer.finish_reason) == ("an answer", reason or "stop")


def test_a_billed_call_without_text_counts(chat):
    chat.rule("silent", Reply(no_text=True, usage=(40, 60)))
    code = """
        errors = []
        for i in range(3):
            try:
                llm_query("silent")
            except QueryError as error:
                errors.append([type(error).__name__, str(error)])
        SUBMIT(errors=errors)
        """
    with LocalInterpreter(language_model=model(chat), max_llm_calls=2) as interpreter:
        result = interpreter.execute(dedent(code))
    assert [kind for kind, _ in result.errors] == ["QueryError", "QueryError", "BudgetExceeded"]
    assert f"{NAME} answered without a text (finish_reason: stop)" in result.errors[0][1]
    queries = result.meta.queries
    assert (queries.calls, queries.prompt_tokens, queries.completion_tokens) == (2, 80, 120)
    assert queries.cost == pytest.approx(80 * 1.5e-7 + 120 * 6e-7)
    assert queries.tree[0]["calls"] == 1
    assert chat.stats.requests == 2


def test_half_a_surrogate_pair_in_one_answer_harms_no_other_answer(chat):
    chat.rule("torn", "a\ud800b")
    with LocalInterpreter(language_model=model(chat)) as interpreter:
        result = interpreter.execute("SUBMIT(answers=llm_query_batched(['x', 'torn']))")
    assert result.answers == ["answer to: x", "a?b"]


def test_a_block_refuses_an_unknown_option_without_showing_its_value(chat):
    for name in ("stream", "api_key", "timeout"):
        with pytest.raises(ValidationError, match=f"options cannot contain {name}") as caught:
            model(chat, options={name: "of-a-person"})
        assert "of-a-person" not in str(caught.value)


def test_invalid_limits_are_refused(chat):
    limits: dict[str, Any]
    for limits in ({"batch_concurrency": 0}, {"max_depth": -1}, {"max_total_llm_calls": -1}, {"max_cost": -0.5}):
        interpreter = LocalInterpreter(language_model=model(chat), **limits)
        with pytest.raises(ConfigurationError, match=next(iter(limits))):
            interpreter.start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "of-my-own"}, "'of-my-own' is no known model: name one as in openai/gpt-4o-mini"),
        ({"sub_model": "groq/llama"}, "the model groq/llama needs a key: set GROQ_API_KEY"),
        ({}, "the model openai/gpt-4o-mini needs a key: set OPENAI_API_KEY"),
    ],
)
def test_an_unknown_model_or_missing_key_is_refused_before_a_sandbox_opens(
    settings: dict[str, Any], message, monkeypatch
):
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL", "GROQ_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings = {"model": NAME, **settings}
    interpreter = LocalInterpreter(language_model=LanguageModel(**settings))
    if "sub_model" in settings:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
    opened = []
    monkeypatch.setattr(LocalProvider, "open", lambda *arguments: opened.append(arguments))
    with pytest.raises(ConfigurationError, match=message):
        interpreter.start()
    assert not opened
    accepted: Any
    for accepted in ({"model": "ollama_chat/llama3.2"}, {"api_base": "http://127.0.0.1:9"}, {"api_key": "sk-given"}):
        asyncio.run(LanguageModel(**{"model": NAME, **accepted}).make_root_model().check())
