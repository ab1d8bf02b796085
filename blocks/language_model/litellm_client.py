"""A client for models that LiteLLM serves: requests with retries, errors and costs.

The first check or request imports LiteLLM in a thread, because the import takes seconds.
"""

import asyncio
import importlib
import json
import logging
import os
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...sandbox.errors import ConfigurationError, QueryError
from ...sandbox.queries.budget import Estimate, Usage
from ...sandbox.queries.session import DEFAULT_OPTIONS, Answer, EmptyAnswerError, Message, RequestOptions
from ..retry import compute_backoff
from ..worker_consent import check_key_address, is_deployment_run
from .credentials import CredentialMask, filter_log_record
from .openai_client import ARGUMENTS, can_send_directly, send

if TYPE_CHECKING:
    from .settings import LanguageModelSettings

LATE_SECONDS = 10.0  # seconds beyond a request's timeout; the first request of a process imports modules for seconds
FIRST_BACKOFF_SECONDS = 0.5  # seconds before the first retry without a server's Retry-After
RATE_LIMIT_SECONDS = 600.0  # seconds for which a query waits for a server that answers 429; a deadline ends it earlier
LONGEST_BACKOFF_SECONDS = 60.0  # seconds; the limit on a server's Retry-After
OVERHEAD_TOKENS = 16  # tokens at most for a message's role and separators
IMAGE_TOKENS = 5_000  # tokens at most for an image, whatever its size: the providers scale large images down
IMAGE_TOKENS_OF = {"gpt-4o-mini": 50_000}  # models that count more tokens for an image
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")  # names of the limit on an answer's tokens
# Keywords that OpenAI's strict mode takes. In this mode the model cannot deviate from the schema.
STRICT_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const", "$ref", "$defs"),
    *("title", "description"),
}
# Remedies for an incomplete answer, by LiteLLM's word for the reason or by the server's own.
REMEDIES = {
    "length": "raise max_tokens, or ask for less",
    "model_length": "raise max_tokens, or ask for less",
    "content_filter": "ask in another way",
    "error": "ask again",
    "network_error": "ask again",
    "abort": "ask again",
    "insufficient_system_resource": "ask again",
    "malformed_response": "ask again",
    "malformed_function_call": "ask again",
}
MAX_MESSAGE_LENGTH = 500  # characters of a server's message in an error
# Variables from which LiteLLM reads the keys of the providers that always require one. `check` demands no key for other
# providers, for a model with an address, or if the program has set a key in LiteLLM.
KEY_VARIABLES = {
    "openai": ("OPENAI_API_KEY",),
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "mistral": ("MISTRAL_API_KEY",),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "groq": ("GROQ_API_KEY",),
    "openrouter": ("OPENROUTER_API_KEY", "OR_API_KEY"),
}
# Providers for which LiteLLM sends a block's key and none of the environment's. It was tried with all keys set.
OWN_KEY_PROVIDERS = {*KEY_VARIABLES, "azure", "hosted_vllm", "litellm_proxy", "lm_studio", "ollama", "ollama_chat"}
# Options of deployment runs. Others, such as `base_url` and `fallbacks`, could send a key of the environment elsewhere.
DEPLOYMENT_OPTIONS = ARGUMENTS | {"extra_body", "logit_bias", "min_p", "n", "service_tier", "thinking", "top_k"}
# Names that lead LiteLLM to another host: an address, or the ARN of an AgentCore with a wrong region.
HOST_IN_NAME = re.compile(r"://|agentcore/(?!([^:]*:){3}[a-z0-9-]+:)")
INSTALL_HINT = "queries need LiteLLM and DSPy, which are not installed: pip install 'rlm-batch[rlm]'"


def prepare_litellm_import() -> None:
    """Set the variables that LiteLLM reads during its import, unless they are set.

    Without them LiteLLM requests prices over the network for up to 10 s. It also loads a `.env` file of the project or
    the working directory into this process's environment, where LD_PRELOAD or PYTHONPATH could run code on the host.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")


async def _import_litellm() -> Any:
    prepare_litellm_import()
    try:
        litellm: Any = await asyncio.to_thread(importlib.import_module, "litellm")
    except ImportError as error:
        raise ConfigurationError(INSTALL_HINT) from error
    litellm.suppress_debug_info = True  # Otherwise LiteLLM prints links for help to standard output.
    if "LITELLM_LOG" not in os.environ:
        # LiteLLM warns each time that a program starts another event loop, which is harmless.
        logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    for name in ("LiteLLM", "httpx"):  # Their lines contain addresses of requests, and answers of servers.
        logging.getLogger(name).addFilter(filter_log_record)  # Adding it again has no effect.
    return litellm


@dataclass(eq=False, repr=False)  # It contains a secret.
class LiteLLMModel:
    """One model of a `LanguageModel`: its name, the block's settings, and the sampling arguments of its requests."""

    name: str
    settings: "LanguageModelSettings"
    sampling: dict[str, Any]
    _litellm: Any = field(default=None, init=False)

    async def _load(self) -> Any:
        self._litellm = self._litellm or await _import_litellm()
        return self._litellm

    async def check(self) -> None:
        """Raise ConfigurationError if LiteLLM does not know the model's provider, or a key is missing. Send nothing."""
        litellm, settings = await self._load(), self.settings
        if litellm.max_budget:
            raise ConfigurationError(
                "litellm.max_budget does not limit queries, because LiteLLM does not add their costs: set it to 0, and "
                "pass `max_cost`"
            )
        provider = self._find_provider()
        self._get_key()
        key_variables = KEY_VARIABLES.get(provider)
        if key_variables is None:
            return
        variables = (*key_variables, *_list_address_variables(provider))
        has_key_or_address = (
            settings.api_key
            or settings.api_base
            or litellm.api_key
            or getattr(litellm, f"{provider}_key", None)
            or any(os.environ.get(variable) for variable in variables)
        )
        if not has_key_or_address:
            raise ConfigurationError(
                f"the model {self.name} needs a key: set {key_variables[0]}, or save a LanguageModel block with "
                "an api_key and pass rlm-language-model/NAME"
            )

    def _find_provider(self) -> str:
        """Return LiteLLM's name of the model's provider. Raises ConfigurationError."""
        provider = self._name_provider()
        if provider in self._litellm.provider_list:  # LiteLLM's own function signs in to some providers.
            return provider
        try:
            return self._litellm.get_llm_provider(model=self.name, api_base=self.settings.api_base)[1]
        except Exception:  # noqa: BLE001 - LiteLLM raises the same errors as for requests
            raise ConfigurationError(f"{self.name!r} is no known model: name one as in openai/gpt-4o-mini") from None

    def _name_provider(self) -> str:
        return str(self.sampling.get("custom_llm_provider") or self.name.partition("/")[0])

    def fingerprint(self) -> dict[str, Any]:
        """Return what an answer depends on; see `Model.fingerprint`. The address may come from the environment."""
        return {"model": self.name, "api_base": self._find_address(self._name_provider()), "sampling": self.sampling}

    def _find_address(self, provider: str) -> str | None:
        """Return the address of the block or of the environment, or None for the provider's default."""
        address = self.settings.api_base or None
        for variable in _list_address_variables(provider):
            address = address or os.environ.get(variable) or None
        return address

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        """Ask the model, with retries after transient errors. Raises QueryError, ConfigurationError."""
        await self._load()
        messages, arguments = self._build_request(messages, options)
        mask = CredentialMask(api_key=self._get_key(), api_base=self.settings.api_base, options=self.sampling)
        started_at = time.monotonic()
        attempt = 0
        while True:
            try:
                response = await self._send(messages, arguments, mask)
            except Exception as error:  # noqa: BLE001 - LiteLLM raises the errors of a hundred clients
                delay = self._choose_delay(error, attempt, started_at)
                if delay is None:
                    in_tries = f" in {attempt + 1} tries" if attempt else ""
                    problem = _describe_error(error, mask)
                    raise QueryError(f"the model {self.name} did not answer{in_tries}: {problem}") from None
            else:
                return self._read_response(response, messages, mask)
            await asyncio.sleep(delay)
            attempt += 1

    def _get_key(self) -> str | None:
        """Return the block's key, or None for the environment's. Raise ConfigurationError if that may not be sent."""
        key = None if self.settings.api_key is None else self.settings.api_key.get_secret_value()
        if not is_deployment_run():
            return key
        for name in self.sampling.keys() - DEPLOYMENT_OPTIONS:
            raise ConfigurationError(f"deployments may not use the model's option {name}: remove it from the block")
        if HOST_IN_NAME.search(self.name):
            raise ConfigurationError(
                f"deployments may not use the model {self.name}, whose name has an address: use `api_base`"
            )
        provider = self._find_provider()
        address = self._find_address(provider)
        has_own_key = bool(key) and provider in OWN_KEY_PROVIDERS
        if address and not has_own_key:
            check_key_address(address, f"its key for {provider}")
        return key

    async def _send(self, messages: list[Message], arguments: dict[str, Any], mask: CredentialMask) -> Any:
        """Send one request, and return LiteLLM's response. Raises TimeoutError and the errors of LiteLLM."""
        litellm, timeout = self._litellm, self.settings.request_timeout
        connection: Any = {"api_key": self._get_key(), "api_base": self.settings.api_base, "timeout": timeout}
        # LiteLLM's timeout restarts with each piece of an answer, so a slow stream would never end.
        whole_answer = asyncio.timeout(timeout + LATE_SECONDS)
        try:
            async with whole_answer:
                if can_send_directly(litellm, self.name, self._get_listing(), arguments):
                    return await send(litellm, self.name, messages, arguments=arguments, mask=mask, **connection)
                # LiteLLM's own retries would hide their cost.
                extras = {"num_retries": 0, "max_retries": 0, "logger_fn": mask.add_call}
                return await litellm.acompletion(
                    model=self.name, messages=messages, **connection, **{**extras, **arguments}
                )
        except Exception:
            if whole_answer.expired():
                raise TimeoutError(f"its answer was not complete after {timeout:g} s") from None
            raise

    def _choose_delay(self, error: Exception, attempt: int, started_at: float) -> float | None:
        """Return the seconds before the next retry, or None if the request must not be repeated."""
        import openai  # LiteLLM's errors are subclasses of those of OpenAI's client.

        litellm, retries = self._litellm, self.settings.retries
        delay = _get_delay(error, attempt)
        # A spent quota is a 429 too, and waiting does not help.
        is_rate_limit = isinstance(error, openai.RateLimitError) and "insufficient_quota" not in str(error)
        if is_rate_limit and retries > 0:
            return delay if time.monotonic() + delay < started_at + RATE_LIMIT_SECONDS else None
        server_errors = (openai.InternalServerError, litellm.ServiceUnavailableError, litellm.BadGatewayError)
        is_transient = isinstance(error, (*server_errors, openai.APIConnectionError, TimeoutError))
        return delay if is_transient and attempt < retries else None

    def _build_request(self, messages: list[Message], options: RequestOptions) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages and LiteLLM's further arguments for a request with these options."""
        arguments = dict(self.sampling)
        if options.temperature is not None:
            arguments["temperature"] = options.temperature
        if options.max_tokens is not None:
            set_limits = [name for name in TOKEN_LIMITS if arguments.get(name)]
            for name in set_limits or TOKEN_LIMITS[:1]:
                arguments[name] = min(options.max_tokens, arguments.get(name) or options.max_tokens)
        if options.response_format is not None:
            listing = self._get_listing()
            if listing and not listing.get("supports_response_schema"):
                schema = json.dumps(options.response_format, ensure_ascii=False)
                instruction = f"Reply with JSON that matches this schema, and with nothing else: {schema}"
                return [{"role": "system", "content": instruction}, *messages], arguments
            described = {"name": "answer", "schema": options.response_format}
            if _is_strict(options.response_format):
                described["strict"] = True
            arguments["response_format"] = {"type": "json_schema", "json_schema": described}
        return messages, arguments

    def _read_response(self, response: Any, messages: list[Message], mask: CredentialMask) -> Answer:
        """Return the answer of a response, without credentials. Raises EmptyAnswerError if it is not whole."""
        choice = response.choices[0] if response.choices else None
        message = getattr(choice, "message", None)
        text = _replace_surrogates(getattr(message, "content", None) or "")
        # Thoughts that the server sent apart from the text. OpenRouter and vLLM use the second name.
        thoughts = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
        mapped_reason = getattr(choice, "finish_reason", "")
        # LiteLLM maps words that it does not know to "stop".
        reason = mask.hide_sent(str(_get_server_fields(choice).get("native_finish_reason", mapped_reason)))
        tokens = getattr(getattr(choice, "logprobs", None), "content", None)
        answer = Answer(
            text=mask.hide_sent(text),  # Code must not see secrets of this process.
            usage=self._compute_usage(response, messages, text),
            logprobs=None if tokens is None else [token.model_dump() for token in tokens],
            finish_reason=reason,
            thoughts=mask.hide_sent(_replace_surrogates(str(thoughts))),
        )
        remedy = REMEDIES.get(mapped_reason) or REMEDIES.get(reason.lower())
        refusal = getattr(message, "refusal", None) or _get_server_fields(message).get("refusal")
        if refusal:
            problem = f"refused to answer: {mask.hide_sent(refusal)[:MAX_MESSAGE_LENGTH]}"
            remedy = "ask in another way"
        elif not text.strip():
            problem = "answered without a text"
        elif remedy is not None:
            problem = "gave an incomplete answer"
        else:
            return answer
        described = f"the model {self.name} {problem} (finish_reason: {reason})"
        raise EmptyAnswerError(described if remedy is None else f"{described}: {remedy}", answer)

    def _compute_usage(self, response: Any, messages: list[Message], text: str) -> Usage:
        """Return the tokens and the cost that the server or LiteLLM counted."""
        counted = getattr(response, "usage", None)
        # Negative counts would raise the limits on tokens and cost.
        prompt = max(0, getattr(counted, "prompt_tokens", 0) or 0)
        completion = max(0, getattr(counted, "completion_tokens", 0) or 0)
        if prompt:
            cost = response._hidden_params.get("response_cost")  # It has discounts, such as for cached prompts.
        else:  # Every prompt has tokens, so this server does not count them.
            count = self._litellm.token_counter
            prompt = count(model=self.name, messages=messages, use_default_image_token_count=True)
            completion = completion or count(model=self.name, text=text)
            cost = None
        price = self._get_price()
        if price is None:  # LiteLLM reports 0 for an unknown price.
            return Usage(1, prompt, completion, cost or None)
        settings = self.settings
        has_own_price = settings.input_cost_per_token is not None or settings.output_cost_per_token is not None
        if cost is None or has_own_price:
            cost = price[0] * prompt + price[1] * completion
        return Usage(1, prompt, completion, max(0.0, cost))

    async def estimate_max_usage(
        self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS, *, is_priced: bool = True
    ) -> Estimate:
        """Return the most that a call can use; see `Model.estimate_max_usage`.

        Each byte of texts and of the schema counts as a token, and each image as `IMAGE_TOKENS`.
        """
        await self._load()
        price = self._get_price() if is_priced else (0.0, 0.0)
        messages, arguments = self._build_request(messages, options)
        limits = [arguments[name] for name in TOKEN_LIMITS if arguments.get(name)]
        answer = min(limits) if limits else self._get_listing().get("max_output_tokens")
        if answer is None and not is_priced:
            answer = 0  # The answers of an unlisted model count when they arrive.
        if price is None or answer is None:
            unknown = "price" if price is None else "longest answer"
            raise ConfigurationError(
                f"the {unknown} of the model {self.name} is unknown, so `max_cost` cannot limit it: leave `max_cost` "
                "out, or set max_tokens and the costs per token in its LanguageModel block"
            )
        prompt = len(json.dumps(arguments["response_format"])) if "response_format" in arguments else 0
        for message in messages:
            prompt += self._estimate_message(message["content"])
        return Estimate(prompt, answer, *price)

    def _estimate_message(self, content: str | list[dict[str, Any]]) -> int:
        """Return the most tokens that a message can have."""
        image_tokens = next((tokens for name, tokens in IMAGE_TOKENS_OF.items() if name in self.name), IMAGE_TOKENS)
        total = 0
        for part in [{"text": content}] if isinstance(content, str) else content:
            total += len(part["text"].encode("utf-8", "replace")) if "text" in part else image_tokens
            total += OVERHEAD_TOKENS
        return total

    def _get_price(self) -> tuple[float, float] | None:
        """Return the US dollars per token of a prompt and of an answer, or None if a price is unknown."""
        listing = self._get_listing()
        prompt, answer = self.settings.input_cost_per_token, self.settings.output_cost_per_token
        prompt = listing.get("input_cost_per_token") if prompt is None else prompt
        answer = listing.get("output_cost_per_token") if answer is None else answer
        return None if prompt is None or answer is None else (prompt, answer)

    def _get_listing(self) -> dict[str, Any]:
        """Return the model's entry in LiteLLM's list, or {}. LiteLLM's own function would send a request to Ollama."""
        prices = self._litellm.model_cost
        if self.name in prices:
            return prices[self.name]
        provider, _, name = self.name.partition("/")
        entry = prices.get(name, {})
        return entry if entry.get("litellm_provider") == provider else {}


def _list_address_variables(provider: str) -> tuple[str, ...]:
    return f"{provider.upper()}_API_BASE", f"{provider.upper()}_BASE_URL"


def _is_strict(schema: Any) -> bool:
    """Return True if OpenAI's strict mode takes the schema: its objects are closed and have no optional fields."""
    try:
        if not schema.keys() <= STRICT_KEYWORDS:
            return False
        properties = schema.get("properties", {})
        if "object" in schema.get("type", ()):  # a text or a list
            is_closed = schema.get("additionalProperties") is False
            if not is_closed or set(schema.get("required", ())) != properties.keys():
                return False
        inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
        if "items" in schema:
            inner.append(schema["items"])
        return all(map(_is_strict, inner))
    except (AttributeError, TypeError, RecursionError):  # The schema may come from the code.
        return False


def _get_server_fields(part: Any) -> dict[str, Any]:
    """Return the server's own fields of a choice or of a message, as LiteLLM keeps them."""
    return getattr(part, "provider_specific_fields", None) or {}


def _replace_surrogates(text: str) -> str:
    """Return the text as UTF-8 allows it: a server may send half a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _describe_error(error: Exception, mask: CredentialMask) -> str:
    """Return the error's type and text with credentials blanked, because servers repeat a key that they refuse."""
    # LiteLLM adds its traceback if it cannot read an answer.
    text = str(error).removeprefix("litellm.").partition("Traceback (most recent call last)")[0].strip()
    name = type(error).__name__
    return mask.hide(text if text.startswith(name) else f"{name}: {text}")[:MAX_MESSAGE_LENGTH]


def _get_delay(error: Exception, attempt: int) -> float:
    """Return the seconds before the next retry: the server's Retry-After, or a growing delay with jitter."""
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", {})
    try:
        retry_after = float(headers.get("retry-after", ""))
    except ValueError:
        return compute_backoff(attempt, FIRST_BACKOFF_SECONDS, 16.0) * random.uniform(0.75, 1.25)
    return min(max(0.0, retry_after), LONGEST_BACKOFF_SECONDS)
