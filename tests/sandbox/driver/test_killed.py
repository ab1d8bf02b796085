"""What a driver that is killed leaves, and what the host says of it."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from rlm_batch import LocalSandbox, OutcomeUnknown, SandboxLost
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

from ...infra.machine import read_parent

pytestmark = pytest.mark.anyio
Processes = Callable[[], dict[int, str]]


def leaf(pids: set[int]) -> int:
    """The one process among them that has no child among them."""
    (found,) = pids - {read_parent(pid) for pid in pids}
    return found


async def interrupted(
    interpreter: Interpreter, descendants: set[int], processes: Processes
) -> tuple[asyncio.Task, int]:
    """An execution that runs, and the id of its driver."""
    heard = asyncio.Event()
    code = "print('on', flush=True); import time; time.sleep(1000)"
    task = asyncio.ensure_future(interpreter.execute(code, on_output=lambda *_: heard.set()))
    await asyncio.wait_for(heard.wait(), 15)
    return task, read_parent(leaf(set(processes()) - descendants))


async def test_a_killed_driver_gives_outcome_unknown_and_then_sandbox_lost(
    local: LocalSandbox, processes: Processes
) -> None:
    before = set(processes())
    async with local.interpreter(timeout=20) as interpreter:
        task, driver = await interrupted(interpreter, before, processes)
        os.kill(driver, signal.SIGKILL)
        with pytest.raises(OutcomeUnknown, match="what the code did is unknown") as caught:
            await asyncio.wait_for(task, 15)
        assert caught.value.meta is not None
        assert caught.value.meta.stdout == "on\n"
        assert caught.value.meta.isolation == local.isolation
        for _ in range(2):
            with pytest.raises(SandboxLost):
                await interpreter.execute("SUBMIT()")
        assert not interpreter.is_alive


async def test_a_killed_driver_leaves_no_process_that_the_code_had_started(
    local: LocalSandbox, processes: Processes
) -> None:
    before = set(processes())
    async with local.interpreter(timeout=20) as interpreter:
        task, driver = await interrupted(interpreter, before, processes)
        code = "import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
        await interpreter.execute(code, context="c")
        os.kill(driver, signal.SIGKILL)
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(task, 15)


async def test_a_driver_that_was_asked_to_end_ends_everything(local: LocalSandbox, processes: Processes) -> None:
    before = set(processes())
    async with local.interpreter(timeout=20) as interpreter:
        task, driver = await interrupted(interpreter, before, processes)
        code = "import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
        await interpreter.execute(code, context="c")
        os.kill(driver, signal.SIGTERM)
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(task, 15)


def test_a_script_hears_of_it_too_and_begins_anew_after_shutdown(local: LocalSandbox, processes: Processes) -> None:
    before = set(processes())
    interpreter = SyncInterpreter(lambda: local.open({}), timeout=20)
    interpreter.tools["end"] = lambda: os.kill(read_parent(leaf(set(processes()) - before)), signal.SIGKILL)
    try:
        with pytest.raises(OutcomeUnknown):
            interpreter.execute("x = 1\nend()")
        with pytest.raises(SandboxLost):
            interpreter.execute("SUBMIT()")
        interpreter.shutdown()
        assert interpreter.execute("SUBMIT(known='x' in globals())").known is False
    finally:
        interpreter.shutdown()
