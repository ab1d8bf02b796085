"""Processes that a zygote forks ahead. They run the next sandbox's first code. Sandboxes also work without them."""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from rlm_batch.blocks.local.launch import zygote
from rlm_batch.sandbox.driver_bundle import ZYGOTE_MODULES, build_driver_code

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


# A zygote that cannot fork a first child ahead.
WITHOUT_CHILD = """
namespace = {"__name__": "driver"}
exec("driver", namespace)
main = namespace["main"]

def fail(*_, **__):
    raise OSError(11, "Resource temporarily unavailable")

main.__globals__["ChildAhead"] = fail
"""


# A zygote whose first spare process cannot isolate itself.
FAILING_AHEAD = """
import os
namespace = {"__name__": "driver"}
exec("driver", namespace)
main = namespace["main"]
zygote, rehearse, ahead = main.__globals__["_Zygote"], main.__globals__["rehearse_start"], []

def fork_spare(self, *request, fork=zygote._fork_spare):
    if not request:
        ahead.append(True)
    forked = fork(self, *request)
    if not request and len(ahead) == 1:
        os.waitid(os.P_PID, forked[0], os.WEXITED | os.WNOWAIT)
        ahead.append(True)
    return forked

def rehearse_start(runner):
    if len(ahead) == 1:
        raise OSError(24, "Too many open files")
    rehearse(runner)

zygote._fork_spare = fork_spare
main.__globals__["rehearse_start"] = rehearse_start
"""


def change_zygote(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Make new zygotes run the program, after replacing "driver" in it with the zygotes' real code."""
    driver, changed = marshal.loads(build_driver_code(ZYGOTE_MODULES)), compile(program, "changed", "exec")
    constants = tuple(driver if constant == "driver" else constant for constant in changed.co_consts)
    code = marshal.dumps(changed.replace(co_consts=constants))
    monkeypatch.setattr(zygote, "build_driver_code", lambda _modules: code)


async def test_a_failed_spare_process_does_not_fail_the_next_sandbox(
    local: LocalSandbox, zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_zygote(monkeypatch, FAILING_AHEAD)
    at_rest = asyncio.ensure_future(find_ahead(local))  # the failed process is replaced after a later sandbox
    while not at_rest.done():
        async with local.interpreter() as interpreter:
            assert (await interpreter.execute("SUBMIT(1)")).output == 1
        await asyncio.wait([at_rest], timeout=0.1)
    await at_rest


async def test_a_sandbox_starts_without_a_spare_first_child(
    local: LocalSandbox, zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_zygote(monkeypatch, WITHOUT_CHILD)
    count = 3 if local.isolation == "bubblewrap" else 2
    for number in range(3):
        async with local.interpreter() as interpreter:
            assert (await interpreter.execute(f"SUBMIT({number})")).output == number
        await wait_until_async(lambda: len(find_zygotes(os.getpid())) == count, "a process ahead, without a child")


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
