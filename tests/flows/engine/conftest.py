"""What tests of the engine share: short delays of retries, and a provider that asks for a sandbox once."""

from typing import Any

import pytest

from rlm_batch import DaytonaSandbox


@pytest.fixture(autouse=True)
def no_long_delays(short_delays: None) -> None:
    """Retry soon; the delays themselves have a test of their own."""


@pytest.fixture
async def hasty(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A block that asks for a sandbox once, and leaves further tries to the run."""
    monkeypatch.setattr("rlm_batch.blocks.daytona.creation.get_delay", lambda *_: 100.0)  # which is beyond its timeout
    await DaytonaSandbox(start_timeout=90).save("hasty", overwrite=True)  # type: ignore[misc]
    return "daytona-sandbox/hasty"
