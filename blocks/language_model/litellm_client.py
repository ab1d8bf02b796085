"""A client for models that LiteLLM serves: requests with retries, errors and costs.

The first check or request imports LiteLLM in a thread, because the import takes seconds.
"""

import asyncio
import importlib
import json
import logging
import os
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...sandbox.errors import ConfigurationError, QueryError
from ...sandbox.queries.budget import Estimate, Usage
from ...sandbox.queries.session import DEFAULT_OPTIONS, Answer, EmptyAnswerError, Message, RequestOptions
from ..retry import call_with_retries, compute_backoff
from .credentials import CredentialMask, filter_log_record
from .openai_client import can_send_directly, send

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
    **dict.fromkeys(("length", "model_length"), "raise max_tokens, or ask for less"),
    "content_filter": "ask in another way",
    **dict.fromkeys(("error", "network_error", "abort", "insufficient_system_resource"), "ask again"),
    **dict.fromkeys(("malformed_response", "malformed_function_call"), "ask again"),
}
MAX_MESSAGE_LENGTH = 500  # characters of a server's message in an error
# Variables from which LiteLLM reads the keys of providers that always require one. `check` demands no key for other
# providers, for a model with an address, or if the program gave LiteLLM a key.
KEY_VARIABLES = {
    "openai": ("OPENAI_API_KEY",),
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "mistral": ("MISTRAL_API_KEY",),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "groq": ("GROQ_API_KEY",),
    "openrouter": ("OPENROUTER_API_KEY", "OR_API_KEY"),
}
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
        provider = self._name_provider()
        if provider not in litellm.provider_list:  # LiteLLM's own function signs in to some providers.
            try:
                provider = litellm.get_llm_provider(model=self.name, api_base=settings.api_base)[1]
            except Exception:  # noqa: BLE001 - LiteLLM raises the same errors as for requests
                raise ConfigurationError(
                    f"{self.name!r} is no known model: name one as in openai/gpt-4o-mini"
                ) from None
        names = KEY_VARIABLES.get(provider, ())
        found = (settings.api_key, settings.api_base, litellm.api_key, getattr(litellm, f"{provider}_key", None))
        found += tuple(map(os.environ.get, (*names, *_list_address_variables(provider))))
        if names and not any(found):
            raise ConfigurationError(
                f"the model {self.name} needs a key: set {names[0]}, or save a LanguageModel block with "
                "an api_key and pass language-model/NAME"
            )

    def _name_provider(self) -> str:
        return str(self.sampling.get("custom_llm_provider") or self.name.partition("/")[0])

    def fingerprint(self) -> dict[str, Any]:
        """Return what an answer depends on; see `Model.fingerprint`. The address may come from the environment."""
        addresses = map(os.environ.get, _list_address_variables(self._name_provider()))
        address = self.settings.api_base or next(filter(None, addresses), None)
        return {"model": self.name, "api_base": address, "sampling": self.sampling}

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        """Ask the model, with retries after transient errors. Raises QueryError, ConfigurationError."""
        litellm, settings = await self._load(), self.settings
        messages, arguments = self._build_request(messages, options)
        tries = 0
        api_key = None if settings.api_key is None else settings.api_key.get_secret_value()
        mask = CredentialMask(api_key=api_key, api_base=settings.api_base, options=self.sampling)
        connection: Any = {"api_key": api_key, "api_base": settings.api_base, "timeout": settings.request_timeout}
        is_direct = can_send_directly(litellm, self.name, self._listed(), arguments)

        async def request() -> Any:
            nonlocal tries
            tries += 1
            # LiteLLM's timeout restarts with each piece of an answer, so a slow stream would never end.
            whole = asyncio.timeout(settings.request_timeout + LATE_SECONDS)
            try:
                async with whole:
                    if is_direct:
                        return await send(litellm, self.name, messages, arguments=arguments, mask=mask, **connection)
                    # LiteLLM's own retries would hide their cost.
                    options = {"num_retries": 0, "max_retries": 0, "logger_fn": mask.add_call, **arguments}
                    return await litellm.acompletion(model=self.name, messages=messages, **connection, **options)
            except Exception:
                if whole.expired():
                    raise TimeoutError(f"its answer was not complete after {settings.request_timeout:g} s") from None
                raise

        begun_at = time.monotonic()

        def choose_delay(error: Exception, attempt: int) -> float | None:
            import openai  # LiteLLM's errors are subclasses of those of OpenAI's client.

            delay = _get_delay(error, attempt)
            # A spent quota is a 429 too, and waiting does not help.
            if settings.retries and isinstance(error, openai.RateLimitError) and "insufficient_quota" not in str(error):
                return delay if time.monotonic() + delay < begun_at + RATE_LIMIT_SECONDS else None
            of_server = (openai.InternalServerError, litellm.ServiceUnavailableError, litellm.BadGatewayError)
            is_passing = isinstance(error, (*of_server, openai.APIConnectionError, TimeoutError))
            return delay if attempt < settings.retries and is_passing else None

        try:
            response = await call_with_retries(request, choose_delay)
        except Exception as error:  # noqa: BLE001 - LiteLLM raises the errors of a hundred clients
            in_tries = f" in {tries} tries" if tries > 1 else ""
            raise QueryError(f"the model {self.name} did not answer{in_tries}: {_describe(error, mask)}") from None
        return self._read(response, messages, mask)

    def _build_request(self, messages: list[Message], options: RequestOptions) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages and LiteLLM's further arguments for a request with these options."""
        arguments = dict(self.sampling)
        if options.temperature is not None:
            arguments["temperature"] = options.temperature
        if options.max_tokens is not None:
            for name in [name for name in TOKEN_LIMITS if arguments.get(name)] or TOKEN_LIMITS[:1]:
                arguments[name] = min(options.max_tokens, arguments.get(name) or options.max_tokens)
        if options.response_format is not None:
            listed = self._listed()
            if listed and not listed.get("supports_response_schema"):
                schema = json.dumps(options.response_format, ensure_ascii=False)
                instruction = f"Reply with JSON that matches this schema, and with nothing else: {schema}"
                return [{"role": "system", "content": instruction}, *messages], arguments
            described = {"name": "answer", "schema": options.response_format}
            if _is_strict(options.response_format):
                described["strict"] = True
            arguments["response_format"] = {"type": "json_schema", "json_schema": described}
        return messages, arguments

    def _read(self, response: Any, messages: list[Message], mask: CredentialMask) -> Answer:
        choice = response.choices[0] if response.choices else None
        message = getattr(choice, "message", None)
        # Answers reach the code as UTF-8, and a server may send half a surrogate pair.
        text = (getattr(message, "content", None) or "").encode("utf-8", "replace").decode("utf-8")
        usage = self._usage(response, messages, text)
        mapped = getattr(choice, "finish_reason", "")
        # LiteLLM maps words that it does not know to "stop".
        reason = mask.hide_sent(str(_get_details(choice).get("native_finish_reason", mapped)))
        # Thoughts that the server sent apart from the text; OpenRouter and vLLM use the second name.
        thoughts = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
        thoughts = mask.hide_sent(str(thoughts).encode("utf-8", "replace").decode("utf-8"))
        tokens = getattr(getattr(choice, "logprobs", None), "content", None)
        logprobs = None if tokens is None else [token.model_dump() for token in tokens]
        # Code must not see secrets of this process.
        answer = Answer(mask.hide_sent(text), usage, logprobs, reason, thoughts)
        remedy = REMEDIES.get(mapped) or REMEDIES.get(reason.lower())
        refusal = getattr(message, "refusal", None) or _get_details(message).get("refusal")
        if refusal:
            problem, remedy = f"refused to answer: {mask.hide_sent(refusal)[:MAX_MESSAGE_LENGTH]}", "ask in another way"
        elif remedy or not text.strip():
            problem = "gave an incomplete answer" if text.strip() else "answered without a text"
        else:
            return answer
        shown = f"the model {self.name} {problem} (finish_reason: {reason})"
        raise EmptyAnswerError(f"{shown}: {remedy}" if remedy else shown, answer)

    def _usage(self, response: Any, messages: list[Message], text: str) -> Usage:
        counted = getattr(response, "usage", None)
        # Negative counts would raise the limits on tokens and cost.
        prompt = max(0, getattr(counted, "prompt_tokens", 0) or 0)
        completion = max(0, getattr(counted, "completion_tokens", 0) or 0)
        if not prompt:  # Every prompt has tokens, so this server does not count them.
            count = self._litellm.token_counter
            prompt = count(model=self.name, messages=messages, use_default_image_token_count=True)
            completion = completion or count(model=self.name, text=text)
            cost = None
        else:
            cost = response._hidden_params.get("response_cost")  # It has discounts, such as for cached prompts.
        price = self._price()
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
        price = self._price() if is_priced else (0.0, 0.0)
        messages, arguments = self._build_request(messages, options)
        limits = [arguments[name] for name in TOKEN_LIMITS if arguments.get(name)]
        answer = min(limits) if limits else self._listed().get("max_output_tokens")
        if answer is None and not is_priced:
            answer = 0  # The answers of an unlisted model count when they arrive.
        if price is None or answer is None:
            unknown = "price" if price is None else "longest answer"
            raise ConfigurationError(
                f"the {unknown} of the model {self.name} is unknown, so `max_cost` cannot limit it: leave `max_cost` "
                "out, or set max_tokens and the costs per token in its LanguageModel block"
            )
        image_tokens = next((count for part, count in IMAGE_TOKENS_OF.items() if part in self.name), IMAGE_TOKENS)
        prompt = len(json.dumps(arguments["response_format"])) if "response_format" in arguments else 0
        for message in messages:
            content = message["content"]
            parts: list[Any] = [{"text": content}] if isinstance(content, str) else content
            texts = sum(len(part["text"].encode("utf-8", "replace")) for part in parts if "text" in part)
            images = sum("text" not in part for part in parts)
            prompt += texts + images * image_tokens + OVERHEAD_TOKENS * len(parts)
        return Estimate(prompt, answer, *price)

    def _price(self) -> tuple[float, float] | None:
        """Return the US dollars per token of a prompt and of an answer, or None if a price is unknown."""
        listed = self._listed()
        inward, outward = self.settings.input_cost_per_token, self.settings.output_cost_per_token
        inward = listed.get("input_cost_per_token") if inward is None else inward
        outward = listed.get("output_cost_per_token") if outward is None else outward
        return None if inward is None or outward is None else (inward, outward)

    def _listed(self) -> dict[str, Any]:
        """Return the model's entry in LiteLLM's list. LiteLLM's own function would send a request to Ollama."""
        prices = self._litellm.model_cost
        if self.name in prices:
            return prices[self.name]
        provider, _, name = self.name.partition("/")
        entry = prices.get(name, {})
        return entry if entry.get("litellm_provider") == provider else {}


def _list_address_variables(provider: str) -> tuple[str, ...]:
    return f"{provider.upper()}_API_BASE", f"{provider.upper()}_BASE_URL"


def _is_strict(schema: Any) -> bool:
    """Return whether OpenAI's strict mode takes the schema: its objects are closed and have no optional fields."""
    try:
        if not schema.keys() <= STRICT_KEYWORDS:
            return False
        kinds, properties = schema.get("type", ()), schema.get("properties", {})
        is_object = "object" in ([kinds] if isinstance(kinds, str) else kinds)
        if is_object and schema.get("additionalProperties") is not False:
            return False
        if is_object and set(schema.get("required", ())) != properties.keys():
            return False
        inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
        if "items" in schema:
            inner.append(schema["items"])
        return all(map(_is_strict, inner))
    except (AttributeError, TypeError, RecursionError):  # The schema may come from the code.
        return False


def _get_details(part: Any) -> dict[str, Any]:
    """Return the server's own fields of a choice or of a message, as LiteLLM keeps them."""
    return getattr(part, "provider_specific_fields", None) or {}


def _describe(error: Exception, mask: CredentialMask) -> str:
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
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        return compute_backoff(attempt, FIRST_BACKOFF_SECONDS, 16.0) * random.uniform(0.75, 1.25)
    return min(max(0.0, asked), LONGEST_BACKOFF_SECONDS)
