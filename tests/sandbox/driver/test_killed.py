"""Tests of a killed driver: its executions end, and the host raises an error."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from rlm_batch import LocalSandbox, OutcomeUnknown, SandboxLost
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

from ...infra.machine import read_parent
from ...infra.waiting import wait_until

pytestmark = pytest.mark.strongest_first
Processes = Callable[[], dict[int, str]]


def find_driver(before: set[int], processes: Processes) -> int:
    """Return the driver's id: the parent of the one new process without children, which runs the code."""

    def find() -> int:
        with suppress(OSError):  # a process ended meanwhile
            parents = {pid: read_parent(pid) for pid in set(processes()) - before}
            leaves = parents.keys() - {*parents.values()}
            return parents[leaves.pop()] if len(leaves) == 1 else 0
        return 0

    return wait_until(find, "the driver's id")


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_driver_raises_outcome_unknown_then_sandbox_lost(
    local: LocalSandbox, processes: Processes, number: signal.Signals
) -> None:
    before, has_begun = set(processes()), asyncio.Event()
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    async with local.interpreter() as interpreter:
        running = "print('on', flush=True); import time; time.sleep(1000)"
        task = asyncio.ensure_future(interpreter.execute(running, on_output=lambda *_: has_begun.set()))
        await has_begun.wait()
        driver = await asyncio.to_thread(find_driver, before, processes)
        await interpreter.execute(code, context="c")
        os.kill(driver, number)
        with pytest.raises(OutcomeUnknown, match="what the code did is unknown") as caught:
            await task
        assert caught.value.meta is not None
        assert (caught.value.meta.stdout, caught.value.meta.isolation) == ("on\n", local.isolation)
        for _ in range(2):
            with pytest.raises(SandboxLost):
                await interpreter.execute("SUBMIT()")
        assert not interpreter.is_alive


def test_a_script_gets_the_same_errors_and_can_restart_after_shutdown(
    local: LocalSandbox, processes: Processes
) -> None:
    before = set(processes())
    interpreter = SyncInterpreter(lambda: local.open({}))
    interpreter.tools["end"] = lambda: os.kill(find_driver(before, processes), signal.SIGKILL)
    try:
        with pytest.raises(OutcomeUnknown):
            interpreter.execute("x = 1\nend()")
        with pytest.raises(SandboxLost):
            interpreter.execute("SUBMIT()")
        interpreter.shutdown()
        assert interpreter.execute("SUBMIT(known='x' in globals())").known is False
    finally:
        interpreter.shutdown()
