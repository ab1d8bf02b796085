"""How many shards a job has, and how many of them at one time."""

from uuid import uuid4

import pytest

from rlm_batch.flows.sharding.coordinator import Sharding
from rlm_batch.flows.sharding.work_pool import Workers


def pool(*, places: int | None = None, runs_itself: bool = True) -> Workers:
    return Workers(uuid4(), "pool", places, True, runs_itself)


@pytest.mark.parametrize(
    ("asked", "total", "online", "shards"),
    [("auto", 25_000, 2, 3), ("auto", 100, 4, 4), ("auto", 3, 4, 3), (8, 100, 2, 8), (8, 5, 2, 5)],
)
def test_a_job_has_the_shards_that_were_asked_for_or_enough_for_its_size_and_the_workers(asked, total, online, shards):
    assert f"in {shards} shards" in Sharding(asked, total, pool(), online).described


@pytest.mark.parametrize(
    ("where", "online", "most"),
    [(pool(), 1, 2), (pool(), 4, 8), (pool(places=3), 4, 3), (pool(runs_itself=False), 1, 32)],
)
def test_no_more_shards_run_at_one_time_than_workers_or_their_pool_can_take(where, online, most):
    assert Sharding(100, 1000, where, online)._at_once() == most
