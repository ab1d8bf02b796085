"""How long what a job depends on has not answered."""

from __future__ import annotations

import asyncio

# After which the job ends: its shards, which cannot go on either, have ended before.
MAX_OUTAGE_SECONDS = 300.0


class OutageTimer:
    """Since when each of several things has not answered, by the event loop's clock."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def note(self, name: str, error: Exception) -> None:
        """Notes that it did not answer. Raises the error once that has been so for too long."""
        now = asyncio.get_running_loop().time()
        if now - self._since.setdefault(name, now) > MAX_OUTAGE_SECONDS:
            raise error

    def clear(self, name: str) -> None:
        """Notes that it has answered."""
        self._since.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether it did not answer the last time."""
        return name in self._since
