"""Requests to OpenAI's chat API without LiteLLM's client, which takes ten times as much processor time.

LiteLLM converts the arguments, names the errors and computes the costs here too. `can_send_directly` says which
requests need its client.
"""

import asyncio
import atexit
import json
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from .credentials import CredentialMask

PROVIDER = "openai"
ADDRESS = "https://api.openai.com/v1"
MAX_ERROR_CHARACTERS = 2000  # characters of a server's error
BAD_GATEWAY = 502  # the status of an answer without a message, so that the question is asked again
CLOSE_SECONDS = 1.0  # seconds for closing connections when the process ends
# Arguments that LiteLLM's own client would pass on to the server in this form.
ARGUMENTS = {
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "frequency_penalty", "presence_penalty"),
    *("response_format", "logprobs", "top_logprobs", "seed", "stop", "user", "reasoning_effort"),
}
# Settings of a program for LiteLLM that only its client knows. Each is empty by default.
LITELLM_SETTINGS = (
    *("callbacks", "success_callback", "failure_callback", "input_callback", "service_callback"),
    *("_async_success_callback", "_async_failure_callback", "_async_input_callback", "pre_call_rules"),
    *("post_call_rules", "cache", "model_alias_map", "headers", "organization", "client_session", "aclient_session"),
    *("secret_manager_client", "use_litellm_proxy", "modify_params", "ssl_certificate", "force_ipv4", "api_version"),
)
VARIABLES = (
    *("OPENAI_ORGANIZATION", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS"),
    *("ALL_PROXY", "all_proxy", "SSL_VERIFY", "SSL_CERTIFICATE"),
)  # variables of the environment that only LiteLLM's client knows

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, Any]] = WeakKeyDictionary()


def can_send_directly(litellm: Any, name: str, listed: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a request can go without LiteLLM's client: a model of OpenAI's chat API, and no special settings.

    Args:
        litellm: The module.
        name: LiteLLM's name of the model.
        listed: LiteLLM's entry for the model, or an empty dict.
        arguments: The arguments of `acompletion`.
    """
    provider, _, model = name.partition("/")
    return (
        provider == PROVIDER
        # LiteLLM rewrites the messages of the o series, and sends some models' requests to other addresses.
        and not model.startswith(("o1", "o3", "o4", "responses/"))
        and listed.get("mode", "chat") == "chat"
        and arguments.keys() <= ARGUMENTS
        and litellm.ssl_verify is True
        and not any(getattr(litellm, setting, None) for setting in LITELLM_SETTINGS)
        and not any(os.environ.get(variable) for variable in VARIABLES)
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
    """Send one request and return LiteLLM's response object with its cost. Raise LiteLLM's errors.

    The parameters are those of `LiteLLMModel`. The key and the address that are used are added to the mask.
    """
    import aiohttp

    model = name.partition("/")[2]
    key = api_key or litellm.api_key or litellm.openai_key or os.environ.get("OPENAI_API_KEY", "")
    variables = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    base = api_base or litellm.api_base or variables or ADDRESS
    mask.add_call({"api_key": key, "additional_args": {"api_base": base}})
    converted = litellm.get_optional_params(model=model, custom_llm_provider=PROVIDER, **arguments)
    extra = converted.pop("extra_body", {})
    if not converted.get("stream"):
        converted.pop("stream", None)
    body = {"model": model, "messages": messages, **converted, **extra}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    session = await _find_session()
    try:
        limits = aiohttp.ClientTimeout(total=None, connect=timeout, sock_read=timeout)
        data = json.dumps(body).encode()
        address, mark, parameters = base.partition("?")
        url = f"{address.rstrip('/')}/chat/completions{mark}{parameters}"
        async with session.post(url, data=data, headers=headers, timeout=limits, **_find_proxy(url)) as reply:
            content = await reply.read()
            if reply.status != 200:
                raise _make_error(litellm, model, reply.status, content, reply.headers)
        if not _has_message(answer := json.loads(content)):
            raise _make_error(litellm, model, BAD_GATEWAY, content, reply.headers)
        response = litellm.ModelResponse(**answer)
    except TimeoutError:
        raise litellm.Timeout(f"no answer within {timeout:g} s", model=model, llm_provider=PROVIDER) from None
    except (aiohttp.ClientError, OSError) as error:
        text = f"Connection error: {error or type(error).__name__}"
        raise litellm.APIConnectionError(text, llm_provider=PROVIDER, model=model) from None
    except (ValueError, TypeError) as error:
        text = f"the answer cannot be read: {error}"
        raise litellm.APIConnectionError(text, llm_provider=PROVIDER, model=model) from None
    try:
        cost = litellm.completion_cost(completion_response=response, model=model, custom_llm_provider=PROVIDER)
    except Exception:  # noqa: BLE001 - LiteLLM raises a plain Exception for a model without a price
        cost = None
    response._hidden_params["response_cost"] = cost  # where LiteLLM's client puts it
    return response


def _make_error(litellm: Any, model: str, status: int, content: bytes, headers: Mapping[str, str]) -> Exception:
    """Return LiteLLM's error for a reply with a status other than 200."""
    from litellm.llms.openai.common_utils import OpenAIError

    text = content.decode("utf-8", "replace")
    try:
        said = json.loads(text)["error"]
        code = said.get("code") or said.get("type")  # Only the code names a spent quota.
        message = f"{said['message']} ({code})" if code else str(said["message"])
    except (ValueError, TypeError, LookupError, AttributeError):
        message = text
    text = f"Error code: {status} - {message[:MAX_ERROR_CHARACTERS]}"
    original = OpenAIError(status_code=status, message=text, headers=dict(headers))
    try:
        litellm.exception_type(model=model, original_exception=original, custom_llm_provider=PROVIDER)
    except Exception as error:  # noqa: BLE001 - it raises the error that belongs to the status
        error.litellm_response_headers = {name.lower(): value for name, value in headers.items()}  # type: ignore[reportAttributeAccessIssue]
        return error
    return original


def _has_message(answer: Any) -> bool:
    """Return whether an answer has a message. Some servers report an error with status 200."""
    try:
        return isinstance(answer["choices"][0]["message"], dict)
    except (TypeError, LookupError):
        return False


def _find_proxy(url: str) -> dict[str, Any]:
    """Return aiohttp's arguments for the proxy that the environment names for an address; without one, no arguments."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return {}  # aiohttp would read the environment several times for each request.
    from aiohttp.helpers import get_env_proxy_for_url
    from yarl import URL

    try:
        proxy, proxy_auth = get_env_proxy_for_url(URL(url))
    except LookupError:
        return {}
    return {"proxy": proxy, "proxy_auth": proxy_auth}


@atexit.register
def _close_sessions() -> None:
    """Close the sessions of event loops that run until the process ends."""
    for loop, (holder, _) in list(_sessions.items()):
        if loop.is_running():
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(holder.aclose(), loop).result(CLOSE_SECONDS)


async def _find_session() -> Any:
    """Return the event loop's session, which keeps connections for all models."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        holder = _hold_session()
        _sessions[loop] = holder, await anext(holder)
    return _sessions[loop][1]


async def _hold_session() -> AsyncGenerator[Any, None]:
    """Yield a session, and close it when the event loop ends: `asyncio.run` then closes all asynchronous generators."""
    import aiohttp
    import certifi

    context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
    connector = aiohttp.TCPConnector(limit=0, ssl=context)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            yield session
    finally:
        _sessions.pop(asyncio.get_running_loop(), None)
