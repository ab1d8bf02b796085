"""Limits on the model calls, tokens and cost of a query tree or a whole flow run."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..errors import BudgetExceeded

ROUNDING_TOLERANCE = 1e-9  # relative to a cost limit; rounding errors in sums of fractions of a cent are smaller


@dataclass(frozen=True, slots=True)
class Usage:
    """The calls, tokens and cost that a model used. `cost` is in US dollars, or None if a price is unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if self.cost is None or other.cost is None else self.cost + other.cost,
        )

    def __sub__(self, other: "Usage") -> "Usage":
        cost = None if other.cost is None else -other.cost
        return self + Usage(-other.calls, -other.prompt_tokens, -other.completion_tokens, cost)

    @property
    def tokens(self) -> int:
        """Return the number of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


class Estimate(NamedTuple):
    """The maximum or expected tokens of a call's prompt and answer, and their prices in US dollars per token."""

    prompt_tokens: float = 0
    answer_tokens: float = 0
    prompt_price: float = 0.0
    answer_price: float = 0.0

    @property
    def tokens(self) -> float:
        """Return the tokens of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def cost(self) -> float:
        """Return the cost of prompt and answer in US dollars."""
        return self.prompt_tokens * self.prompt_price + self.answer_tokens * self.answer_price


NO_ESTIMATE = Estimate()  # the estimate of budgets that limit only calls


class Budget:
    """Limits on calls, tokens and cost (US dollars); None means no limit. Use it on one event loop only.

    Before a call, reserve its expected usage. After the call, settle its real usage. A call counts in the budget and in
    its `parent`: an execution's budget may limit the calls, and the flow run's budget the cost.

    The first calls reserve the most tokens that they can use. After a call has settled, its share of this maximum is
    known, and later calls reserve only the largest share so far. So calls with a high `max_tokens` and short answers do
    not block an almost unused budget. But a running call can use more than it reserved, and so exceed a limit.
    """

    def __init__(
        self,
        *,
        calls: int | None = None,
        tokens: int | None = None,
        cost: float | None = None,
        parent: "Budget | None" = None,
        is_total: bool = False,
    ) -> None:
        # Errors name the parameters that set the limits.
        self._calls_name = "max_total_llm_calls" if is_total else "max_llm_calls"
        self._tokens_name = "max_total_llm_tokens" if is_total else "max_llm_tokens"
        self._calls = calls
        self._tokens = tokens
        self._cost = cost
        self._ancestry: list[Budget] = [self]  # this budget, its parent, the parent's parent and so on
        if parent is not None:
            self._ancestry += parent._ancestry
        self.usage = Usage()  # total of settled calls
        self._reserved: list[Estimate] = []  # expected usage of running calls
        # Only the last ancestor uses these two.
        self._settled = asyncio.Event()  # set when the next call settles
        # The largest share of its maximum that a settled call has used, for prompts and for answers.
        self._shares: tuple[float, float] | None = None

    @property
    def remaining_calls(self) -> int | None:
        """Return how many more calls this budget's own limit allows; None means no limit."""
        return None if self._calls is None else max(0, self._calls - self.usage.calls - len(self._reserved))

    @property
    def limits_tokens(self) -> bool:
        """Return True if a reservation needs the maximum tokens of a call."""
        return any(budget._tokens is not None for budget in self._ancestry)

    @property
    def limits_cost(self) -> bool:
        """Return True if a reservation needs the prices of a call."""
        return any(budget._cost is not None for budget in self._ancestry)

    async def reserve(self, maximum: Estimate = NO_ESTIMATE) -> Callable[[Usage], None]:
        """Reserve one call. If it does not fit beside the running calls, wait until they settle.

        Returns:
            The function that settles the call: it replaces the reserved usage by the real one. Call it once.

        Raises:
            BudgetExceeded: The call would not fit even without other running calls.
        """
        expected = self._expect(maximum)
        while not all(budget._fits_beside_others(expected) for budget in self._ancestry):
            await self._ancestry[-1]._settled.wait()
            expected = self._expect(maximum)
        for budget in self._ancestry:
            budget._reserved.append(expected)
        return partial(self._settle, maximum, expected)

    def _expect(self, maximum: Estimate) -> Estimate:
        """Return the expected usage of a call. Raises BudgetExceeded if it would not fit even without other calls."""
        prompt_share, answer_share = self._ancestry[-1]._shares or (1.0, 1.0)
        expected = maximum._replace(
            prompt_tokens=maximum.prompt_tokens * prompt_share, answer_tokens=maximum.answer_tokens * answer_share
        )
        for budget in self._ancestry:
            budget._check_alone(expected)
        return expected

    def _settle(self, maximum: Estimate, expected: Estimate, usage: Usage) -> None:
        for budget in self._ancestry:
            budget._reserved.remove(expected)
            budget.usage += usage
        root = self._ancestry[-1]
        if usage.calls and maximum.tokens:
            prompt_share, answer_share = root._shares or (0.0, 0.0)
            root._shares = (
                max(prompt_share, usage.prompt_tokens / max(1, maximum.prompt_tokens)),
                max(answer_share, usage.completion_tokens / max(1, maximum.answer_tokens)),
            )
        root._settled.set()
        root._settled = asyncio.Event()

    def _check_alone(self, expected: Estimate) -> None:
        if self._calls is not None and self.usage.calls + 1 > self._calls:
            raise BudgetExceeded(
                f"all {self._calls:,} calls of the model are used up: make fewer, or raise `{self._calls_name}`"
            )
        if self._tokens is not None and self.usage.tokens + expected.tokens > self._tokens:
            raise BudgetExceeded(
                f"the call could take {math.ceil(expected.tokens):,} tokens, and of {self._tokens:,} "
                f"{max(0, self._tokens - self.usage.tokens):,} are left: ask for less, or raise `{self._tokens_name}`"
            )
        used = self.usage.cost or 0.0
        if self._cost is not None and used + expected.cost > self._cost * (1 + ROUNDING_TOLERANCE):
            raise BudgetExceeded(
                f"the call could cost ${expected.cost:.6f}, and of ${self._cost:g} ${max(0.0, self._cost - used):.6f} "
                f"are left: ask for less, or raise `max_cost`"
            )

    def _fits_beside_others(self, expected: Estimate) -> bool:
        """Return True if a call that fits alone also fits beside the running calls."""
        running = self._reserved
        if not running:
            return True
        if self._calls is not None and self.usage.calls + len(running) >= self._calls:
            return False
        tokens = self.usage.tokens + sum(call.tokens for call in running) + expected.tokens
        if self._tokens is not None and tokens > self._tokens:
            return False
        cost = (self.usage.cost or 0.0) + sum(call.cost for call in running) + expected.cost
        return self._cost is None or cost <= self._cost * (1 + ROUNDING_TOLERANCE)
