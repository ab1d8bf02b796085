"""Requests to OpenAI's chat API by OpenAI's own client, which takes half the processor time of LiteLLM's."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from .credentials import CredentialMask

PROVIDER = "openai"
NO_KEY = "none"  # OpenAI's client requires a key, but some servers do not.
MAX_ERROR_CHARACTERS = 2000  # characters of an answer without a message
# Arguments that LiteLLM's own client would pass on to the server in this form.
ARGUMENTS = {
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "frequency_penalty", "presence_penalty"),
    *("response_format", "logprobs", "top_logprobs", "seed", "stop", "user", "reasoning_effort"),
}
# LiteLLM's settings for each of its requests. It moves async callbacks to the lists with an underscore.
LITELLM_SETTINGS = (
    *("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback", "cache"),
    *("_async_input_callback", "_async_success_callback", "_async_failure_callback"),
    *("pre_call_rules", "post_call_rules"),
)

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()


def can_send_directly(litellm: Any, name: str, listed: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Return True if a request needs no LiteLLM: it is for a model of OpenAI's chat API, without special settings.

    `listed` is LiteLLM's entry for the model, or an empty dict. `arguments` are those of `acompletion`.
    """
    provider, _, model = name.partition("/")
    return (
        provider == PROVIDER
        # LiteLLM rewrites the messages of the o series, and sends some models' requests to other addresses.
        and not model.startswith(("o1", "o3", "o4", "responses/"))
        and listed.get("mode", "chat") == "chat"
        and arguments.keys() <= ARGUMENTS
        and litellm.ssl_verify is True
        and not any(getattr(litellm, setting) for setting in LITELLM_SETTINGS)
    )


async def send(
    litellm: Any,
    name: str,
    messages: list[dict[str, Any]],
    *,
    api_key: str | None,
    api_base: str | None,
    timeout: float,
    arguments: Mapping[str, Any],
    mask: CredentialMask,
) -> Any:
    """Send one request and return LiteLLM's response object with its cost. Raise the errors of OpenAI's client."""
    import httpx
    import openai

    model = name.partition("/")[2]
    key = api_key or litellm.api_key or litellm.openai_key or os.environ.get("OPENAI_API_KEY") or NO_KEY
    base = api_base or litellm.api_base or os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    loop = asyncio.get_running_loop()
    if loop not in _clients:  # A client keeps connections for all models.
        _clients[loop] = openai.AsyncOpenAI(api_key=NO_KEY)
    client = _clients[loop].with_options(api_key=key, base_url=base, timeout=timeout, max_retries=0)
    mask.add_call({"api_key": key, "additional_args": {"api_base": str(client.base_url)}})
    converted = litellm.get_optional_params(model=model, custom_llm_provider=PROVIDER, **arguments)
    converted |= converted.pop("extra_body", {})
    converted.pop("stream", None)
    body = {"model": model, "messages": messages, **converted}
    reply: Any = await client.post("/chat/completions", cast_to=httpx.Response, body=body)
    try:  # Some servers report an error with status 200.
        answer = reply.json()
        answer["choices"][0]["message"].items()
    except (ValueError, TypeError, LookupError, AttributeError):
        text = f"Error code: {reply.status_code} - {reply.text[:MAX_ERROR_CHARACTERS]}"
        raise litellm.BadGatewayError(text, model=model, llm_provider=PROVIDER) from None
    response = litellm.ModelResponse(**answer)
    try:
        cost = litellm.completion_cost(completion_response=response, model=model, custom_llm_provider=PROVIDER)
    except Exception:  # noqa: BLE001 - LiteLLM raises a plain Exception for a model without a price
        cost = None
    response._hidden_params["response_cost"] = cost  # LiteLLM's client puts it here.
    return response
