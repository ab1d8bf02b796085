"""Limits on the model calls, tokens and cost of a query tree or a whole flow run."""

import concurrent.futures
import math
import threading
from dataclasses import dataclass
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

    def scale(self, prompt_share: float, answer_share: float) -> "Estimate":
        """Return the estimate with these shares of its tokens."""
        tokens = self.prompt_tokens * prompt_share, self.answer_tokens * answer_share
        return Estimate(*tokens, self.prompt_price, self.answer_price)


NO_ESTIMATE = Estimate()  # for budgets that limit only calls


class Budget:
    """Limits on calls, tokens and cost (US dollars); None means no limit. Safe to use from several threads.

    Before a call, reserve its expected usage. After the call, settle its real usage, or release the reservation if the
    call failed. A call counts in the budget and in its `parent`, atomically: an execution's budget may limit the calls,
    and the flow run's budget the cost.

    Before the first call has settled, each call is expected to use its maximum. Later, each call is expected to use the
    largest share of the maximum that a settled call has used. So a long possible answer does not block an almost unused
    budget. But running calls can use more than expected, and exceed a limit by at most one longest answer each.
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
        # Errors name the parameters that set the limits: those of an execution, or those of all executions together.
        names = ("max_total_llm_calls", "max_total_llm_tokens") if is_total else ("max_llm_calls", "max_llm_tokens")
        self._calls_name, self._tokens_name = names
        self._calls = calls
        self._tokens = tokens
        self._cost = cost
        self._ancestry: list[Budget] = [self] if parent is None else [self, *parent._ancestry]
        self._lock: threading.RLock = parent._lock if parent is not None else threading.RLock()
        self.usage = Usage()  # total of settled calls
        self._reserved: dict[Reservation, Estimate] = {}
        # Only the last ancestor uses these: the waiting calls, and the largest shares that settled calls have used.
        self._waiting: list[concurrent.futures.Future[None]] = []
        self._shares: tuple[float, float] | None = None  # share of the prompt, share of the answer

    @property
    def remaining_calls(self) -> int | None:
        """Return how many more calls this budget's own limit allows; None means no limit."""
        with self._lock:
            return None if self._calls is None else max(0, self._calls - self.usage.calls - len(self._reserved))

    @property
    def limits_tokens(self) -> bool:
        """Return True if a reservation needs the maximum tokens of a call."""
        return any(budget._tokens is not None for budget in self._ancestry)

    @property
    def limits_cost(self) -> bool:
        """Return True if a reservation needs the prices of a call."""
        return any(budget._cost is not None for budget in self._ancestry)

    def check(self, most: Estimate = NO_ESTIMATE) -> None:
        """Raise BudgetExceeded if the call would not fit even without other running calls."""
        with self._lock:
            expected = self._expect(most)
            for budget in self._ancestry:
                budget._check_alone(expected)

    async def reserve(self, most: Estimate = NO_ESTIMATE) -> "Reservation":
        """Reserve one call. If it does not fit beside the running calls, wait until they settle.

        Raises:
            BudgetExceeded: The call would not fit even without other running calls.
        """
        while True:
            with self._lock:
                self.check(most)
                expected = self._expect(most)
                if all(budget._fits_beside_others(expected) for budget in self._ancestry):
                    reservation = Reservation(self, most)
                    for budget in self._ancestry:
                        budget._reserved[reservation] = expected
                    return reservation
                settled: concurrent.futures.Future[None] = concurrent.futures.Future()
                self._ancestry[-1]._waiting.append(settled)
            import asyncio  # It takes 20 ms, and whoever only checks options does not need it.

            await asyncio.wrap_future(settled)

    def _expect(self, most: Estimate) -> Estimate:
        """Return the expected usage of the call."""
        return most.scale(*(self._ancestry[-1]._shares or (1.0, 1.0)))

    def _settle(self, reservation: "Reservation", usage: Usage) -> None:
        root = self._ancestry[-1]
        with self._lock:
            if reservation not in self._reserved:
                return
            for budget in self._ancestry:
                del budget._reserved[reservation]
                budget.usage += usage
            if usage.calls and (most := reservation.most).tokens:
                prompts, answers = root._shares or (0.0, 0.0)
                prompts = max(prompts, usage.prompt_tokens / max(1, most.prompt_tokens))
                root._shares = prompts, max(answers, usage.completion_tokens / max(1, most.answer_tokens))
            waiting, root._waiting = root._waiting, []
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

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
        others = self._reserved.values()
        tokens = self.usage.tokens + sum(other.tokens for other in others) + expected.tokens
        cost = (self.usage.cost or 0.0) + sum(other.cost for other in others) + expected.cost
        return not others or (
            (self._calls is None or self.usage.calls + len(others) < self._calls)
            and (self._tokens is None or tokens <= self._tokens)
            and (self._cost is None or cost <= self._cost * (1 + ROUNDING_TOLERANCE))
        )


class Reservation:
    """The reserved budget of a call that uses at most `most`. Only the first `settle` or `release` has an effect."""

    def __init__(self, budget: Budget, most: Estimate) -> None:
        self.most = most
        self._budget = budget

    def settle(self, usage: Usage) -> None:
        """Replace the reserved amounts by the used amounts."""
        self._budget._settle(self, usage)  # type: ignore[reportPrivateUsage]

    def release(self) -> None:
        """Return the reserved amounts to the budget."""
        self.settle(Usage())
