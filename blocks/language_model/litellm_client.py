"""A model that LiteLLM serves: one request, with its retries, its errors and what it cost.

LiteLLM is imported when the first request is made, in a thread: it takes seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import random
from typing import TYPE_CHECKING, Any

from ...sandbox.budget import Usage
from ...sandbox.errors import ConfigurationError, QueryError
from ...sandbox.queries import Answer, NoAnswerError

if TYPE_CHECKING:
    from ...sandbox.queries import Message

LATE = 10.0  # seconds beyond a request's timeout: the first request of a process imports for seconds
BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each retry that was given no delay of its own
LONGEST_BACKOFF = 60.0  # seconds that a server may ask to be left alone
OVERHEAD = 16  # tokens at most that surround a message: its role and separators
SHOWN = 500  # characters of a server's message that an error tells
HIDDEN = "[...]"  # in a message, where a key stood
EXTRA = "queries need LiteLLM and DSPy, which are not installed: pip install 'rlm-batch[rlm]'"


def installed() -> None:
    """Raises ConfigurationError where LiteLLM or DSPy is missing; imports neither."""
    for name in ("litellm", "dspy"):
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(EXTRA)


def offline() -> None:
    """Tells LiteLLM to read its own list of prices: it asks the network otherwise, when it is imported, for 10 s."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def _import() -> Any:
    offline()
    try:
        litellm: Any = importlib.import_module("litellm")
    except ImportError as error:
        raise ConfigurationError(EXTRA) from error
    litellm.suppress_debug_info = True  # or it prints where to get help, on standard output
    if "LITELLM_LOG" not in os.environ:
        # It warns each time that a program begins another event loop, which is no news to anyone.
        logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    return litellm


async def imported() -> Any:
    """LiteLLM. Raises ConfigurationError."""
    return await asyncio.to_thread(_import)


class ServedModel:
    """One model of a `LanguageModel`; see there for what its settings mean."""

    def __init__(
        self,
        name: str,
        *,
        api_key: str | None,
        api_base: str | None,
        sampling: dict[str, Any],
        timeout: float,
        retries: int,
        price: tuple[float | None, float | None],
    ) -> None:
        self.name = name
        self._api_key = api_key
        self._api_base = api_base
        self._sampling = sampling
        self._timeout = timeout
        self._retries = retries
        self._own_price = price
        self._litellm: Any = None

    async def ask(self, messages: list[Message]) -> Answer:
        """The answer, after retries where that can help. Raises QueryError, Unanswered and ConfigurationError."""
        litellm = self._litellm = self._litellm or await imported()
        attempt = 0
        while True:
            attempt += 1
            # Its own timeout begins anew with each piece of an answer: one that trickles in would never end.
            whole = asyncio.timeout(self._timeout + LATE)
            try:
                async with whole:
                    response = await litellm.acompletion(
                        model=self.name,
                        messages=messages,
                        api_key=self._api_key,
                        api_base=self._api_base,
                        timeout=self._timeout,
                        num_retries=0,  # they are ours: LiteLLM's would hide what they cost
                        max_retries=0,
                        **self._sampling,
                    )
            except Exception as raised:  # noqa: BLE001 - LiteLLM raises the errors of a hundred clients
                late = TimeoutError(f"its answer was not whole after {self._timeout:g} s")
                error = late if whole.expired() else raised
                if attempt > self._retries or not self._passing(error):
                    tries = f" in {attempt} tries" if attempt > 1 else ""
                    raise QueryError(f"the model {self.name} did not answer{tries}: {self._said(error)}") from None
                await asyncio.sleep(_delay(error, attempt))
            else:
                return self._read(response, messages)

    def _passing(self, error: Exception) -> bool:
        """Whether asking again may help."""
        kinds = self._litellm.exceptions
        return isinstance(
            error,
            (
                TimeoutError,
                kinds.Timeout,
                kinds.RateLimitError,
                kinds.InternalServerError,
                kinds.ServiceUnavailableError,
                kinds.BadGatewayError,
                kinds.APIConnectionError,
            ),
        )

    def _said(self, error: Exception) -> str:
        """The error's text without a key: servers repeat the one that they refuse."""
        # Of an answer that it cannot read LiteLLM tells its own traceback as well.
        text = str(error).removeprefix("litellm.").partition("Traceback (most recent call last)")[0].strip()
        text = text or type(error).__name__
        secrets = [value for name, value in os.environ.items() if name.endswith("_API_KEY")]
        for secret in (self._api_key, *secrets):
            if secret:
                text = text.replace(secret, HIDDEN)
        return text[:SHOWN]

    def _read(self, response: Any, messages: list[Message]) -> Answer:
        choice = response.choices[0] if response.choices else None
        text = choice.message.content if choice is not None else None
        # A text on its way to the code is UTF-8, and a server may send half a surrogate pair.
        text = None if text is None else text.encode("utf-8", "replace").decode("utf-8")
        usage = self._usage(response, messages, text or "")
        if text is None:
            reason = f" (finish_reason: {choice.finish_reason})" if choice is not None else ""
            raise NoAnswerError(f"the model {self.name} answered without a text{reason}", usage)
        return Answer(text, usage)

    def _usage(self, response: Any, messages: list[Message], text: str) -> Usage:
        counted = getattr(response, "usage", None)
        prompt = max(0, getattr(counted, "prompt_tokens", 0) or 0)
        completion = max(0, getattr(counted, "completion_tokens", 0) or 0)
        if not prompt:  # every prompt has tokens: this server counts none
            prompt = self._litellm.token_counter(model=self.name, messages=messages)
            completion = completion or self._litellm.token_counter(model=self.name, text=text)
            cost = None
        else:
            cost = response._hidden_params.get("response_cost")  # with discounts, such as those of a provider's cache
        price = self._price()
        if price is not None and (cost is None or self._own_price != (None, None)):
            cost = price[0] * prompt + price[1] * completion
        if not cost:
            cost = None if price is None else 0.0
        return Usage(1, prompt, completion, None if cost is None else max(0.0, cost))

    async def estimate_max_usage(self, messages: list[Message]) -> tuple[int, float]:
        """The most tokens and US dollars; see `Model.most`. A token has a byte at least."""
        self._litellm = self._litellm or await imported()
        price, answer = self._price(), self._longest_answer()
        if price is None:
            raise ConfigurationError(
                f"no price of the model {self.name} is known, so that its cost cannot be limited: set "
                "input_cost_per_token and output_cost_per_token in its LanguageModel block, or max_cost to None"
            )
        if answer is None:
            raise ConfigurationError(
                f"it is not known how long an answer of the model {self.name} can be, so that its cost cannot be "
                "limited: set max_tokens in its LanguageModel block"
            )
        prompt = sum(len(message["content"].encode("utf-8", "replace")) + OVERHEAD for message in messages)
        return prompt + answer, prompt * price[0] + answer * price[1]

    def _price(self) -> tuple[float, float] | None:
        """US dollars for a token of a prompt and of an answer, None where that is unknown."""
        listed = self._listed()
        inward, outward = self._own_price
        inward = listed.get("input_cost_per_token") if inward is None else inward
        outward = listed.get("output_cost_per_token") if outward is None else outward
        return None if inward is None or outward is None else (inward, outward)

    def _longest_answer(self) -> int | None:
        return self._sampling.get("max_tokens") or self._listed().get("max_output_tokens")

    def _listed(self) -> dict[str, Any]:
        """What LiteLLM's list says of the model. Its own function for that would ask Ollama's server."""
        prices = self._litellm.model_cost
        if self.name in prices:
            return prices[self.name]
        provider, _, name = self.name.partition("/")
        found = prices.get(name, {})
        return found if found.get("litellm_provider") == provider else {}


def _delay(error: Exception, attempt: int) -> float:
    """Seconds before a request is made again: what the server asked for, or a growing delay with jitter."""
    headers = getattr(error, "litellm_response_headers", None) or {}
    try:
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        return BACKOFF[min(attempt, len(BACKOFF)) - 1] * random.uniform(0.75, 1.25)
    return min(max(0.0, asked), LONGEST_BACKOFF)
