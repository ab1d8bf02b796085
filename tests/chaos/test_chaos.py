"""Tests of batches with faults: right results, none computed twice, and nothing left behind.

`make chaos` runs all of them, with a seed that it prints; `make test-full` runs a short form.
"""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from ..infra.waiting import wait_until
from .faults import Proxy, chance
from .stage import Stage

NAMES = ("local", "daytona", "modal")


def check_killed_batch(stage: Stage, size: int, times: int, seconds: float, *, slots: bool = False) -> None:
    """Kill a batch's process repeatedly, then resume the batch. No round starts after that many seconds."""
    dice = chance("kill", stage.provider.name)
    started_at, strikes, batches = time.monotonic(), 0, [stage.batch(size, dice)]
    while not strikes or (strikes < times and time.monotonic() < started_at + seconds):
        if len(batches[-1].results()) == size:
            batches.append(stage.batch(size, dice))
        host = stage.start(batches[-1])
        batches[-1].wait_for_progress(host, dice)
        strikes += host.status() is None
        host.kill(signal.SIGKILL)
        assert host.wait_for_exit() in (0, -signal.SIGKILL), host.read_output()
    stage.check_nothing_remains()
    for batch in batches:
        stage.finish(batch)
    stage.check_nothing_remains(after_lifetime=False)
    if slots:
        stage.no_slot_is_held()
    executions = sum(sum(batch.count_starts().values()) for batch in batches)
    print(f"{stage.provider.name}: {strikes} kills of {len(batches)} batches of {size}, {executions} executions begun")
    assert strikes


@pytest.mark.full
@pytest.mark.parametrize("provider", ["local"], indirect=True)
def test_a_killed_batch_resumes_with_every_result_and_leaves_nothing(stage: Stage) -> None:
    check_killed_batch(stage, size=12, times=3, seconds=30)


@pytest.mark.chaos
@pytest.mark.parametrize("provider", NAMES, indirect=True)
def test_batches_killed_at_random_moments_resume_with_every_result(stage: Stage) -> None:
    check_killed_batch(stage, size=50, times=20, seconds=60, slots=True)


@pytest.mark.chaos
@pytest.mark.parametrize("provider", NAMES, indirect=True)
def test_an_interrupted_batch_deletes_its_sandboxes_and_resumes(stage: Stage) -> None:
    dice = chance("interrupt", stage.provider.name)
    batch, started_at, strikes = stage.batch(50, dice), time.monotonic(), 0
    while not strikes or (strikes < 6 and time.monotonic() < started_at + 30):
        if len(batch.results()) == 50:
            batch = stage.batch(50, dice)
        host = stage.start(batch)
        batch.wait_for_progress(host, dice)
        strikes += host.status() is None
        number = dice.choice((signal.SIGINT, signal.SIGTERM))
        host.kill(number)
        host.wait_for_exit()
        stage.check_nothing_remains(after_lifetime=False)
    stage.finish(batch)
    stage.no_slot_is_held()
    print(f"{stage.provider.name}: {strikes} interrupts, {sum(batch.count_starts().values())} executions begun")
    assert strikes


@pytest.mark.chaos
@pytest.mark.parametrize("provider", NAMES, indirect=True)
def test_failing_provider_and_server_calls_run_each_execution_once(stage: Stage, server: str) -> None:
    dice = chance("faults", stage.provider.name)
    batch = stage.batch(50, dice)
    stage.provider.fail(0.2, dice.randrange(2**32))
    with Proxy(server, 0.2, dice) as proxy:
        host = stage.start(batch, proxy.url, retries=8)
        assert host.wait_for_exit(300) == 0, host.read_output()
    failed = stage.provider.faults()
    stage.provider.fail(0.0, 0)
    batch.complete()
    assert batch.count_starts() == dict.fromkeys(range(50), 1)
    stage.check_nothing_remains()
    print(f"{stage.provider.name}: {failed} calls and {dict(proxy.faults)} connections failed")


@pytest.mark.chaos
@pytest.mark.parametrize("provider", NAMES, indirect=True)
def test_an_idempotent_batch_survives_the_loss_of_its_sandboxes(stage: Stage) -> None:
    dice = chance("losses", stage.provider.name)
    batch = stage.batch(50, dice)
    host, taken = stage.start(batch, idempotent=True, retries=30), 0
    while host.status() is None and taken < 10:
        alive = sorted(stage.provider.sandboxes())
        if alive:
            stage.provider.take(dice.choice(alive))
            taken += 1
        time.sleep(dice.uniform(0.0, 0.3))
    assert host.wait_for_exit(300) == 0, host.read_output()
    batch.complete()
    stage.check_nothing_remains()
    print(f"{stage.provider.name}: {taken} sandboxes taken, {sum(batch.count_starts().values())} executions begun")
    assert taken


def is_listening(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.chaos
@pytest.mark.parametrize("provider", ["local"], indirect=True)
def test_a_batch_survives_a_kill_and_restart_of_its_server(stage: Stage, tmp_path: Path) -> None:
    from rlm_batch.flows.server.process import ServerProcess

    dice = chance("server", stage.provider.name)
    batch = stage.batch(50, dice, "local:none")  # the block is missing on that server
    with ServerProcess.start(tmp_path / "home") as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        host = stage.start(batch, server.url)
        batch.wait_for_progress(host, dice)
        os.killpg(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_listening(port))
        with ServerProcess.start(tmp_path / "home", port=port):
            assert host.wait_for_exit(300) == 0, host.read_output()
            batch.complete()
            assert batch.count_starts() == dict.fromkeys(range(50), 1)
    stage.check_nothing_remains()  # the server is a process too
