"""Tests of budgets: a call is reserved before it is made, settled after it, and released if it fails."""

import asyncio
from collections.abc import Callable

import pytest

from rlm_batch import BudgetExceeded
from rlm_batch.sandbox.queries.budget import Budget, Estimate, Usage

from ...infra.waiting import HANG_SECONDS

pytestmark = pytest.mark.anyio

# The most that a call can use: no prompt tokens, and 100 answer tokens at $0.01 each.
MOST = Estimate(0, 100, 0.0, 0.01)


async def test_a_failed_call_is_available_again() -> None:
    budget = Budget(calls=2)
    first, second = await budget.reserve(), await budget.reserve()
    third = asyncio.create_task(budget.reserve())
    await asyncio.sleep(0)
    assert not third.done(), "it waits for the calls under way"
    first(Usage())
    (await third)(Usage(1, 1, 1, 0.25))
    second(Usage(1, 10, 5, 0.25))
    assert budget.usage == Usage(2, 11, 6, 0.5)
    assert budget.remaining_calls == 0
    with pytest.raises(BudgetExceeded, match="all 2 calls"):
        await budget.reserve()


async def start_two(budget: Budget) -> tuple[Callable[[Usage], None], asyncio.Task[Callable[[Usage], None]]]:
    """Reserve a call, and begin to reserve a second one, which has to wait."""
    first = await budget.reserve(MOST)
    second = asyncio.create_task(budget.reserve(MOST))
    await asyncio.sleep(0)
    assert not second.done()
    return first, second


@pytest.mark.parametrize("budget", [Budget(tokens=150), Budget(cost=1.5)], ids=["tokens", "cost"])
async def test_a_call_that_exceeds_the_free_budget_waits_for_others_to_settle(budget: Budget) -> None:
    first, second = await start_two(budget)
    first(Usage(1, 0, 10, 0.1))
    await second


async def test_a_waiting_call_is_refused_when_others_use_up_the_budget() -> None:
    first, second = await start_two(Budget(tokens=150))
    first(Usage(1, 0, 100, 1.0))
    with pytest.raises(BudgetExceeded, match="could take 100 tokens, and of 150 50 are left"):
        await second


async def test_a_cancelled_wait_reserves_nothing() -> None:
    budget = Budget(tokens=150)
    first, second = await start_two(budget)
    second.cancel()
    first(Usage())
    with pytest.raises(asyncio.CancelledError):
        await second
    await budget.reserve(MOST)


async def test_after_the_first_answer_calls_reserve_the_longest_answer_so_far() -> None:
    budget = Budget(tokens=300)
    (await budget.reserve(MOST))(Usage(1, 0, 20, 0.2))
    (await budget.reserve(MOST))(Usage(1, 0, 10, 0.1))
    under_way = [await budget.reserve(MOST) for _ in range(13)]  # tokens: 30 settled + 13 * 20 reserved = 290
    fourteenth = asyncio.create_task(budget.reserve(MOST))
    await asyncio.sleep(0)
    assert not fourteenth.done()
    for settle in under_way:
        settle(Usage(1, 0, 20, 0.2))
    with pytest.raises(BudgetExceeded, match="could take 20 tokens, and of 300 10 are left"):
        await fourteenth


async def test_a_long_prompt_reserves_its_length_after_short_answers() -> None:
    budget = Budget(tokens=1000)
    (await budget.reserve(Estimate(40, 100)))(Usage(1, 10, 1, 0.0))
    with pytest.raises(BudgetExceeded, match="could take 1,001 tokens"):
        await budget.reserve(Estimate(4000, 100))


async def test_each_running_call_exceeds_a_limit_by_at_most_one_longest_answer() -> None:
    budget = Budget(tokens=300)
    (await budget.reserve(MOST))(Usage(1, 0, 1, 0.01))
    under_way = [await budget.reserve(MOST) for _ in range(8)]
    for settle in under_way:
        settle(Usage(1, 0, 100, 1.0))
    assert budget.usage.tokens <= 300 + 8 * 100
    with pytest.raises(BudgetExceeded):
        await budget.reserve(MOST)


async def test_a_refused_call_uses_no_budget() -> None:
    above = Budget(cost=1.0)
    one, other = Budget(calls=1, parent=above), Budget(calls=5, parent=above)
    (await one.reserve())(Usage(1, 1, 1, 0.6))
    for budget in (one, other):
        with pytest.raises(BudgetExceeded):
            await budget.reserve(Estimate(0, 100, 0.0, 0.005))
    (await other.reserve(Estimate(0, 100, 0.0, 0.004)))(Usage(1, 1, 1, 0.3))
    assert (one.remaining_calls, other.remaining_calls) == (0, 4)
    assert above.usage.cost == pytest.approx(0.9)


async def test_tenths_of_a_cent_add_up_to_the_limit() -> None:
    budget, most = Budget(cost=0.001), Estimate(0, 1, 0.0, 0.0001)
    for _ in range(10):
        (await budget.reserve(most))(Usage(1, 0, 1, 0.0001))
    with pytest.raises(BudgetExceeded):
        await budget.reserve(most)


async def test_an_unknown_price_makes_the_sum_unknown() -> None:
    budget = Budget()
    (await budget.reserve())(Usage(1, 1, 1, None))
    (await budget.reserve())(Usage(1, 1, 1, 0.5))
    assert budget.usage == Usage(2, 2, 2, None)


async def test_a_large_call_is_not_kept_out_by_small_ones() -> None:
    budget, small = Budget(tokens=1000), Estimate(0, 10)
    (await budget.reserve(small))(Usage(1, 0, 10, 0.0))  # calls are expected to use their most
    is_over = False

    async def ask_on_and_on() -> None:
        while not is_over:
            settle = await budget.reserve(small)
            await asyncio.sleep(0)
            settle(Usage())

    asking = [asyncio.create_task(ask_on_and_on()) for _ in range(16)]
    async with asyncio.timeout(HANG_SECONDS):
        (await budget.reserve(Estimate(0, 900)))(Usage())
    is_over = True
    await asyncio.gather(*asking)
