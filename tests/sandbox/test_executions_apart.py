"""Tests that on isolated levels the executions of a sandbox reach neither each other nor their driver."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import LocalSandbox

from ..infra.requirements import mark_level

pytestmark = pytest.mark.anyio

ATTACK = """
    import os, signal
    reached = []
    for pid in [os.getppid(), *pids]:
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(pid, number)
                reached.append(f"signal {number}")
            except OSError:
                pass
        for name in ("mem", "environ", "fd/3", "fd/4", "fd/10", "fd/11", "cwd", "root"):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                try:
                    fd = os.open(f"/proc/{pid}/{name}", flags)
                    if os.read(fd, 10) or os.write(fd, b"rubbish"):
                        reached.append(f"{name} of {pid}")
                except OSError:
                    pass
    SUBMIT(reached=reached)
"""


@pytest.mark.parametrize(
    "local", [pytest.param(level, marks=mark_level(level)) for level in ("landlock", "bubblewrap")], indirect=True
)
async def test_an_execution_cannot_reach_another_or_the_driver(local: LocalSandbox) -> None:
    pids: list[int] = []
    have_begun, is_over = asyncio.Event(), asyncio.Event()

    async def wait_for_the_attack(pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            have_begun.set()
        await is_over.wait()

    async with local.interpreter(timeout=100, tools={"wait": wait_for_the_attack}) as interpreter:
        code = "import os; wait(os.getpid()); SUBMIT(fine=True)"
        waiting = [asyncio.ensure_future(interpreter.execute(code, context=context)) for context in (None, "c")]
        await have_begun.wait()
        assert (await interpreter.execute(dedent(ATTACK), {"pids": pids})).reached == []
        is_over.set()
        for result in await asyncio.gather(*waiting):
            assert result.fine
