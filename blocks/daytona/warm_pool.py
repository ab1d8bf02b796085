"""Warm pools: started sandboxes that Daytona keeps ready, from the snapshot of a flow run's set-up.

Each sandbox of a pool costs money. So the run deletes its pool at the end, and meanwhile keeps it no larger than the
number of sandboxes that the run still has to open. Daytona gives a pool no labels: the prefix of its snapshot's name
tells that rlm-batch made it. Daytona has one pool per snapshot and region, so runs with the same set-up share it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import daytona
from daytona._utils.errors import intercept_errors

from ...sandbox.caller import name_parameter
from ...sandbox.errors import QuotaExceeded, RlmBatchError
from ..provider import WarmPoolInfo
from .client import SharedClient, use_client
from .environment import SNAPSHOT_PREFIX
from .error_table import Meaning
from .errors import CALL_SECONDS, find_row, get_status, is_transient, retry_call
from .settings import DaytonaSettings

T = TypeVar("T")

log = logging.getLogger("rlm_batch.daytona")


class RunPool:
    """The warm pool of one flow run. A separate task makes and shrinks it, so that no sandbox waits for it.

    Args:
        limit: The most sandboxes in the pool.
        expected: The sandboxes that the run will open.
    """

    def __init__(self, limit: int, expected: int) -> None:
        self.is_refused = False  # Daytona made no pool.
        self._limit = limit
        self._unrequested = self._unopened = expected
        self._is_over = False  # no more calls: Daytona refused one, or another run has made the pool
        self._size = 0
        self._id: str | None = None
        self._source: tuple[DaytonaSettings, str] | None = None  # the settings, and the snapshot's name
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def count_opening(self) -> Iterator[None]:
        """Count the sandbox that the block opens. If the account's quota is used up, make room for it."""
        self._unrequested -= 1
        try:
            yield
        except BaseException as error:
            self._unrequested += 1
            cause = error.__cause__ if isinstance(error, QuotaExceeded) else None
            setting = name_parameter("warm_pool")
            if cause is not None and find_row(cause).meaning is Meaning.QUOTA and self._size and self._limit:
                log.warning("the account's quota is used up, so the run empties its warm pool: lower %s", setting)
                self._limit = 0
                self._start_task()
            raise
        self._unopened -= 1
        self._start_task()

    def make(self, settings: DaytonaSettings, snapshot: str) -> None:
        """Make the pool from this snapshot, unless the run has made it."""
        self._source = settings, snapshot
        self._start_task()

    async def close(self) -> None:
        """Stop changing the pool, and wait for the end of the last call."""
        self._is_over = True
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _start_task(self) -> None:
        is_busy = self._task is not None and not self._task.done()
        if self._source is not None and not is_busy and not self._is_over and self._choose_size() != self._size:
            self._task = asyncio.create_task(self._adjust(*self._source))

    def _choose_size(self) -> int:
        """Return how many warm sandboxes the run can use. Daytona may be handing over those in creation calls."""
        if self._id is None:
            return max(0, min(self._limit, self._unrequested))
        return max(0, min(self._limit, self._size, self._unopened))

    async def _adjust(self, settings: DaytonaSettings, snapshot: str) -> None:
        try:
            async with use_client(settings, "it could not be made, or changed") as client:
                pools = client.sdk.warm_pool
                region = getattr(client.sdk, "_target", None)  # the region of the SDK's sandboxes
                while not self._is_over and (size := self._choose_size()) != self._size:
                    if self._id is not None:
                        await _call(partial(pools.update, self._id, size))
                    else:
                        self._id = (await _call(partial(pools.create, snapshot, size, region))).id
                        log.info("Daytona keeps up to %d sandboxes of snapshot %s warm for this run", size, snapshot)
                    self._size = size
        except RlmBatchError as error:
            self._is_over = True
            if self._id is None and isinstance(error.__cause__, daytona.DaytonaConflictError):
                return  # Another run has made the pool, or a call of this one whose answer was lost.
            self.is_refused = self._id is None and get_status(error.__cause__ or error) in range(400, 500)
            log.warning("the run continues without a warm pool: %s", error.summary)


_pools: dict[str, RunPool] = {}  # The keys are flow runs.


def find_run_pool(settings: DaytonaSettings, run: str, expected: int) -> RunPool:
    """Return the pool of a flow run. A run without `warm_pool` or with a single sandbox has one that stays empty."""
    if settings.warm_pool is None or expected < 2:
        return RunPool(0, 0)
    return _pools.setdefault(run, RunPool(settings.warm_pool, expected))


async def close_run_pool(run: str) -> RunPool | None:
    """Stop the changes of a flow run's pool, and return the pool, or None if this process made no pool for the run."""
    pool = _pools.pop(run, None)
    if pool is not None:
        await pool.close()
    return pool


async def list_pools(client: SharedClient) -> list[WarmPoolInfo]:
    """Return the pools of snapshots that this package made, none if the account has no pools. Raise DaytonaError."""
    try:
        pools = await _call(client.sdk.warm_pool.list)
    except (daytona.DaytonaNotFoundError, daytona.DaytonaForbiddenError):
        return []
    return [
        WarmPoolInfo(pool.id, pool.snapshot, pool.target, int(pool.current_size), int(pool.pool), pool.error_reason)
        for pool in pools
        if pool.snapshot.startswith(SNAPSHOT_PREFIX)
    ]


async def delete_pool(client: SharedClient, pool_id: str) -> None:
    """Delete a pool and its sandboxes. Deleting a missing one is not an error. Raise DaytonaError."""
    try:
        await _call(lambda: client.sdk.warm_pool.delete(pool_id))
    except daytona.DaytonaNotFoundError:
        return


async def _call(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call of the SDK's warm pools. Raise DaytonaError, which these methods of the SDK do not."""

    @intercept_errors()
    async def call_once() -> T:
        async with asyncio.timeout(CALL_SECONDS):
            return await call()

    return await retry_call(call_once, is_passing=_is_passing)


def _is_passing(error: Exception) -> bool:
    """Return whether a call is repeated: only if it failed or was throttled, because pools are no reason to wait."""
    status = get_status(error)
    return is_transient(error) and (status is None or status == 429 or status >= 500)
