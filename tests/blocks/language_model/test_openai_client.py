"""Tests of requests by OpenAI's own client: the same as LiteLLM's, and only without settings that need LiteLLM's."""

import asyncio
import gc
import json
import subprocess
import sys
import warnings
from typing import Any

import litellm
import pytest

from rlm_batch import AsyncLocalInterpreter, ConfigurationError, LanguageModel, QueryError
from rlm_batch.blocks.language_model.openai_client import can_send_directly

from ...infra.waiting import HANG_SECONDS
from ...standins.openai_chat import Reply

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"


def model(chat, **settings: Any):
    defaults: dict[str, Any] = {"model": NAME, "api_key": "sk-of-this-test", "api_base": chat.url}
    return LanguageModel(**{**defaults, **settings})


async def ask(block):
    return await block.make_flat_model().ask([{"role": "user", "content": "a question"}])


async def test_an_answer_is_the_same_with_and_without_litellms_client(chat, monkeypatch):
    block = model(chat, temperature=0.5, max_tokens=9)
    direct = await ask(block)
    monkeypatch.setattr(litellm, "success_callback", ["a_test"])
    assert await ask(block) == direct
    ours, theirs = chat.requests
    assert ours.body == theirs.body
    assert ours.headers["authorization"] == theirs.headers["authorization"] == "Bearer sk-of-this-test"


async def test_the_key_and_the_address_of_the_environment_are_used(chat, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", chat.url)
    await ask(LanguageModel(model=NAME))
    assert chat.requests[0].headers["authorization"] == "Bearer sk-of-the-environment"


@pytest.mark.parametrize(
    ("name", "arguments", "settings", "is_direct"),
    [
        (NAME, {}, {}, True),
        (NAME, {"temperature": 0, "response_format": {}}, {}, True),
        (NAME, {"extra_headers": {}}, {}, False),
        (NAME, {"custom_llm_provider": "azure"}, {}, False),
        ("anthropic/claude-sonnet-4-5", {}, {}, False),
        ("gpt-4o-mini", {}, {}, False),
        ("openai/o1", {}, {}, False),
        ("openai/responses/gpt-4o", {}, {}, False),
        (NAME, {}, {"success_callback": ["langfuse"]}, False),
        (NAME, {}, {"_async_failure_callback": ["langfuse"]}, False),
        (NAME, {}, {"pre_call_rules": [print]}, False),
        (NAME, {}, {"ssl_verify": False}, False),
    ],
)
def test_special_settings_need_litellms_client(monkeypatch, name, arguments, settings, is_direct):
    for setting, value in settings.items():
        monkeypatch.setattr(litellm, setting, value)
    assert can_send_directly(litellm, name, {}, arguments) is is_direct


@pytest.mark.parametrize("name", [NAME, "hosted_vllm/a-model"])
async def test_an_async_callback_gets_every_request(chat, monkeypatch, name):
    """LiteLLM moves the callback to another list when it first calls it."""
    called, prompts = asyncio.Event(), []

    async def note(arguments: Any, *_: Any) -> None:
        prompt = arguments["messages"][0]["content"]
        if prompt.startswith("callback"):  # LiteLLM may also report requests of earlier tests.
            prompts.append(prompt)
            called.set()

    monkeypatch.setattr(litellm, "success_callback", [note])
    monkeypatch.setattr(litellm, "_async_success_callback", [])
    client = model(chat, model=name).make_flat_model()
    expected = [f"callback {number}" for number in range(3)]
    for prompt in expected:
        called.clear()
        await client.ask([{"role": "user", "content": prompt}])
        await asyncio.wait_for(called.wait(), HANG_SECONDS)
    assert prompts == expected


async def test_a_budget_of_litellm_that_limits_nothing_is_refused(chat, monkeypatch):
    monkeypatch.setattr(litellm, "max_budget", 1e-9)
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)
    for _ in range(2):  # LiteLLM itself does not hold its budget.
        await litellm.acompletion(NAME, [{"role": "user", "content": "x"}], api_key="sk-x")
    with pytest.raises(ConfigurationError, match=r"litellm\.max_budget does not limit queries.*pass `max_cost`"):
        async with AsyncLocalInterpreter(isolation="none", language_model=model(chat)):
            pass


def test_connections_are_closed_with_the_event_loop(chat, caplog):
    for _ in range(2):
        asyncio.run(ask(model(chat)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        gc.collect()
    assert "Unclosed" not in caplog.text
    assert chat.stats.answered == 2


@pytest.mark.parametrize(
    "body",
    [{"error": {"message": "Provider overloaded", "code": 502}}, {"choices": None}, {"choices": [{"index": 0}]}],
    ids=["an error", "no choices", "no message"],
)
async def test_a_reply_without_a_message_is_asked_again_and_its_error_is_told(chat, body):
    chat.rule("a question", Reply(body=json.dumps(body).encode()))
    with pytest.raises(QueryError, match="Provider overloaded" if "error" in body else "in 2 tries"):
        await ask(model(chat, retries=1))
    assert chat.stats.requests == 2


def test_a_script_with_an_interpreter_ends_without_errors(chat):
    program = f"""
from rlm_batch import LanguageModel, LocalInterpreter
model = LanguageModel(model={NAME!r}, api_key="sk-x", api_base={chat.url!r})
with LocalInterpreter(language_model=model, isolation="none") as interpreter:
    print(interpreter.execute("SUBMIT(answer=llm_query('x'))").answer)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3 * HANG_SECONDS, check=False)
    assert (done.stdout, done.stderr) == ("answer to: x\n", "")
