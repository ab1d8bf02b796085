"""Limits of a saved block, which all flow runs on one Prefect server share."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, LocalSandbox, batch, chunks, sequence
from rlm_batch.tasks.capacity import slots
from rlm_batch.tasks.capacity.limits import open_limits

from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

LIMIT = "rlm-batch.local-sandbox.limited"
NAP = "import time; began = time.monotonic(); time.sleep(nap); SUBMIT(began=began, ended=time.monotonic())"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the polls and the times that runs hold slots. The server's leases keep their length."""
    for name, seconds in (
        ("POLL_SECONDS", 0.1),
        ("POLL_FOR_MORE_SECONDS", 0.4),
        ("WAITING_CHECK_SECONDS", 0.1),
        ("MIN_HOLD_SECONDS", 0.5),
    ):
        monkeypatch.setattr(slots, name, seconds)


@pytest.fixture
async def block() -> LocalSandbox:
    """Return a saved block that allows two open sandboxes at a time."""
    return await save_block(max_sandboxes=2)


async def save_block(name: str = "limited", **fields: Any) -> LocalSandbox:
    await LocalSandbox(isolation="none", **fields).save(name, overwrite=True)  # type: ignore[misc]
    return await LocalSandbox.aload(name)  # type: ignore[return-value]


def count_overlapping(spans: list[tuple[float, float]]) -> int:
    """Return the largest number of spans that overlap at one moment."""
    moments = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    now = peak = 0
    for _, change in moments:
        now += change
        peak = max(peak, now)
    return peak


def spans(*runs: Sequence[Any]) -> list[tuple[float, float]]:
    return [(result.began, result.ended) for run in runs for result in run]


async def run_naps(count: int, nap: float, **options: Any) -> Sequence[Any]:
    options = {"provider": "rlm-local-sandbox/limited", **options}
    return await batch(NAP, inputs=[{"nap": nap}] * count, **options)


async def in_use(name: str) -> int:
    async with get_client() as client:
        return (await client.read_global_concurrency_limit_by_name(name)).active_slots


async def hold_slots(count: int) -> bool:
    """Return True once this many slots of the limit are in use; the limit may not exist yet."""
    with suppress(ObjectNotFound):
        return await in_use(LIMIT) >= count
    return False


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"reuse_sandboxes": True}, {"executions_per_task": 200}], ids=["sandboxes", "executions of a task run"]
)
async def test_a_run_with_all_slots_gives_one_to_a_run_without_any(block, quick, options):
    long = asyncio.create_task(
        run_naps(5000, 0.15, max_workers=2, **options)
    )  # more executions than the test has time for
    await wait_until_async(lambda: hold_slots(2))
    assert len(await run_naps(2, 0.05)) == 2
    assert not long.done()
    long.cancel()
    with suppress(asyncio.CancelledError):
        await long
    assert await in_use(LIMIT) == 0
    assert await in_use(f"{LIMIT}.waiting") == 0


@pytest.mark.full
async def test_a_run_without_work_waits_for_no_slot(block, quick, tmp_path):
    first = await run_naps(3, 0.0, results_path=str(tmp_path / "ledger"))
    async with get_client() as client:
        answer = await client.increment_concurrency_slots_with_lease([LIMIT], 2, "concurrency", 3600)
        try:
            again = await asyncio.wait_for(run_naps(3, 0.0, results_path=str(tmp_path / "ledger")), 90)
        finally:
            await client.release_concurrency_slots_with_lease(answer.json()["lease_id"])
    assert [result.outputs for result in again] == [result.outputs for result in first]


@pytest.mark.full
async def test_a_sequence_and_a_reduction_hold_a_slot(block, quick):
    steps, report, others = await asyncio.gather(
        sequence([f"nap = 0.2; {NAP}"] * 3, provider="rlm-local-sandbox/limited"),
        chunks(
            f"nap = 0.1; {NAP}",
            chunks={"a": 1, "b": 2},
            reduce=f"nap = 0.2; {NAP}",
            provider="rlm-local-sandbox/limited",
        ),
        run_naps(4, 0.2),
    )
    reduction = report.reduction
    assert (
        count_overlapping([*spans(steps, list(report.results.values()), others), (reduction.began, reduction.ended)])
        <= 2
    )


async def test_the_limits_on_the_server_follow_the_block():
    name = "rlm-batch.local-sandbox.changing"
    async with get_client() as client:
        for block in (
            await save_block("changing", max_sandboxes=2, creations_per_second=5),
            await save_block("changing", max_sandboxes=7, creations_per_second=2.5),
        ):
            async with open_limits(block, str(uuid.uuid4())):
                limit = await client.read_global_concurrency_limit_by_name(name)
                rate = await client.read_global_concurrency_limit_by_name(f"{name}.creations")
            assert (limit.limit, limit.slot_decay_per_second) == (block.max_sandboxes, 0)
            assert (rate.limit, rate.slot_decay_per_second) == (1, block.creations_per_second)


@pytest.mark.full
async def test_blocks_with_one_limit_name_share_a_limit(quick):
    for name in ("one", "other"):
        await save_block(name, max_sandboxes=1, limit_name="our-account")
    runs = await asyncio.gather(*(run_naps(3, 0.15, provider=f"rlm-local-sandbox/{name}") for name in ("one", "other")))
    assert count_overlapping(spans(*runs)) == 1


async def test_a_server_that_sets_no_limits_is_a_one_sentence_error(closed_address):
    limited = LocalSandbox(isolation="none", max_sandboxes=2, limit_name="nobody-makes-me")
    message = r"^the block's concurrency limits could not be created on the Prefect server \(.*connect"
    with (
        temporary_settings({PREFECT_API_URL: f"http://{closed_address}/api"}),
        pytest.raises(ConfigurationError, match=message),
    ):
        async with open_limits(limited, str(uuid.uuid4())):
            pass


async def test_without_a_shared_server_limits_apply_within_the_process():
    block = LocalSandbox(isolation="none", max_sandboxes=2, creations_per_second=20, limit_name="here")
    peak = held = 0

    async def lane(shared: slots.Slots) -> None:
        nonlocal peak, held
        slot = await shared.acquire()
        assert slot is not None
        held += 1
        peak = max(peak, held)
        await shared.wait_for_creation()
        await asyncio.sleep(0.05)
        held -= 1
        await shared.release(slot)

    log = logging.getLogger("limits")
    with temporary_settings({PREFECT_API_URL: None}):
        async with slots.open_slots(block, "one", log) as one, slots.open_slots(block, "other", log) as other:
            began = time.monotonic()
            await asyncio.gather(*(lane(shared) for shared in (one, other) for _ in range(4)))
    assert peak == 2
    assert time.monotonic() - began >= 7 / 20
