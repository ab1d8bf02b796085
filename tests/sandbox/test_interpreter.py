"""Starting and losing sandboxes: what the host says, and that nothing is left."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from rlm_batch import ConfigurationError, LocalSandbox, OutcomeUnknown, QuotaExceeded, SandboxLost, SandboxStartError
from rlm_batch.sandbox import interpreter, protocol
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.sandbox_api import Channel, Sandbox
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

pytestmark = pytest.mark.anyio
Open = Callable[[], Awaitable[Sandbox]]


def opening(**settings: Any) -> Open:
    """Opens sandboxes without isolation whose drivers are told something else."""

    async def open_sandbox() -> Sandbox:
        sandbox = await LocalSandbox(isolation="none").open({})
        sandbox.settings = replace(sandbox.settings, **settings)
        return sandbox

    return open_sandbox


def tell(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Deaf(Sandbox):
    """A sandbox whose driver never answers, as where a provider has started the wrong image."""

    id, provider, isolation, layers = "deaf-1", "deaf", "none", ()

    def __init__(self) -> None:
        from rlm_batch.sandbox.driver_settings import DriverSettings

        self.settings = DriverSettings(cwd="/")
        self.removed = 0

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> Channel:
        return self

    async def send(self, data: bytes) -> None:
        """Takes it and does nothing."""

    async def upload(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        raise NotImplementedError

    async def remove(self) -> None:
        self.removed += 1


async def test_a_driver_that_ends_at_its_start_is_a_start_error_that_says_why() -> None:
    one = Interpreter(opening(cwd="/no/such/folder"))
    with pytest.raises(SandboxStartError, match="No such file or directory: '/no/such/folder'"):
        await one.execute("SUBMIT()")
    await one.shutdown()


def test_a_script_hears_why_a_driver_ended_at_its_start() -> None:
    one = SyncInterpreter(opening(cwd="/no/such/folder"))
    for _ in range(2):
        with pytest.raises(SandboxStartError, match="No such file or directory: '/no/such/folder'"):
            one.execute("SUBMIT()")
    one.shutdown()


async def test_a_driver_that_never_answers_is_a_start_error_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "START_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "START_TIMEOUT_SECONDS", 0.3)
    sandbox = Deaf()

    async def open_sandbox() -> Sandbox:
        return sandbox

    with pytest.raises(SandboxStartError, match=r"deaf-1.*did not answer"):
        await Interpreter(open_sandbox).start()
    assert sandbox.removed == 1


async def test_what_opening_raises_is_raised_and_the_next_try_may_succeed() -> None:
    errors: list[Exception] = [QuotaExceeded("too many", retry_after=2.0), ConfigurationError("no key")]

    async def open_sandbox() -> Sandbox:
        if errors:
            raise errors.pop(0)
        return await LocalSandbox(isolation="none").open({})

    one = Interpreter(open_sandbox, timeout=20)
    with pytest.raises(QuotaExceeded):
        await one.start()
    with pytest.raises(ConfigurationError):
        await one.execute("SUBMIT()")
    assert (await one.execute("SUBMIT(x=1)")).x == 1
    await one.shutdown()


async def test_a_shutdown_while_the_sandbox_is_being_opened_removes_it() -> None:
    opened = asyncio.Event()

    async def open_slowly() -> Sandbox:
        sandbox = await LocalSandbox(isolation="none").open({})
        opened.set()
        await asyncio.sleep(0.2)
        return sandbox

    one = Interpreter(open_slowly, timeout=20)
    start = asyncio.ensure_future(one.start())
    await opened.wait()
    await one.shutdown()
    with pytest.raises((SandboxLost, SandboxStartError)):
        await start
    assert not one.is_alive


async def test_a_cancelled_start_removes_what_it_has_opened() -> None:
    removed: list[bool] = []

    class Slow(Deaf):
        async def remove(self) -> None:
            await asyncio.sleep(0.2)
            removed.append(True)

    async def open_sandbox() -> Sandbox:
        return Slow()

    start = asyncio.ensure_future(Interpreter(open_sandbox).start())
    await asyncio.sleep(0.05)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert removed


@pytest.mark.full
async def test_beats_of_the_host_keep_an_idle_sandbox_alive() -> None:
    async with Interpreter(opening(heartbeat=0.3, silence=2), timeout=20) as one:
        await one.execute("x = 1", context="c")
        await asyncio.sleep(3.5)
        assert one.is_alive
        assert (await one.execute("SUBMIT(x=x)", context="c")).x == 1


async def test_a_sandbox_that_falls_silent_is_lost(processes: Callable[[], dict[int, str]]) -> None:
    before = set(processes())
    async with Interpreter(opening(heartbeat=0.2, silence=1), timeout=20) as one:
        await one.start()
        drivers = set(processes()) - before
        tell(drivers, signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown, match="said nothing for 1 s"):
            await one.execute("SUBMIT()")
        with pytest.raises(SandboxLost):
            await one.execute("SUBMIT()")
        tell(drivers, signal.SIGCONT)


async def test_a_driver_that_does_not_report_a_timeout_is_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch, processes: Callable[[], dict[int, str]]
) -> None:
    monkeypatch.setattr(protocol, "ANSWER_GRACE_SECONDS", 0.5)
    before = set(processes())
    async with Interpreter(opening(), timeout=0.5) as one:
        await one.start()
        drivers = set(processes()) - before
        tell(drivers, signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown, match="has not answered"):
            await one.execute("SUBMIT()")
        with pytest.raises(SandboxLost):
            await one.execute("SUBMIT()")
        tell(drivers, signal.SIGCONT)


def test_a_script_takes_such_a_driver_for_lost_too(
    monkeypatch: pytest.MonkeyPatch, processes: Callable[[], dict[int, str]]
) -> None:
    monkeypatch.setattr(protocol, "ANSWER_GRACE_SECONDS", 0.5)
    before = set(processes())
    one = SyncInterpreter(opening(), timeout=0.5).start()
    drivers = set(processes()) - before
    tell(drivers, signal.SIGSTOP)
    with pytest.raises(OutcomeUnknown, match="has not answered"):
        one.execute("SUBMIT()")
    tell(drivers, signal.SIGCONT)
    one.shutdown()


def ours() -> int:
    """How many threads we have started: an earlier test's model or server may have some of its own."""
    return sum(thread.name.startswith("rlm-batch") for thread in threading.enumerate())


async def test_opening_and_closing_leaves_no_descriptor_and_no_thread(local: LocalSandbox) -> None:
    async def once(i: int) -> None:
        async with local.interpreter(timeout=20, tools={"add": lambda a, b: a + b}) as one:
            await one.execute("print(add(1, 2)); SUBMIT()", context=None if i % 2 else "c")

    def scripted() -> None:
        with SyncInterpreter(lambda: local.open({}), timeout=20, tools={"one": lambda: 1}) as one:
            one.execute("print(one())")

    await once(0)
    await asyncio.to_thread(scripted)
    descriptors, threads = len(os.listdir("/proc/self/fd")), ours()
    for i in range(6):
        await once(i)
        await asyncio.to_thread(scripted)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert ours() <= threads + 1


async def test_no_execution_begins_while_the_volume_is_refreshed_for_another(local: LocalSandbox) -> None:
    async with local.interpreter(timeout=20) as one:
        begun_during: list[int] = []

        async def refresh() -> None:
            before = len(one._protocol.pending)  # type: ignore[union-attr]
            await asyncio.sleep(0.2 * (len(begun_during) + 1))
            begun_during.append(len(one._protocol.pending) - before)  # type: ignore[union-attr]

        one.sandbox.refresh_volume = refresh  # type: ignore[method-assign]
        await asyncio.gather(*(one.execute("import time; time.sleep(1)") for _ in range(3)))
        assert begun_during == [0]
        await one.execute("SUBMIT()")
        assert begun_during == [0, 0]
