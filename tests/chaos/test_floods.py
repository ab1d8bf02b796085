"""Nothing that one sandbox sends holds its host's event loop, with all lanes, deadlines and cancellations on it.

`make chaos` measures every flood; `make test-full` some of each kind.
"""

import gc
import logging
from collections.abc import Iterator

import pytest

from rlm_batch import LocalSandbox

from ..infra.isolation_levels import find_strongest_level
from .floods import FLOODS, Flood, measure_pause

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left", "frozen_heap"), pytest.mark.timeout(120)]

LIMIT_SECONDS = 0.05  # beyond what the loop stands still without a flood, in the same process
TRIES = 3  # other processes of a machine take their time too: what holds the loop does so each time
SHORT = (
    "slow calls that nobody waits for", "large calls", "calls of escapes", "a million prompts by hand",
    "SUBMIT of as many lists as may be", "output in one frame", "file names", "headers without fields",
    "one result that is too large",
)  # fmt: skip
FLOOD_OF = {flood.name: flood for flood in FLOODS}


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Python's garbage collector passes over what the tests have loaded: what it takes for that is not the flood's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def check_pause(flood: Flood) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    block = LocalSandbox(isolation=find_strongest_level() or "none")  # type: ignore[reportArgumentType]
    await block.check()
    pauses: list[str] = []
    for _ in range(TRIES):
        idle, pause = await measure_pause(None, block, 0.2), await measure_pause(flood, block)
        pauses.append(f"{pause.longest * 1000:.0f} ms (idle {idle.longest * 1000:.0f} ms)")
        if pause.longest - idle.longest < LIMIT_SECONDS:
            break
    else:
        pytest.fail(f"{flood.name} held the event loop for {', '.join(pauses)}")
    print(f"{flood.name}: the loop's longest pause was {', '.join(pauses)}")


@pytest.mark.chaos
@pytest.mark.parametrize("name", FLOOD_OF)
async def test_no_flood_holds_the_event_loop(name: str) -> None:
    await check_pause(FLOOD_OF[name])


@pytest.mark.full
@pytest.mark.alone  # other tests beside it would hold the event loop too
@pytest.mark.parametrize("name", SHORT)
async def test_some_floods_of_each_kind_do_not_hold_the_event_loop(name: str) -> None:
    await check_pause(FLOOD_OF[name])
