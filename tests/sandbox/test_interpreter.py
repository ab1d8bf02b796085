"""Tests of sandboxes that do not start or are lost: the host's errors, and that nothing is left."""

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

from ..infra.waiting import wait_until_async

Open = Callable[[], Awaitable[Sandbox]]


def opening(**settings: Any) -> Open:
    """Return a function that opens sandboxes without isolation, with these driver settings."""

    async def open_sandbox() -> Sandbox:
        sandbox = await LocalSandbox(isolation="none").open({})
        sandbox.settings = replace(sandbox.settings, **settings)
        return sandbox

    return open_sandbox


def signal_processes(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Deaf(Sandbox):
    """A sandbox whose driver never answers, as if a provider had started the wrong image."""

    id, provider, isolation, layers = "deaf-1", "deaf", "none", ()

    def __init__(self) -> None:
        from rlm_batch.sandbox.driver_settings import DriverSettings

        self.settings = DriverSettings(cwd="/")
        self.removed = 0

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> Channel:
        return self

    async def send(self, data: bytes) -> None:
        """Discard the data."""

    async def upload(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        raise NotImplementedError

    async def remove(self) -> None:
        self.removed += 1


def test_a_driver_that_fails_to_start_raises_a_start_error_with_the_reason() -> None:
    async def execute() -> None:
        one = Interpreter(opening(cwd="/no/such/folder"))
        try:
            await one.execute("SUBMIT()")
        finally:
            await one.shutdown()

    script = SyncInterpreter(opening(cwd="/no/such/folder"))
    for run in (lambda: asyncio.run(execute()), *[lambda: script.execute("SUBMIT()")] * 2):
        with pytest.raises(SandboxStartError, match="No such file or directory: '/no/such/folder'"):
            run()
    script.shutdown()


@pytest.mark.anyio
async def test_a_driver_that_never_answers_raises_a_start_error_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "START_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "START_TIMEOUT_SECONDS", 0.3)
    sandbox = Deaf()

    async def open_sandbox() -> Sandbox:
        return sandbox

    with pytest.raises(SandboxStartError, match=r"deaf-1.*did not answer"):
        await Interpreter(open_sandbox).start()
    assert sandbox.removed == 1


@pytest.mark.anyio
async def test_an_error_while_opening_is_raised_and_a_retry_can_succeed() -> None:
    errors: list[Exception] = [QuotaExceeded("too many", retry_after=2.0), ConfigurationError("no key")]

    async def open_sandbox() -> Sandbox:
        if errors:
            raise errors.pop(0)
        return await LocalSandbox(isolation="none").open({})

    one = Interpreter(open_sandbox)
    with pytest.raises(QuotaExceeded):
        await one.start()
    with pytest.raises(ConfigurationError):
        await one.execute("SUBMIT()")
    assert (await one.execute("SUBMIT(x=1)")).x == 1
    await one.shutdown()


@pytest.mark.anyio
async def test_a_shutdown_while_the_sandbox_is_being_opened_removes_it() -> None:
    is_opened, may_return = asyncio.Event(), asyncio.Event()

    async def open_slowly() -> Sandbox:
        sandbox = await LocalSandbox(isolation="none").open({})
        is_opened.set()
        await may_return.wait()
        return sandbox

    one = Interpreter(open_slowly)
    start = asyncio.ensure_future(one.start())
    await is_opened.wait()
    await one.shutdown()
    may_return.set()
    with pytest.raises((SandboxLost, SandboxStartError)):
        await start
    assert not one.is_alive


@pytest.mark.anyio
async def test_a_cancelled_start_deletes_its_sandbox() -> None:
    is_connected, removed = asyncio.Event(), list[bool]()

    class Slow(Deaf):
        async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> Channel:
            is_connected.set()
            return self

        async def remove(self) -> None:
            await asyncio.sleep(0.2)
            removed.append(True)

    async def open_sandbox() -> Sandbox:
        return Slow()

    start = asyncio.ensure_future(Interpreter(open_sandbox).start())
    await is_connected.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert removed


@pytest.mark.full
@pytest.mark.anyio
async def test_the_hosts_heartbeats_keep_an_idle_sandbox_alive() -> None:
    async with Interpreter(opening(heartbeat=0.3, silence=5)) as one:
        await one.execute("x = 1", context="c")
        await asyncio.sleep(7)  # both sides send only beats
        assert one.is_alive
        assert (await one.execute("SUBMIT(x=x)", context="c")).x == 1


@pytest.mark.anyio
async def test_a_silent_sandbox_is_lost(processes: Callable[[], dict[int, str]]) -> None:
    before = set(processes())
    async with Interpreter(opening(heartbeat=0.2, silence=10)) as one:
        drivers = set(processes()) - before
        signal_processes(drivers, signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown, match="it sent nothing for 10 s"):
            await one.execute("SUBMIT()")
        with pytest.raises(SandboxLost):
            await one.execute("SUBMIT()")
        signal_processes(drivers, signal.SIGCONT)


def test_a_driver_that_does_not_report_a_timeout_is_lost(
    monkeypatch: pytest.MonkeyPatch, processes: Callable[[], dict[int, str]]
) -> None:
    monkeypatch.setattr(protocol, "ANSWER_GRACE_SECONDS", 0.5)

    async def execute() -> None:
        async with Interpreter(opening(), timeout=0.5) as one:
            drivers = set(processes()) - before
            signal_processes(drivers, signal.SIGSTOP)
            with pytest.raises(OutcomeUnknown, match="did not answer"):
                await one.execute("SUBMIT()")
            with pytest.raises(SandboxLost):
                await one.execute("SUBMIT()")
            signal_processes(drivers, signal.SIGCONT)

    before = set(processes())
    asyncio.run(execute())
    with SyncInterpreter(opening(), timeout=0.5) as one:
        drivers = set(processes()) - before
        signal_processes(drivers, signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown, match="did not answer"):
            one.execute("SUBMIT()")
        signal_processes(drivers, signal.SIGCONT)


@pytest.mark.anyio
async def test_opening_and_closing_leaks_no_descriptor_or_thread(local: LocalSandbox) -> None:
    def count_threads() -> int:
        """Count our threads only, because an earlier test's model or server may still have threads."""
        return sum(thread.name.startswith("rlm-batch") for thread in threading.enumerate())

    async def use(i: int) -> None:
        async with local.interpreter(tools={"add": lambda a, b: a + b}) as one:
            await one.execute("print(add(1, 2)); SUBMIT()", context=None if i % 2 else "c")

    def use_in_script() -> None:
        with SyncInterpreter(lambda: local.open({}), tools={"one": lambda: 1}) as one:
            one.execute("print(one())")

    await use(0)
    await asyncio.to_thread(use_in_script)
    descriptors, threads = len(os.listdir("/proc/self/fd")), count_threads()
    for i in range(4):
        await use(i)
        await asyncio.to_thread(use_in_script)
    await wait_until_async(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    await wait_until_async(lambda: count_threads() <= threads + 1)


@pytest.mark.anyio
async def test_executions_wait_while_the_volume_is_refreshed() -> None:
    begun, refreshes = 0, list[int]()
    is_refreshing, is_refreshed, all_have_begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def refresh() -> None:
        refreshes.append(begun)
        is_refreshing.set()
        await is_refreshed.wait()

    async def begin() -> None:
        nonlocal begun
        begun += 1
        if begun == 3:
            all_have_begun.set()
        await all_have_begun.wait()

    async with LocalSandbox(isolation="none").interpreter(tools={"begin": begin}) as one:
        one.sandbox.refresh_volume = refresh  # type: ignore[method-assign]
        running = [asyncio.ensure_future(one.execute("begin()")) for _ in range(3)]
        await is_refreshing.wait()
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not begun
        is_refreshed.set()
        await asyncio.gather(*running)
        assert refreshes == [0]
        await one.execute("SUBMIT()")
        assert refreshes == [0, 3]
