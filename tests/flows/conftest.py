"""A Prefect server for the tests of this room, with the settings that we ship."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a results root of its own."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def clean(server: str, running_daytona: object, no_process_left: None) -> None:
    """No test leaves a process; the servers are there before they are counted."""
