"""What the tests of flows share: a Prefect server, a results root of their own, and the ids of their flow runs."""

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_batch.flows.listener import FlowListener

from ..infra.waiting import wait_until_async


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a results root of its own."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def clean(server: str, running_daytona: object, no_process_left: None) -> None:
    """Fail a test that leaves a process; the servers are started before processes are counted."""


@pytest.fixture(autouse=True)
def patient_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a busy server the time to take an artifact: after one that it did not take there are no more."""
    monkeypatch.setattr("rlm_batch.flows.engine.artifacts.PUBLISH_TIMEOUT_SECONDS", 200.0)


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is retried begin again at once."""
    monkeypatch.setattr("rlm_batch.tasks.retry.BACKOFF_SECONDS", (0.05,))


@pytest.fixture
def closed_address() -> Iterator[str]:
    """An address on loopback that refuses connections, and that no other process can take."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # It does not listen.
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def find_run_id(results: Path) -> uuid.UUID:
    """Return the id of the one flow run that has its ledger below the results root."""
    (ledger,) = [path for path in results.iterdir() if path.name != "inputs"]
    return uuid.UUID(ledger.name)


class OutputListener(FlowListener):
    """Notes which executions have written something: their code has begun."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def on_output(self, index: int, stream: str, text: str) -> None:
        self._indices.add(index)

    async def wait_for(self, count: int) -> None:
        """Wait until that many executions have."""
        await wait_until_async(lambda: len(self._indices) >= count, f"output of {count} executions")
