"""Sandboxes that stay open after a failed execution: what lists them, and what removes them."""

import time
from pathlib import Path

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.provider import SandboxInfo, SandboxProvider
from rlm_batch.flows.orphans import OrphanedSandbox, find_orphans, remove_orphans
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import wait_until

pytestmark = pytest.mark.anyio


async def open_sandbox(provider: SandboxProvider) -> Interpreter:
    interpreter = provider.with_expectations(sandboxes=1, keeps_failed=True).interpreter()
    await interpreter.execute("open('mine.txt', 'w').write('of the code')")
    return interpreter


async def find_sandbox(provider: SandboxProvider, sandbox_id: str) -> SandboxInfo | None:
    return next((info for info in await provider.list_sandboxes() if info.id == sandbox_id), None)


@pytest.mark.usefixtures("one_keeps_containers")
async def test_a_kept_sandbox_is_an_orphan_only_after_its_time(provider: SandboxProvider) -> None:
    interpreter = await open_sandbox(provider)
    sandbox_id, until = interpreter.sandbox.id, time.time() + 600
    await interpreter.keep(until, 7)
    try:
        info = await find_sandbox(provider, sandbox_id)
        assert info is not None
        assert info.kept_until == pytest.approx(until, abs=1)
        assert info.execution == 7
        findings = await find_orphans(provider, "")
        assert sandbox_id not in [orphan.info.id for orphan in findings.orphans]
        assert any(sandbox_id in sentence and "kept until" in sentence for sentence in findings.kept)
        for orphans in (
            (await find_orphans(provider, "", takes_kept=True)).orphans,
            (await find_orphans(provider, "", now=until + 1)).orphans,
        ):
            assert "it was kept for a failed execution" in [
                orphan.reason for orphan in orphans if orphan.info.id == sandbox_id
            ]
    finally:
        await provider.delete_sandbox(sandbox_id)
    assert await find_sandbox(provider, sandbox_id) is None


@pytest.mark.usefixtures("one_keeps_containers")
async def test_a_removed_sandbox_that_a_listing_still_shows_is_not_removed_again(provider: SandboxProvider) -> None:
    interpreter = await open_sandbox(provider)
    sandbox_id = interpreter.sandbox.id
    await interpreter.keep(time.time() + 600)
    info = await find_sandbox(provider, sandbox_id)
    assert info is not None
    orphan = OrphanedSandbox(info, "its process has ended", 0.0)
    for expected in ([orphan], []):
        assert await remove_orphans(provider, [orphan]) == (expected, {})


async def test_a_local_sandbox_is_removed_when_its_time_is_over(local: LocalSandbox, no_process_left: None) -> None:
    interpreter = await open_sandbox(local)
    folder = Path(interpreter.sandbox.folder)  # type: ignore[attr-defined]
    await interpreter.keep(time.time())
    wait_until(lambda: not folder.exists(), "the folder is removed")
