"""A Prefect server for the tests of this room, with the settings that we ship."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.flows.engine.events import FlowListener


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a results root of its own."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def clean(server: str, running_daytona: object, no_process_left: None) -> None:
    """No test leaves a process; the servers are there before they are counted."""


async def becomes(true: Callable[[], Awaitable[Any]], seconds: float = 90) -> None:
    """Waits until it is so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await true():
            return
        await asyncio.sleep(0.1)
    raise TimeoutError


class OutputListener(FlowListener):
    """Notes which executions have written something: their code has begun."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def on_output(self, index: int, stream: str, text: str) -> None:
        self._indices.add(index)

    async def wait_for(self, count: int) -> None:
        """Waits until so many have."""

        async def have_written() -> bool:
            return len(self._indices) >= count

        await becomes(have_written)


async def last_run(client: Any) -> Any:
    """The flow run that began last. Those that a schedule will begin come after it in time, and are not meant."""
    from prefect.client.schemas.filters import FlowRunFilter

    begun = FlowRunFilter(start_time={"is_null_": False})  # type: ignore[arg-type]
    (run,) = await client.read_flow_runs(flow_run_filter=begun, sort="START_TIME_DESC", limit=1)
    return run
