"""Tests of budgets: reserved before a call, settled after it, and released if it fails."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlm_batch import BudgetExceeded
from rlm_batch.sandbox.queries.budget import Budget, Usage


def test_no_more_calls_are_reserved_than_there_are_and_a_failed_one_is_given_back():
    budget = Budget(calls=2)
    first, second = budget.reserve(), budget.reserve()
    with pytest.raises(BudgetExceeded, match="all 2 calls"):
        budget.reserve()
    first.release()
    third = budget.reserve()
    second.settle(Usage(1, 10, 5, 0.25))
    third.settle(Usage(1, 1, 1, 0.25))
    assert budget.usage == Usage(2, 11, 6, 0.5)
    assert budget.remaining_calls == 0
    with pytest.raises(BudgetExceeded):
        budget.reserve()


def test_the_most_that_a_call_can_take_is_held_until_it_is_known_what_it_took():
    budget = Budget(tokens=100, cost=1.0)
    held = budget.reserve(tokens=90, cost=0.5)
    with pytest.raises(BudgetExceeded, match="could take 20 tokens, and of 100 10 are left"):
        budget.reserve(tokens=20, cost=0.1)
    with pytest.raises(BudgetExceeded, match=r"could cost \$0.600000, and of \$1 \$0.500000 are left"):
        budget.reserve(tokens=5, cost=0.6)
    held.settle(Usage(1, 20, 5, 0.125))
    budget.reserve(tokens=75, cost=0.875)


def test_a_refused_call_takes_nothing_from_a_budget_or_from_the_one_above():
    above = Budget(cost=1.0)
    one, other = Budget(calls=1, parent=above), Budget(calls=5, parent=above)
    one.reserve(cost=0.6)
    with pytest.raises(BudgetExceeded):
        one.reserve(cost=0.1)
    with pytest.raises(BudgetExceeded):
        other.reserve(cost=0.5)
    other.reserve(cost=0.4).settle(Usage(1, 1, 1, 0.3))
    assert (one.remaining_calls, other.remaining_calls) == (0, 4)
    assert above.usage.cost == 0.3


def test_a_call_is_settled_or_released_once():
    budget = Budget(calls=3)
    held = budget.reserve()
    held.settle(Usage(1, 2, 3, 0.5))
    held.settle(Usage(1, 2, 3, 0.5))
    held.release()
    assert budget.usage == Usage(1, 2, 3, 0.5)
    assert budget.remaining_calls == 2


def test_tenths_of_a_cent_add_up_to_the_limit():
    budget = Budget(cost=0.001)
    for _ in range(10):
        budget.reserve(cost=0.0001).settle(Usage(1, 0, 0, 0.0001))
    with pytest.raises(BudgetExceeded):
        budget.reserve(cost=0.0001)


def test_an_unknown_price_makes_the_sum_unknown_and_not_zero():
    budget = Budget()
    budget.reserve().settle(Usage(1, 1, 1, None))
    budget.reserve().settle(Usage(1, 1, 1, 0.5))
    assert budget.usage == Usage(2, 2, 2, None)


def test_threads_that_reserve_settle_and_release_never_pass_a_limit_and_lose_nothing():
    above = Budget(tokens=100_000, cost=40.0)
    budgets = [Budget(calls=150, parent=above) for _ in range(4)]
    settled: list[Usage] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        budget = budgets[number % 4]
        for _ in range(100):
            try:
                held = budget.reserve(tokens=300, cost=0.125)
            except BudgetExceeded:
                continue
            if chance.random() < 0.3:
                held.release()
            else:
                usage = Usage(1, chance.randrange(200), chance.randrange(100), chance.randrange(9) / 64)
                held.settle(usage)
                settled.append(usage)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert above.usage == sum(settled, Usage())
    assert above.usage.tokens <= 100_000
    assert above.usage.cost is not None
    assert above.usage.cost <= 40.0
    assert [budget.usage.calls <= 150 for budget in budgets] == [True] * 4
    assert sum((budget.usage for budget in budgets), Usage()) == above.usage
