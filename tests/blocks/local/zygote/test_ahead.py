"""Processes that a zygote forks ahead. They run the next sandbox's first code. Sandboxes also work without them."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from ....conftest import find_zygotes
from ....infra.waiting import wait_until_async
from .conftest import find_ahead, wait_until_gone

if TYPE_CHECKING:
    from rlm_batch import LocalSandbox
    from rlm_batch.blocks.local.launch.launcher import Zygotes

pytestmark = pytest.mark.anyio

OPEN_DESCRIPTORS = """
import os
found = []
for fd in range(5, 200):  # the code's own are its streams and its channel
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
SUBMIT(found)
"""
SURROUNDINGS = """
names = sorted(globals())
import gc, os, signal, sys, threading
status = {}
try:  # the kernel closes it to code on a level
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
except OSError:
    pass
kept = ("Umask", "Groups", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
        "NoNewPrivs", "Seccomp", "Threads")
fds = []
for fd in range(200):
    try:
        os.fstat(fd)
        fds.append(fd)
    except OSError:
        pass
parent = sys._getframe().f_back
users = [len(set(status.get(name, "").split())) for name in ("Uid", "Gid")]
SUBMIT(names=names, state=[
    os.getcwd().rpartition("/")[2], sorted(os.environ), [path for path in sys.path if "rlm-batch-" not in path],
    len(sys.path), len(sys.argv), sorted(sys.modules), [type(finder).__name__ for finder in sys.meta_path],
    gc.isenabled(), sorted(os.sched_getaffinity(0)), str(signal.getsignal(signal.SIGINT)).partition(" at ")[0],
    fds, users,
    os.getpid() == os.getpgrp() == os.getsid(0), [status.get(name) for name in kept], threading.active_count(),
    parent.f_locals.get("self")._executions,
])
"""
MODULES = 5  # the index of the modules in the state above


async def test_a_sandbox_whose_first_child_has_ended_runs_code(local: LocalSandbox, zygotes: Zygotes) -> None:
    async with local.interpreter() as interpreter:
        await interpreter.execute("pass")
    _, child = await find_ahead(local)
    os.kill(child, signal.SIGKILL)
    await wait_until_gone([child])
    async with local.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
    # The child ends while the request is on its way, so the supervisor sees the end and the request at once.
    supervisor, child = await find_ahead(local)
    known = find_zygotes(os.getpid())
    async with local.interpreter() as interpreter:
        os.kill(supervisor, signal.SIGSTOP)
        try:
            os.kill(child, signal.SIGKILL)
            await wait_until_gone([child])
            execution = asyncio.create_task(interpreter.execute("SUBMIT(2)"))
            await wait_until_async(lambda: find_zygotes(os.getpid()) - known, "a successor: the request was taken")
        finally:
            os.kill(supervisor, signal.SIGCONT)
        assert (await execution).output == 2


async def test_a_killed_spare_process_is_replaced_without_inheriting_the_zygotes_descriptors(
    local: LocalSandbox, zygotes: Zygotes
) -> None:
    async with AsyncExitStack() as others:
        for _ in range(30):  # each sandbox holds a descriptor of the zygote, so later descriptors have high numbers
            await (await others.enter_async_context(local.interpreter())).execute("pass")
        ahead, child = await find_ahead(local)
        os.kill(ahead, signal.SIGKILL)
        await wait_until_gone([ahead, child])
        async with local.interpreter() as interpreter:
            assert (await interpreter.execute(OPEN_DESCRIPTORS)).output == []


async def test_the_first_execution_sees_no_trace_of_the_rehearsal(
    local: LocalSandbox, zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local.interpreter() as interpreter:
        fresh = await interpreter.execute(SURROUNDINGS)  # this zygote has had no time to fork a process ahead
    _, child = await find_ahead(local)
    async with local.interpreter() as interpreter:
        ahead = await interpreter.execute(SURROUNDINGS)
        assert child not in find_zygotes(os.getpid())
    monkeypatch.setattr(zygotes, "find_obstacle", lambda _: "none, so that a sandbox is a program of its own")
    async with local.interpreter() as interpreter:
        own = await interpreter.execute(SURROUNDINGS)
    assert ahead.names == fresh.names == own.names
    assert ahead.state == fresh.state
    assert {*own.state.pop(MODULES)} <= {*ahead.state.pop(MODULES)}  # modules that a zygote imported stay loaded
    assert ahead.state == own.state
    await wait_until_gone([child])
