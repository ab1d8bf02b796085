"""How many shards a job has, and how many of them are active at one time."""

from uuid import uuid4

import pytest

from rlm_batch.flows.sharding.planner import ShardPlan, compute_shard_count
from rlm_batch.flows.sharding.work_pool import WorkPool


def pool(*, free_places: int | None = None, runs_in_worker: bool = True) -> WorkPool:
    return WorkPool(uuid4(), "pool", free_places, True, runs_in_worker)


@pytest.mark.parametrize(
    ("asked", "total", "online", "shards"),
    [("auto", 25_000, 2, 3), ("auto", 100, 4, 4), ("auto", 3, 4, 3), (8, 100, 2, 8), (8, 5, 2, 5)],
)
def test_a_job_has_the_shards_that_were_asked_for_or_enough_for_its_size_and_the_workers(asked, total, online, shards):
    assert compute_shard_count(asked, total, online) == shards
    assert f"in {shards} shards" in ShardPlan(pool(), online, shards).description


@pytest.mark.parametrize(
    ("work_pool", "online", "limit"),
    [(pool(), 1, 2), (pool(), 4, 8), (pool(free_places=3), 4, 3), (pool(runs_in_worker=False), 1, 32)],
)
def test_no_more_shards_are_active_at_one_time_than_workers_or_their_pool_can_take(work_pool, online, limit):
    assert ShardPlan(work_pool, online, 100).compute_max_active() == limit
