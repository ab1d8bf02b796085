"""A host tool that blocks code until the test lets it continue."""

import asyncio


class Gate:
    """A tool that returns once the test opens the gate; `is_reached` is set at the first call."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self._is_open = asyncio.Event()

    async def __call__(self) -> None:
        self.is_reached.set()
        await self._is_open.wait()

    def open(self) -> None:
        """Let all calls return, including later ones."""
        self._is_open.set()
