"""Questions to the tests' Prefect server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prefect.client.orchestration import PrefectClient, get_client

T = TypeVar("T")


def ask(question: Callable[[PrefectClient], Awaitable[T]]) -> T:
    """Return a server's answer."""

    async def call() -> T:
        async with get_client() as client:
            return await question(client)

    return asyncio.run(call())
