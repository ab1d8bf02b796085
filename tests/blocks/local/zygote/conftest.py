"""What the tests of zygotes share: zygotes of their own, and processes that are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_batch.blocks.local.launch import launcher
from rlm_batch.blocks.local.launch.launcher import Zygotes

AHEAD_SECONDS = 0.5  # in which a zygote that is asked for nothing has forked a process ahead: 10 ms, and a busy machine


@pytest.fixture
def zygotes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygotes]:
    """Zygotes of the test's own, and no others of this process."""
    launcher.zygotes.end()
    found = Zygotes()
    monkeypatch.setattr(launcher, "zygotes", found)
    yield found
    found.end()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def wait_until_gone(pids: list[int]) -> list[int]:
    """Those of the processes that are still there after some seconds."""
    for _ in range(100):
        pids = [pid for pid in pids if _is_running(pid)]
        if not pids:
            break
        await asyncio.sleep(0.05)
    return pids
