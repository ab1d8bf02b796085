"""Limits on the model calls, tokens and cost of a query tree or a whole flow run."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..errors import BudgetExceeded, ConfigurationError

ROUNDING_TOLERANCE = 1e-9  # relative to a cost limit; rounding errors in sums of fractions of a cent are smaller
# Bytes that a turn adds to the next prompt: an output of at most 10,000 characters, and sentences around it.
MAX_TURN_BYTES = 12_000


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

    def describe(self, cached: int = 0, seconds: float | None = None) -> str:
        """Return calls, tokens, cost, answers from the cache, and seconds in words."""
        parts: list[str] = []
        if self.calls:
            price = "cost unknown" if self.cost is None else f"${self.cost:.6f}"
            calls = "1 call" if self.calls == 1 else f"{self.calls:,} calls"
            parts.append(f"{calls}, {self.prompt_tokens:,} + {self.completion_tokens:,} tokens, {price}")
        if cached:
            parts.append(f"{cached:,} from the cache")
        if seconds is not None:
            parts.append(f"{seconds:.3g} s")
        return ", ".join(parts)


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


@dataclass(eq=False, slots=True)
class LastTurn:
    """The call that a recursive model keeps of its budgets, so that it can submit an answer when they are used up."""

    maximum: Estimate = NO_ESTIMATE  # the most that the call can use
    is_due: bool = False  # True if the model's next call is this one

    @staticmethod
    def estimate_after(turn: Estimate) -> Estimate:
        """Return the maximum after one more turn, whose output and whose answer are in the next prompt."""
        return turn._replace(prompt_tokens=turn.prompt_tokens + MAX_TURN_BYTES, answer_tokens=2 * turn.answer_tokens)


class Budget:
    """Limits on calls, tokens and cost (US dollars); None means no limit. Use it on one event loop only.

    Before a call, reserve its expected usage. After the call, settle its real usage. A call counts in the budget and in
    its `parent`: an execution's budget may limit the calls, and the flow run's budget the cost.

    The first calls reserve the most tokens that they can use. After a call has settled, its share of this maximum is
    known, and later calls reserve only the largest share so far. So calls with a high `max_tokens` and short answers do
    not block an almost unused budget. But a running call can use more than it reserved, and so exceed a limit.

    A recursive model keeps a call for its last turn, from its first turn on. All other calls have to leave it.
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
        self.kept = set[LastTurn]()  # last turns of the recursive models at work
        # The same of other runs, in a shared budget.
        self._reserved_elsewhere: list[Estimate] = []
        self._kept_elsewhere: list[Estimate] = []
        # Only the last ancestor uses these two.
        self._settled = asyncio.Event()  # set when the next call settles
        # The largest share of its maximum that a settled call has used, for prompts and for answers.
        self._shares: tuple[float, float] | None = None

    @property
    def remaining_calls(self) -> int | None:
        """Return how many more calls this budget's own limit allows; None means no limit."""
        if self._calls is None:
            return None
        return max(0, self._calls - self.usage.calls - len(self._reserved) - len(self.kept))

    @property
    def limits_tokens(self) -> bool:
        """Return True if a reservation needs the maximum tokens of a call."""
        return any(budget._tokens is not None for budget in self._ancestry)

    @property
    def limits_cost(self) -> bool:
        """Return True if a reservation needs the prices of a call."""
        return any(budget._cost is not None for budget in self._ancestry)

    async def reserve(
        self, maximum: Estimate = NO_ESTIMATE, last_turn: LastTurn | None = None
    ) -> Callable[[Usage], None]:
        """Reserve one call. If it does not fit beside the running calls, wait until they settle.

        Args:
            maximum: The most that the call can use.
            last_turn: The last turn of the recursive model that makes the call. It is kept from now on, unless it is
                this call.

        Returns:
            The function that settles the call: it replaces the reserved usage by the real one. Call it once.

        Raises:
            BudgetExceeded: The call would not fit even without other running calls.
        """
        root = self._ancestry[-1]
        while True:
            with root.open_shared():
                (expected,) = self._scale([maximum], unknown_share=1.0)
                problem = self._find_problem([expected], maximum, last_turn)
                if problem:
                    raise BudgetExceeded(problem)
                if not self._find_problem([expected], maximum, last_turn, beside_running=True):
                    self._take(expected, maximum, last_turn)
                    return partial(self._settle, maximum, expected)
            await root.wait_for_others()

    def open_shared(self) -> AbstractContextManager[None]:
        """Return a context in which no other process changes the budget. Only a shared budget needs one."""
        return nullcontext()

    async def wait_for_others(self) -> None:
        """Wait until another call settles."""
        await self._settled.wait()

    def _take(self, expected: Estimate, maximum: Estimate, last_turn: LastTurn | None) -> None:
        """Add a call to the running ones, and keep or release the last turn of its model."""
        for budget in self._ancestry:
            budget._reserved.append(expected)
            if last_turn is None:
                continue
            if last_turn.is_due:
                budget.kept.discard(last_turn)
            else:
                budget.kept.add(last_turn)
        if last_turn is not None and not last_turn.is_due:
            last_turn.maximum = last_turn.estimate_after(maximum)

    def keep(self, last_turn: LastTurn) -> None:
        """Keep a recursive model's last turn."""
        if last_turn not in self.kept:
            with self._ancestry[-1].open_shared():
                for budget in self._ancestry:
                    budget.kept.add(last_turn)

    def release(self, last_turn: LastTurn) -> None:
        """Keep a recursive model's last turn no longer."""
        if last_turn in self.kept:
            # The answer is not lost with the file of a shared budget.
            with suppress(ConfigurationError), self._ancestry[-1].open_shared():
                for budget in self._ancestry:
                    budget.kept.discard(last_turn)

    def find_batch_problem(self, maxima: Sequence[Estimate]) -> str:
        """Return why a batch of calls would not leave the kept last turns, or an empty text if it does.

        Answers may be short, so only the number of calls and their prompts count.
        """
        if not self.kept:
            return ""
        with self._ancestry[-1].open_shared():
            prompts = [maximum._replace(answer_tokens=0) for maximum in maxima]
            return self._find_problem(self._scale(prompts, unknown_share=0.0))

    def _scale(self, maxima: Sequence[Estimate], unknown_share: float) -> list[Estimate]:
        """Return the expected usage of calls: the largest shares so far of the most that they can use."""
        prompt_share, answer_share = self._ancestry[-1]._shares or (unknown_share, unknown_share)
        return [
            maximum._replace(
                prompt_tokens=maximum.prompt_tokens * prompt_share, answer_tokens=maximum.answer_tokens * answer_share
            )
            for maximum in maxima
        ]

    def _list_kept(self, maximum: Estimate, last_turn: LastTurn | None) -> list[Estimate]:
        """Return the expected usage of the last turns, of this model and of others, that a call must leave possible."""
        if last_turn is not None and last_turn.is_due:
            return []  # This call was itself kept.
        kept = [other.maximum for other in self.kept if other is not last_turn] + self._kept_elsewhere
        is_used = self.usage.calls or self._reserved or self._reserved_elsewhere or kept or self.kept
        if last_turn is not None and is_used:  # A limit that allows a single turn allows this one.
            kept.append(last_turn.estimate_after(maximum))
        return self._scale(kept, unknown_share=0.0)  # Only their number counts until a usual share is known.

    def _settle(self, maximum: Estimate, expected: Estimate, usage: Usage) -> None:
        root = self._ancestry[-1]
        # A paid answer is not lost with the file of a shared budget. The next call finds it missing.
        with suppress(ConfigurationError), root.open_shared():
            for budget in self._ancestry:
                budget._reserved.remove(expected)
                budget.usage += usage
            if usage.calls and maximum.tokens:
                prompt_share, answer_share = root._shares or (0.0, 0.0)
                root._shares = (
                    max(prompt_share, usage.prompt_tokens / max(1, maximum.prompt_tokens)),
                    max(answer_share, usage.completion_tokens / max(1, maximum.answer_tokens)),
                )
        root._settled.set()
        root._settled = asyncio.Event()

    def _find_problem(
        self,
        calls: list[Estimate],
        maximum: Estimate = NO_ESTIMATE,
        last_turn: LastTurn | None = None,
        *,
        beside_running: bool = False,
    ) -> str:
        """Return why calls do not fit in this budget or a parent, or an empty text if they do. See `reserve`."""
        for budget in self._ancestry:
            running = budget._reserved + budget._reserved_elsewhere if beside_running else []
            problem = budget._find_own_problem(running + calls, budget._list_kept(maximum, last_turn))
            if problem:
                return problem
        return ""

    def _find_own_problem(self, calls: Sequence[Estimate], kept: Sequence[Estimate]) -> str:
        """Return why calls do not fit beside the settled calls and the kept last turns, or an empty text if they do."""
        what = "the call" if len(calls) == 1 else f"the {len(calls):,} calls"
        beside = " beside the last turns of recursive models" if kept else ""
        if self._calls is not None:
            left = max(0, self._calls - self.usage.calls - len(kept))
            if len(calls) > left:
                state = f"all {self._calls:,} calls of the model are used up"
                if kept:
                    state = f"{what} cannot be made: of {self._calls:,} calls {left:,} are left{beside}"
                return f"{state}: make fewer, or raise `{self._calls_name}`"
        if self._tokens is not None:
            tokens = sum(call.tokens for call in calls)
            left = self._tokens - self.usage.tokens - sum(turn.tokens for turn in kept)
            if tokens > left:
                return (
                    f"{what} could take {math.ceil(tokens):,} tokens, and of {self._tokens:,} {max(0, int(left)):,} "
                    f"are left{beside}: ask for less, or raise `{self._tokens_name}`"
                )
        if self._cost is not None:
            if self.usage.cost is None:
                return "`max_cost` cannot limit a budget with calls of a model without a price: make another budget"
            cost = sum(call.cost for call in calls)
            left = self._cost - self.usage.cost - sum(turn.cost for turn in kept)
            if cost > left + self._cost * ROUNDING_TOLERANCE:
                return (
                    f"{what} could cost ${cost:.6f}, and of ${self._cost:g} ${max(0.0, left):.6f} are left{beside}: "
                    "ask for less, or raise `max_cost`"
                )
        return ""
