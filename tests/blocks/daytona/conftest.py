"""Fixtures for tests of Daytona: its local stand-in."""

from collections.abc import Callable
from typing import Any

import pytest

from ...infra.waiting import wait_until_async


@pytest.fixture(autouse=True)
def standin(running_daytona: object, no_process_left: None, daytona: Any) -> Any:
    """Return the local stand-in for Daytona, which starts before the tests count processes."""
    return daytona


@pytest.fixture
def wait_for_call(standin: Any) -> Callable[..., Any]:
    """Return a function that waits until the stand-in has received a call a number of times."""

    async def wait(call: str, times: int = 1) -> None:
        await wait_until_async(lambda: standin.state()["counts"].get(call, 0) >= times, f"{times} times {call}")

    return wait
