"""Fixtures for tests of the engine: short delays of retries, and a provider that asks for a sandbox once."""

from typing import Any

import pytest

from rlm_batch import DaytonaSandbox


@pytest.fixture(autouse=True)
def no_long_delays(short_delays: None) -> None:
    """Shorten the delays of retries; another test covers the delays themselves."""


@pytest.fixture
async def hasty(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a saved block that asks for a sandbox once and leaves retries to the run."""
    monkeypatch.setattr("rlm_batch.blocks.daytona.creation.is_transient", lambda _: False)
    await DaytonaSandbox(start_timeout=90).save("hasty", overwrite=True)  # type: ignore[misc]
    return "rlm-daytona-sandbox/hasty"
