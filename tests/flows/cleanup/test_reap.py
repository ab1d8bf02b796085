"""The `reap` flow: which sandboxes it removes or keeps, on each provider and for every kind of owner."""

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import SetStateStatus
from prefect.events import emit_event
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventOccurredFilter
from prefect.states import Cancelling, Completed, Crashed, Pending, Running

from rlm_batch import DaytonaSandbox, LocalSandbox, ModalSandbox, SandboxesLeft, reap
from rlm_batch.blocks.local.inventory import CREATION_GRACE_SECONDS
from rlm_batch.blocks.modal.account import open_account
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.flows.listener import FlowListener
from rlm_batch.flows.orphans import (
    OrphanedSandbox,
    find_orphans,
    get_server_id,
    register_own_run,
    remove_sandboxes,
)
from rlm_batch.flows.reap import MIN_SILENCE_SECONDS
from rlm_batch.sandbox.process_identity import read_own_identity
from rlm_batch.tasks.capacity import limits

from ...infra.deployed import Deployed
from ...infra.listening import run_with_listener
from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio
PROVIDERS = ("local", "daytona", "modal")
# One cloud suffices in quick runs, because both use the same removal code.
CLOUDS = ("daytona", pytest.param("modal", marks=pytest.mark.full))


class OrphanCollector(FlowListener):
    """A listener that collects the warnings and orphaned sandboxes of one run of the flow."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def on_warning(self, text: str) -> None:
        self.sentences.append(text)

    def on_orphans(self, orphans: Sequence[OrphanedSandbox]) -> None:
        self.orphans = orphans


@flow(name="somebody's")
def somebodys() -> None:
    """A flow that never runs: the tests only create its runs on the server."""


@task
def nothing() -> None:
    """A task that never runs: the tests only create its runs on the server."""


@pytest.fixture
async def client() -> AsyncIterator[PrefectClient]:
    async with get_client() as client:
        yield client


async def make_provider(name: str, request: pytest.FixtureRequest) -> tuple[str, SandboxProvider]:
    """Return the provider's `provider` parameter and the provider."""
    if name == "local":
        return "local:none", LocalSandbox(isolation="none")
    if name == "daytona":
        request.getfixturevalue("daytona")
        return "daytona", DaytonaSandbox()
    hello = request.getfixturevalue("modal_standin").hello
    block = ModalSandbox(token_id=hello["token_id"], token_secret=hello["token_secret"])
    await block.save("reaped", overwrite=True)  # type: ignore[misc]
    return "rlm-modal-sandbox/reaped", block


@pytest.fixture(params=["local", *CLOUDS])
async def provider(request: pytest.FixtureRequest) -> tuple[str, SandboxProvider]:
    return await make_provider(request.param, request)


async def create_calling_task_run(client: PrefectClient, run: FlowRun) -> uuid.UUID:
    """Return the task run through which a flow run called another flow in its process."""
    return (await client.create_task_run(nothing, run.id, uuid.uuid4().hex)).id


async def list_ids(provider: SandboxProvider) -> set[str]:
    return {info.id for info in await provider.list_sandboxes()}


def ended_process() -> str:
    """Return the identity of a process of this machine that has ended."""
    code = "from rlm_batch.sandbox.process_identity import read_own_identity as r; print(r())"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def read_log(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


async def test_reap_deletes_ended_sandboxes_and_keeps_live_or_foreign_ones(
    provider: tuple[str, SandboxProvider], client: PrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    name, block = provider
    server, now, begun = await get_server_id(), time.time(), time.monotonic()
    live = await client.create_flow_run(somebodys, state=Running())
    waiting = await client.create_flow_run(somebodys, state=Pending())
    over = await client.create_flow_run(somebodys, state=Completed())
    called = await client.create_flow_run(
        somebodys, state=Running(), parent_task_run_id=await create_calling_task_run(client, over)
    )
    busy = await client.create_flow_run(
        somebodys, state=Running(), parent_task_run_id=await create_calling_task_run(client, live)
    )
    away = await client.create_flow_run(somebodys, state=Running())
    odd = await client.create_flow_run(somebodys, state=Running())
    killed, alive = {"rlm-batch-process": ended_process()}, read_own_identity()
    elsewhere = {"rlm-batch-process": "0" * 32 + alive[32:]}  # another boot id, and otherwise the same process
    # A process in another PID namespace, as in a container.
    unseen = {"rlm-batch-process": killed["rlm-batch-process"].replace(alive.split(".")[1], "1")}

    def labels(run: object = "", server: str = "", **changed: float) -> dict[str, str]:
        times = {f"rlm-batch-{name}": str(int(value)) for name, value in changed.items()}
        return block.labels(str(run), server) | times

    owners = {
        "of a run that is over": labels(over.id, server, began=now - 100),
        "of a run that was deleted": labels(uuid.uuid4(), server, began=now - 1000),
        "of a run in the process of one that is over": labels(called.id, server, began=now - 10),
        "a script's, past its lifetime": labels(began=now - 20, expires=now - 10),
        "another server's, past its lifetime": labels(uuid.uuid4(), "another", began=now - 3, expires=now - 1),
        "of a run whose process here has ended": labels(live.id, server, began=now - 7) | killed,
        "a script's, whose process here has ended": labels(began=now - 2) | killed,
        "of a live run": labels(live.id, server, began=now - 5000),
        "of a run elsewhere": labels(away.id, server, began=now - 40) | elsewhere,
        "of a run that began at no time": labels(odd.id, server, began=1e18) | elsewhere,
        "of a run in another container": labels(away.id, server, began=now - 50) | unseen,
        "of a run on another machine": labels(away.id, server, began=now - 60) | killed | {"rlm-batch-host": "away"},
        "a script's elsewhere": labels() | elsewhere,
        "of no process": {name: text for name, text in labels().items() if name != "rlm-batch-process"},
        "of a run in the process of a live one": labels(busy.id, server),
        "of a run that waits": labels(waiting.id, server),
        "of another server's run": labels(uuid.uuid4(), "another", began=now - 5000),
        "a script's": labels(began=now - 5000),
        "one whose expiry is damaged": labels() | {"rlm-batch-expires": "x"},
    }
    boxes = dict(zip(owners, await asyncio.gather(*map(block.open, owners.values())), strict=True))
    gone = {boxes[owner].id for owner in list(owners)[:7]}
    listener = OrphanCollector()
    try:
        with caplog.at_level(logging.INFO):
            assert set(await reap(name, dry_run=True)) == gone
        assert await list_ids(block) == {box.id for box in boxes.values()}
        assert "7 sandboxes of" in read_log(caplog)
        assert re.search(r"would be removed, after [1-5],", read_log(caplog))
        assert set(await run_with_listener(reap, listener, name)) == gone
        assert await list_ids(block) == {box.id for box in boxes.values()} - gone
        assert 1142 <= sum(left.seconds for left in listener.orphans) < 1142 + 7 * 600
        assert {left.info.id: left.reason for left in listener.orphans} == {
            boxes["of a run that is over"].id: "its flow run is Completed",
            boxes["of a run that was deleted"].id: "its flow run was deleted",
            boxes["of a run in the process of one that is over"].id: "the flow run that called its own is Completed",
            boxes["a script's, past its lifetime"].id: "its lifetime is over",
            boxes["another server's, past its lifetime"].id: "its lifetime is over",
            boxes["of a run whose process here has ended"].id: "its process has ended",
            boxes["a script's, whose process here has ended"].id: "its process has ended",
        }
        here = "whose process is alive on this machine"
        both = ", ".join(sorted(["away", socket.gethostname()]))
        there = "; reap on that machine removes them once their process has ended"
        silent = "left: {count} of flow run {run} on {hosts}, silent for # s: `--older-than SECONDS` removes those of "
        silent += f"silent runs{there}"
        script = f"left: 1 sandbox of a script on {socket.gethostname()}, until their lifetime ends within # h{there}"
        kept = [re.sub(r"(?<=for )\d+(?= s)|(?<=within )[0-9.]+", "#", sentence) for sentence in listener.sentences]
        assert sorted(kept) == sorted(
            [
                *(f"left: 1 sandbox of flow run {run.name}, {here}" for run in (live, busy, waiting)),
                f"left: 2 sandboxes of a script, {here}",
                f"left: 1 sandbox of a flow run of another server, {here}",
                silent.format(count="3 sandboxes", run=away.name, hosts=both),
                silent.format(count="1 sandbox", run=odd.name, hosts=socket.gethostname()),
                script,
                script,
            ]
        )
        silence = re.search(r"silent for (\d+) s", "".join(listener.sentences))
        assert silence is not None
        # The silence counts from the server's events, rounded. From the sandboxes' labels it would be 40 s or more.
        assert 0 <= int(silence[1]) <= time.monotonic() - begun + 1
        assert await reap(name) == []
        # Prefect calls the hook with keywords, in a worker whose run's process has ended.
        named_run = live.model_copy(update={"parameters": {"provider": name}})
        await remove_sandboxes(flow=somebodys, flow_run=named_run, state=Cancelling())
        assert await list_ids(block) == {box.id for box in boxes.values()} - gone - {boxes["of a live run"].id}
    finally:
        await asyncio.gather(*(box.remove() for box in boxes.values()))


async def test_the_hook_deletes_by_parameters_and_spares_the_same_process(
    client: PrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    block = LocalSandbox(isolation="none")
    mine, gone = [await client.create_flow_run(somebodys, state=Running()) for _ in range(2)]
    boxes = [await block.open(block.labels(str(run.id), await get_server_id())) for run in (mine, gone)]
    left = {box.id for box in boxes}
    register_own_run(str(mine.id))
    try:

        async def called(run: FlowRun, **parameters: Any) -> set[str]:
            run = run.model_copy(update={"parameters": parameters})
            await remove_sandboxes(flow=somebodys, flow_run=run, state=Crashed())
            return await list_ids(block)

        assert await called(mine, provider="local") == left  # the lanes of the run itself remove its sandboxes
        assert await called(gone, provider="rlm-local-sandbox/nosuch") == left
        assert "could not be listed, and stay until they expire: " in read_log(caplog)
        assert "nosuch" in read_log(caplog)
        assert await called(gone) == {boxes[0].id}  # the default provider of the flows is local
    finally:
        await asyncio.gather(*(box.remove() for box in boxes))


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_foreign_sandbox_in_the_same_account_is_not_touched(name: str, request: pytest.FixtureRequest) -> None:
    called, block = await make_provider(name, request)
    theirs = {"managed-by": "them", "rlm-batch-run": str(uuid.uuid4()), "rlm-batch-server": await get_server_id()}
    if isinstance(block, DaytonaSandbox):
        from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams

        async with AsyncDaytona() as sdk:
            box = await sdk.create(CreateSandboxFromSnapshotParams(name="a stranger's", labels=theirs))
            assert await reap(called) == []
            assert [listed["name"] for listed in request.getfixturevalue("daytona").state()["sandboxes"]] == [box.name]
            await box.delete()
    else:
        assert isinstance(block, ModalSandbox)
        import modal

        account = await open_account(block)
        box = await modal.Sandbox.create.aio(app=account.app, client=account.client, tags=theirs)
        assert await reap(called) == []
        assert box.object_id in request.getfixturevalue("modal_standin").ask("state")["sandboxes"]
        await box.terminate.aio()
        await box.detach.aio()


async def test_a_local_folder_is_deleted_only_after_its_host_died() -> None:
    top, long_ago = Path(tempfile.gettempdir()), time.time() - CREATION_GRACE_SECONDS - 10

    def folder(name: str, *, old: bool) -> Path:
        path = top / name
        (path / "work").mkdir(parents=True)
        (path / "work" / "file").write_text("x")
        if old:
            os.utime(path, (long_ago, long_ago))
        return path

    half_made = folder("rlm-batch-00000000000a", old=True)
    being_made = folder("rlm-batch-00000000000b", old=False)
    later = time.time() + 3600
    os.utime(being_made, (later, later))  # keep the folder young however long this test takes
    somebodys_own = folder("rlm-batch-results-of-mine", old=True)
    damaged = folder("rlm-batch-00000000000c", old=True)
    (damaged / "sandbox.json").write_text("[1, 2]")
    file = top / "rlm-batch-00000000000d"
    file.write_text("x")
    block = LocalSandbox(isolation="none")
    alive = await block.open(block.labels(""))
    try:
        assert await reap("local:none") == [half_made.name]
        left = {path.name for path in top.glob("rlm-batch-*")}
        assert left == {being_made.name, somebodys_own.name, damaged.name, file.name, alive.id}
        assert (somebodys_own / "work" / "file").exists()
    finally:
        await alive.remove()
        for path in (being_made, somebodys_own, damaged):
            (path / "work" / "file").unlink()
            (path / "sandbox.json").unlink(missing_ok=True)
            (path / "work").rmdir()
            path.rmdir()
        file.unlink()


HOST = """
import asyncio, sys
from rlm_batch import batch

async def main():
    code = ["import time; time.sleep(600)"] * 2
    await asyncio.gather(*(batch(code, provider=name, timeout=600) for name in sys.argv[1:]))

asyncio.run(main())
"""


def start_batches(*providers: str) -> subprocess.Popen[bytes]:
    """Start a process that runs a batch on each of the providers."""
    return subprocess.Popen([sys.executable, "-c", HOST, *providers])


async def wait_until_open(*blocks: SandboxProvider) -> None:
    """Wait until each of the providers has both sandboxes of the process."""

    async def is_open() -> bool:
        return [len(await list_ids(block)) for block in blocks] == [2] * len(blocks)

    await wait_until_async(is_open)


@pytest.mark.full
async def test_reap_spares_a_live_run_and_deletes_a_killed_one(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, begun = dict([await make_provider(name, request) for name in PROVIDERS]), time.time()
    host = start_batches(*blocks)
    try:
        await wait_until_open(*blocks.values())
        server = await get_server_id()
        for name, block in blocks.items():
            assert await reap(name) == []
            sandboxes = await block.list_sandboxes()
            assert {info.server for info in sandboxes} == {server}
            assert len({info.run for info in sandboxes}) == 1
            assert all(begun - 1 < info.began <= time.time() < info.expires for info in sandboxes)
            assert len(await list_ids(block)) == 2
    finally:
        host.kill()
        host.wait()
    # Another machine knows only that the server reports the run as Running. This machine knows that the process ended.
    remote = {name: block for name, block in blocks.items() if name != "local:none"}
    with monkeypatch.context() as another_machine:
        another_machine.setattr(socket, "gethostname", lambda: "another")
        for name in remote:
            assert await reap(name) == []
            assert await reap(name, older_than=MIN_SILENCE_SECONDS) == []
    for name, block in blocks.items():
        assert len(await reap(name)) == 2
        assert await list_ids(block) == set()
    assert not list(Path(tempfile.gettempdir()).glob("rlm-batch-*"))


@pytest.mark.full
async def test_a_terminated_script_leaves_nothing_at_any_provider(request: pytest.FixtureRequest) -> None:
    """Prefect raises outside the event loop. The loop then cancels every task, and not only the flow's task."""
    blocks = dict([await make_provider(name, request) for name in PROVIDERS])
    for name in blocks:
        host = start_batches(name)
        try:
            await wait_until_open(blocks[name])
            host.terminate()
            assert await asyncio.to_thread(host.wait, 100) != 0
        finally:
            host.kill()
            host.wait()
        assert await list_ids(blocks[name]) == set()


async def test_a_flow_run_whose_process_was_killed_becomes_crashed_and_can_be_retried(
    client: PrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = (await Deployed.made(code=["SUBMIT(x=1)"], provider="local")).run
    living = (await Deployed.made(code=["SUBMIT(x=1)"], provider="local")).run  # It sends no heartbeats.
    foreign = await client.create_flow_run(somebodys, state=Running())
    block, server = LocalSandbox(isolation="none"), await get_server_id()
    for run in (killed, living):
        await client.set_flow_run_state(run.id, Running(), force=True)
    ended = {"rlm-batch-process": ended_process()}
    box = await block.open(block.labels(str(killed.id), "") | ended)
    other_box = await block.open(block.labels(str(living.id), server))

    async def read_states() -> list[str | None]:
        return [(await client.read_flow_run(run.id)).state_name for run in (killed, living, foreign)]

    try:
        await reap("local:none", dry_run=True)
        assert await read_states() == ["Running"] * 3  # They have begun less than ten minutes ago.
        monkeypatch.setattr("rlm_batch.flows.reap.MAX_SILENCE_SECONDS", 0)
        await reap("local:none", dry_run=True)
        assert await read_states() == ["Running"] * 3
        assert await reap("local:none") == [box.id]
    finally:
        await box.remove()
        await other_box.remove()
    assert await read_states() == ["Crashed", "Running", "Running"]
    deployed = Deployed(killed)
    assert await deployed.retry() == SetStateStatus.ACCEPT
    assert (await deployed.execute()).is_completed()


@pytest.mark.full
async def test_a_silent_runs_sandboxes_are_deleted_only_on_request(client: PrefectClient) -> None:
    block = LocalSandbox(isolation="none")
    server, later = await get_server_id(), time.time() + 3000  # the time at which `reap` inspects the sandboxes
    silent, speaking, busy = [await client.create_flow_run(somebodys, state=Running()) for _ in range(3)]
    emit_event(
        "prefect.flow-run.heartbeat",
        resource={"prefect.resource.id": f"prefect.flow-run.{speaking.id}"},
        occurred=datetime.fromtimestamp(later - 900, UTC),  # type: ignore[arg-type]
    )

    async def is_known() -> bool:
        span = EventOccurredFilter(since=datetime.now(UTC), until=datetime.fromtimestamp(later, UTC))  # type: ignore[arg-type]
        mine = EventAnyResourceFilter(id=[f"prefect.flow-run.{speaking.id}"])
        return bool((await client.read_events(EventFilter(any_resource=mine, occurred=span), limit=1)).events)

    await wait_until_async(is_known)
    boxes = [await block.open(block.labels(str(run.id), server)) for run in (silent, speaking, busy)]
    new = {"rlm-batch-began": str(int(later - 900))}
    boxes.append(await block.open(block.labels(str(busy.id), server) | new))
    try:
        assert await reap("local:none", older_than=MIN_SILENCE_SECONDS) == []
        assert (await find_orphans(block, server, None, later)).orphans == []
        assert (await find_orphans(block, "another", 1000, later)).orphans == []
        (left,) = (await find_orphans(block, server, 1000, later)).orphans
        assert left.info.id == boxes[0].id
        assert left.reason == "its flow run is Running, and has been silent for more than 1,000 s"
        assert len((await find_orphans(block, server, 800, later)).orphans) == 4
    finally:
        for box in boxes:
            await box.remove()


async def test_a_failed_deletion_does_not_stop_reap_and_is_reported(
    daytona: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlm_batch.blocks.daytona import account, errors

    block = DaytonaSandbox()
    past = {"rlm-batch-expires": str(int(time.time()) - 5)}
    boxes = [await block.open(block.labels("") | past) for _ in range(3)]
    daytona.set(fault_rate=1.0, faults=["503"], fault_where="^DELETE .*")
    with monkeypatch.context() as impatient:
        impatient.setattr(errors, "TRIES", 2)
        impatient.setattr(account, "DELETE_SECONDS", 0.5)
        with pytest.raises(SandboxesLeft, match="3 of 3 sandboxes could not be removed") as caught:
            await reap("daytona")
    assert set(caught.value.sandboxes) == {box.id for box in boxes}
    daytona.set(fault_rate=0.0)
    assert set(await reap("daytona")) == {box.id for box in boxes}
    for box in boxes:
        with suppress(Exception):
            await box.remove()


async def test_an_id_created_by_a_concurrent_process_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VARIABLE_NAME", f"test_{uuid.uuid4().hex[:12]}")
    read = PrefectClient.read_variable_by_name
    others: list[str] = []

    async def read_before_the_other(client: PrefectClient, name: str) -> Any:
        variable = await read(client, name)
        if not others:
            others.append(uuid.uuid4().hex)
            await client.create_variable(VariableCreate(name=name, value=others[0]))
        return variable

    monkeypatch.setattr(PrefectClient, "read_variable_by_name", read_before_the_other)
    assert [await get_server_id()] == others
