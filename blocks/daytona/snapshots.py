"""The snapshots that keep a sandbox's set-up, so that later sandboxes and runs start without one.

A snapshot's name contains a hash of the sandbox's origin, `setup`, packages and commit. Uploaded files are not part of
it: every edit of a module would make another snapshot, and an organization may have only some dozens of them.
"""

import asyncio
import hashlib
import json
import logging
import time
from functools import partial
from weakref import WeakKeyDictionary

import daytona

from ..provider import SnapshotInfo
from .client import NAME_PREFIX, get_account_key
from .errors import get_message, get_state, retry_call, says_gone
from .settings import DaytonaSettings

SNAPSHOT_PREFIX = f"{NAME_PREFIX}env-"
FORMAT = 1  # part of every name. After a change of this number, new snapshots are made.
MIN_SETUP_SECONDS = 5.0  # With "auto", a faster set-up is not kept.
CAPTURE_SECONDS = 900.0  # Daytona's own limit for a capture (daytonaio/daytona#4990)
PAGE_SIZE = 100  # snapshots in one page of a list
CHANGING_STATES = ("building", "pending", "pulling", "snapshotting", "unknown_default_open_api")

log = logging.getLogger("rlm_batch.daytona")


class Environment:
    """The set-up of a Daytona sandbox, and its snapshot.

    Attributes:
        name: The snapshot's name.
        has_snapshot: Whether sandboxes can start from the snapshot; None before the first look.
        is_refused: Whether the set-up is not kept. This process then does not try again.
        lock: Held while the first sandbox is opened, so that the others wait until its set-up is kept or not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_snapshot: bool | None = None
        self.is_refused = False
        self.lock = asyncio.Lock()

    async def find_snapshot(self, settings: DaytonaSettings, client: daytona.AsyncDaytona) -> bool:
        """Return whether sandboxes can start from the snapshot. Wait while Daytona makes or removes it."""
        if self.has_snapshot is None:
            try:
                self.has_snapshot = await _wait_for_snapshot(client, self.name, settings.start_timeout)
            except daytona.DaytonaError as error:
                self._give_up(get_message(error))
        return bool(self.has_snapshot)

    async def keep(
        self, settings: DaytonaSettings, client: daytona.AsyncDaytona, remote: daytona.AsyncSandbox, seconds: float
    ) -> None:
        """Make the snapshot from a sandbox whose set-up took `seconds`. A failure is only logged."""
        if settings.setup_snapshot != "always" and seconds < MIN_SETUP_SECONDS:
            self.is_refused = True
            return
        failure = "the capture failed"
        try:
            await remote.create_snapshot(self.name, CAPTURE_SECONDS)
        except daytona.DaytonaError as error:
            failure = get_message(error)
        # Look for the snapshot, because the answer says too little. Daytona reports success for a failed capture
        # (daytonaio/daytona#4990), and refuses the name if another machine has kept the same set-up.
        self.has_snapshot = None
        if await self.find_snapshot(settings, client):
            log.info("Daytona's snapshot %s keeps the set-up, which took %.0f s", self.name, seconds)
        elif not self.is_refused:
            self._give_up(failure)

    def _give_up(self, reason: str) -> None:
        self.is_refused, self.has_snapshot = True, False
        log.warning("every sandbox is set up by itself, because Daytona keeps no snapshot of the set-up: %s", reason)


_environments: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[tuple[str | None, ...], str], Environment]] = (
    WeakKeyDictionary()
)


def find_environment(settings: DaytonaSettings, commit: str | None) -> Environment | None:
    """Return this loop's environment for these settings; None if there is no set-up, or it is never kept."""
    if settings.setup_snapshot == "never" or not (settings.setup or settings.packages or commit):
        return None
    target = settings.get_account_setting("target")
    origin = [settings.snapshot, settings.image, settings.cpu, settings.memory, settings.disk, target]
    repository = None if settings.repo_url is None else [settings.repo_url, commit]
    content = [FORMAT, origin, settings.setup, sorted(settings.packages), repository]
    name = SNAPSHOT_PREFIX + hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    environments = _environments.setdefault(asyncio.get_running_loop(), {})
    # Two accounts may have snapshots of the same name.
    return environments.setdefault((get_account_key(settings), name), Environment(name))


async def list_snapshots(client: daytona.AsyncDaytona, ttl: float) -> list[SnapshotInfo]:
    """Return the account's snapshots of set-ups. They expire `ttl` seconds after their last use. Raise DaytonaError."""
    infos: list[SnapshotInfo] = []
    page = 1
    while True:
        listed = await retry_call(partial(client.snapshot.list, page, PAGE_SIZE))
        for item in listed.items:
            if item.name.startswith(SNAPSHOT_PREFIX):
                created = item.created_at.timestamp()
                last_used = created if item.last_used_at is None else item.last_used_at.timestamp()
                size = float(item.size or 0)
                infos.append(SnapshotInfo(item.id, item.name, size, created, last_used, last_used + ttl))
        if page >= listed.total_pages:
            return infos
        page += 1


async def delete_snapshot(client: daytona.AsyncDaytona, snapshot_id: str) -> None:
    """Delete a snapshot. Deleting a missing one is not an error. Raise DaytonaError."""
    try:
        await retry_call(lambda: client.snapshot.delete(snapshot_id))
    except daytona.DaytonaError as error:
        is_missing = says_gone(error) or isinstance(error, daytona.DaytonaNotFoundError)
        if not is_missing:
            raise


async def _wait_for_snapshot(client: daytona.AsyncDaytona, name: str, seconds: float) -> bool:
    """Return whether the snapshot exists and can be used, waiting while its state changes. Raise DaytonaError.

    A broken or inactive snapshot is deleted.
    """
    give_up_at = time.monotonic() + seconds
    pause = 0.2
    while True:
        try:
            snapshot = await retry_call(lambda: client.snapshot.get(name))
        except daytona.DaytonaNotFoundError:
            return False
        state = get_state(snapshot)
        if state == "active":
            return True
        if state not in CHANGING_STATES:
            await delete_snapshot(client, snapshot.id)
            return False
        if time.monotonic() + pause > give_up_at:
            return False
        await asyncio.sleep(pause)
        pause = min(2 * pause, 2.0)
