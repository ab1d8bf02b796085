"""A tool of the host's at which code waits, so that a test decides what comes first."""

import asyncio


class Gate:
    """A tool that returns once the test opens the gate; `is_reached` is set when code first calls it."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self._is_open = asyncio.Event()

    async def __call__(self) -> None:
        self.is_reached.set()
        await self._is_open.wait()

    def open(self) -> None:
        """Let all calls return, those to come too."""
        self._is_open.set()
