"""Fixtures for tests of zygotes: separate zygotes for each test, and waits for processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.launch import launcher
from rlm_batch.blocks.local.launch.launcher import Zygotes

from ....conftest import find_zygotes, list_children
from ....infra.machine import is_alive
from ....infra.requirements import mark_level
from ....infra.waiting import wait_until, wait_until_async


@pytest.fixture
def zygotes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygotes]:
    """End this process's zygotes and return new ones for one test."""
    launcher.zygotes.end()
    wait_until(lambda: not find_zygotes(os.getpid()), "the end of the zygotes before")
    zygote_processes = Zygotes()
    monkeypatch.setattr(launcher, "zygotes", zygote_processes)
    yield zygote_processes
    zygote_processes.end()


@pytest.fixture(params=[pytest.param(level, marks=mark_level(level)) for level in ("bubblewrap", "landlock")])
def local(request: pytest.FixtureRequest) -> LocalSandbox:
    """Return the local provider on each level with its own kind of zygote. Level "none" uses landlock's kind."""
    provider = LocalSandbox(isolation=request.param)
    asyncio.run(provider.check())
    return provider


async def wait_until_gone(pids: list[int]) -> None:
    """Wait until all of these processes have ended."""
    await wait_until_async(lambda: not any(map(is_alive, pids)), "no process that was killed")


async def find_ahead(local: LocalSandbox) -> tuple[int, int]:
    """Wait until this process's only zygote is idle, and return the ids of its two processes forked ahead.

    The first process waits to become a supervisor, and the second is its child. Both descend from the zygote.
    """
    count = 4 if local.isolation == "bubblewrap" else 3

    def find_pair() -> tuple[int, int] | None:
        children = list_children()
        zygote_pids = find_zygotes(os.getpid(), children)
        leaves = [pid for pid in zygote_pids if not zygote_pids & set(children.get(pid, ()))]
        parents = [pid for pid in zygote_pids if len(leaves) == 1 and leaves[0] in children.get(pid, ())]
        return (parents[0], leaves[0]) if len(zygote_pids) == count and len(parents) == 1 else None

    pair = await wait_until_async(find_pair, "a zygote with what it forks ahead")
    assert pair is not None
    return pair
