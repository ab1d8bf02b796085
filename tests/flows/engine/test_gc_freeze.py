"""What the collector of garbage leaves alone while a flow run has its executions under way."""

import gc
import weakref

import pytest

from rlm_batch import batch
from rlm_batch.flows.engine.gc_freeze import OTHERS, set_aside


class Circle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_run_makes_is_collected_meanwhile_and_what_was_there_before_afterwards():
    gc.collect()
    before = Circle()
    earlier = weakref.ref(before)
    with set_aside(), set_aside():
        del before
        during = weakref.ref(Circle())
        gc.collect()
        assert during() is None
        assert earlier() is not None
    gc.collect()
    assert earlier() is None


def test_what_a_program_has_set_aside_by_itself_stays_so():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        assert count > OTHERS
        with set_aside():
            pass
        assert gc.get_freeze_count() > OTHERS
    finally:
        gc.unfreeze()


@pytest.mark.anyio
async def test_nothing_is_set_aside_when_a_flow_run_is_over():
    await batch(["SUBMIT(a=gc)", "SUBMIT(a=1)"], on_failure="return")
    assert gc.get_freeze_count() <= OTHERS
