"""What the collector of garbage leaves alone while a flow run has its executions under way."""

import gc
import weakref

import pytest

from rlm_batch import batch
from rlm_batch.flows.engine.gc_freeze import MAX_FROZEN_BY_OTHERS, freeze_existing_objects


class Circle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_run_makes_is_collected_meanwhile_and_what_was_there_before_afterwards():
    gc.collect()
    before = Circle()
    earlier = weakref.ref(before)
    with freeze_existing_objects(), freeze_existing_objects():
        del before
        during = weakref.ref(Circle())
        gc.collect()
        assert during() is None
        assert earlier() is not None
    gc.collect()
    assert earlier() is None


def test_what_a_program_has_frozen_by_itself_stays_so():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        assert count > MAX_FROZEN_BY_OTHERS
        with freeze_existing_objects():
            pass
        assert gc.get_freeze_count() > MAX_FROZEN_BY_OTHERS
    finally:
        gc.unfreeze()


@pytest.mark.anyio
async def test_nothing_is_frozen_when_a_flow_run_is_over():
    await batch(["SUBMIT(a=gc)", "SUBMIT(a=1)"], on_failure="return")
    assert gc.get_freeze_count() <= MAX_FROZEN_BY_OTHERS
