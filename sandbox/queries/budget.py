"""Limits on the model calls, tokens and cost of a query tree or a whole flow run."""

import threading
from dataclasses import dataclass

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

    @property
    def tokens(self) -> int:
        """Return the number of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


class Budget:
    """Limits on calls, tokens and cost (US dollars); None means no limit. Safe to use from several threads.

    Before a call, reserve the most that it can use. After it, settle what it used, or release the reservation if the
    call failed. A budget with a `parent` charges both, atomically: an execution's budget may limit the calls, and the
    flow run's budget the cost.
    """

    def __init__(
        self,
        *,
        calls: int | None = None,
        tokens: int | None = None,
        cost: float | None = None,
        parent: "Budget | None" = None,
    ) -> None:
        self._calls = calls
        self._tokens = tokens
        self._cost = cost
        self._ancestry: list[Budget] = [self] if parent is None else [self, *parent._ancestry]
        self._lock: threading.RLock = parent._lock if parent is not None else threading.RLock()
        self.usage = Usage()  # total of settled calls
        self._reserved: dict[Reservation, tuple[int, float]] = {}

    @property
    def remaining_calls(self) -> int | None:
        """Return how many more calls this budget's own limit allows; None means no limit."""
        with self._lock:
            return None if self._calls is None else max(0, self._calls - self.usage.calls - len(self._reserved))

    @property
    def needs_estimates(self) -> bool:
        """Return True if reservations need the maximum tokens and cost of a call."""
        return any(budget._tokens is not None or budget._cost is not None for budget in self._ancestry)

    def reserve(self, tokens: int = 0, cost: float = 0.0) -> "Reservation":
        """Reserve one call with its maximum tokens and cost. Raises BudgetExceeded."""
        reservation = Reservation(self)
        with self._lock:
            for budget in self._ancestry:
                budget._check(tokens, cost)
            for budget in self._ancestry:
                budget._reserved[reservation] = (tokens, cost)
        return reservation

    def _settle(self, reservation: "Reservation", usage: Usage) -> None:
        with self._lock:
            for budget in self._ancestry:
                if budget._reserved.pop(reservation, None) is not None:
                    budget.usage += usage

    def _check(self, tokens: int, cost: float) -> None:
        calls = self.usage.calls + len(self._reserved)
        if self._calls is not None and calls + 1 > self._calls:
            raise BudgetExceeded(
                f"all {self._calls} calls of the model are used up: ask for less, or raise max_llm_calls"
            )
        tokens_taken = self.usage.tokens + sum(reserved for reserved, _ in self._reserved.values())
        if self._tokens is not None and tokens_taken + tokens > self._tokens:
            raise BudgetExceeded(
                f"the call could take {tokens:,} tokens, and of {self._tokens:,} "
                f"{max(0, self._tokens - tokens_taken):,} are left: ask for less, or raise max_llm_tokens"
            )
        cost_taken = (self.usage.cost or 0.0) + sum(reserved for _, reserved in self._reserved.values())
        if self._cost is not None and cost_taken + cost > self._cost * (1 + ROUNDING_TOLERANCE):
            raise BudgetExceeded(
                f"the call could cost ${cost:.6f}, and of ${self._cost:g} ${max(0.0, self._cost - cost_taken):.6f} are "
                "left: ask for less, or raise max_cost"
            )


class Reservation:
    """The reserved budget of one call. Only the first `settle` or `release` has an effect."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def settle(self, usage: Usage) -> None:
        """Replace the reserved amounts by the used ones."""
        self._budget._settle(self, usage)  # type: ignore[reportPrivateUsage]

    def release(self) -> None:
        """Return the reserved amounts to the budget."""
        self.settle(Usage())
