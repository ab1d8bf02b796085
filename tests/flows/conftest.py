"""Fixtures for tests of flows: a Prefect server, a results root for each test, and the ids of flow runs."""

import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.flows.listener import FlowListener

from ..infra.waiting import wait_until_async


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own results root."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def clean(server: str, running_daytona: object, no_process_left: None) -> None:
    """Fail a test that leaves a process. The servers start before the fixture counts the processes."""


@pytest.fixture(autouse=True)
def patient_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a busy server more time for an artifact, because a run publishes no more after the first failure."""
    monkeypatch.setattr("rlm_batch.flows.engine.artifacts.PUBLISH_TIMEOUT_SECONDS", 200.0)


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make retries start almost at once."""
    monkeypatch.setattr("rlm_batch.flows.engine.execute.compute_backoff", lambda _: 0.05)


@pytest.fixture
def closed_address() -> Iterator[str]:
    """Return a loopback address that refuses connections, and that no other process can use."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # no listen()
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def find_run_id(results: Path) -> uuid.UUID:
    """Return the id of the only flow run with a ledger below the results root."""
    (ledger,) = [path for path in results.iterdir() if path.name != "inputs"]
    return uuid.UUID(ledger.name)


def read_ledger(path: Path | str) -> list[dict[str, Any]]:
    """Return the turns and outcomes in a ledger."""
    lines = [json.loads(line) for part in Path(path).glob("part-*.jsonl") for line in part.read_text().splitlines()]
    return [line for line in lines if line["status"] != "used"]


class OutputListener(FlowListener):
    """A listener that notes which executions have produced output, so their code is running."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def on_output(self, index: int, stream: str, text: str) -> None:
        self._indices.add(index)

    async def wait_for(self, count: int) -> None:
        """Wait until this many executions have produced output."""
        await wait_until_async(lambda: len(self._indices) >= count, f"output of {count} executions")
