"""Batches and sweeps in Modal sandboxes, with faults of the network."""

import uuid
from collections import Counter
from typing import Any

import pytest

from rlm_batch import ModalSandbox, batch, sweep

pytestmark = [pytest.mark.anyio, pytest.mark.requires("namespaces")]  # files on a volume count the runs

# Code that leaves a file each time that it runs.
ONCE = """
import uuid
open(f"/data/{n}-{uuid.uuid4().hex}", "w").write("ran")
SUBMIT(square=n * n)
"""

# About one call in five has a fault. The client retries a refusal with a wait time; the project retries the others.
FAULTS = [
    {"status": "UNAVAILABLE", "probability": 0.06},
    {"status": "UNAVAILABLE", "probability": 0.03, "after": True},
    {"status": "RESOURCE_EXHAUSTED", "probability": 0.03, "retry_after": 0.2},
    {"status": "RESOURCE_EXHAUSTED", "probability": 0.03},
    {"delay": 0.3, "probability": 0.07},
]


@pytest.fixture
async def block(modal_standin: Any) -> str:
    """Save a block that is signed in to the stand-in, with a volume, and return its name for a flow's `provider`."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    hello = modal_standin.hello
    saved = ModalSandbox(token_id=hello["token_id"], token_secret=hello["token_secret"], volume_name=name)
    await saved.save(name)  # type: ignore[misc]
    return f"rlm-modal-sandbox/{name}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "options"), [(24, {"max_workers": 6}), (12, {"max_workers": 3, "reuse_sandboxes": True})]
)
async def test_a_batch_among_faults_runs_each_execution_once(
    block: str, modal_standin: Any, size: int, options: dict[str, Any]
) -> None:
    await batch("SUBMIT(1)", provider=block, inputs=[{}])  # create the image and the volume
    modal_standin.ask("reset")
    modal_standin.ask("faults", rules=FAULTS)
    results = await batch(ONCE, inputs=[{"n": n} for n in range(size)], provider=block, retries=4, **options)
    faults = modal_standin.ask("state")["faults"]
    modal_standin.ask("faults", rules=[])
    assert [result.square for result in results] == [n * n for n in range(size)]
    ran = Counter(name.partition("-")[0] for name in modal_standin.ask("volume", name=block.partition("/")[2]))
    assert ran == {str(n): 1 for n in range(size)}
    assert not modal_standin.ask("state")["sandboxes"]
    assert faults


async def test_the_provider_name_uses_the_token_of_the_environment(
    modal_standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", modal_standin.hello["token_id"])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", modal_standin.hello["token_secret"])
    report = await sweep("SUBMIT(loss=(x - 2) ** 2)", grid={"x": [0, 1, 2]}, objective="loss", provider="modal")
    assert report.best.loss == 0
    assert report.best.meta.provider == "modal"
