"""A Prefect server that has lost its leases, as one with leases in memory does when it restarts: no slot is lost."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import LocalSandbox, batch, reap
from rlm_batch.tasks.capacity import slots
from rlm_batch.tasks.capacity.limits import read_server_variable

from ...infra.ordinary_server import OrdinaryServer
from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

LIMIT = "rlm-batch.local-sandbox.forgotten"
BLOCK = "rlm-local-sandbox/forgotten"
WAIT = "import os, time\nwhile not os.path.exists(path): time.sleep(0.02)\nSUBMIT(done=True)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times between requests. The server's leases keep their length."""
    monkeypatch.setattr(slots, "RENEW_SECONDS", 0.3)
    monkeypatch.setattr(slots, "POLL_SECONDS", 0.1)


@pytest.fixture
def ordinary_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OrdinaryServer]:
    """Start a server with Prefect's defaults; this process and its children use it."""
    with OrdinaryServer(tmp_path / "ordinary") as server, temporary_settings({PREFECT_API_URL: server.url}):
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        yield server


def lose_leases() -> None:
    """Delete the leases of the tests' server, which keeps them in files."""
    leases = list((Path(os.environ["TMPDIR"]) / "server" / "concurrency_leases").glob("*.json"))
    assert leases
    for lease in leases:
        lease.unlink()


async def save_block() -> None:
    await LocalSandbox(isolation="none", max_sandboxes=2).save("forgotten", overwrite=True)  # type: ignore[misc]


async def count_slots(name: str = LIMIT) -> int:
    """Return the number of the limit's slots in use."""
    async with get_client() as client:
        return (await client.read_global_concurrency_limit_by_name(name)).active_slots


async def read_proof() -> str | None:
    """Return the id of the lease that proves the server's leases; None before it exists."""
    async with get_client() as client:
        return (await read_server_variable(client)).get("proof")


def start_waiting_run(go: Path) -> asyncio.Task[Any]:
    """Start a run that holds both slots until the file `go` exists."""
    return asyncio.create_task(batch(WAIT, inputs=[{"path": str(go)}] * 2, provider=BLOCK, max_workers=2))


async def wait_for_slots(count: int, other_than: str | None = None) -> str:
    """Wait until so many slots of the limit are in use, and return the id of its proof, which is not `other_than`."""

    async def read() -> str | None:
        try:
            proof, used = await read_proof(), await count_slots()
        except Exception:  # noqa: BLE001 - the limit does not exist yet
            return None
        return proof if used == count and proof != other_than else None

    proof = await wait_until_async(read, f"{count} slots in use")
    assert proof is not None
    return proof


async def test_a_run_whose_leases_are_lost_takes_new_ones_and_continues(tmp_path):
    await save_block()
    run = start_waiting_run(tmp_path / "go")
    proof = await wait_for_slots(2)
    lose_leases()
    await wait_for_slots(2, other_than=proof)
    (tmp_path / "go").touch()
    assert len(await run) == 2
    assert await count_slots() == 0


@pytest.mark.parametrize("by", ["next run", "reap"])
async def test_slots_of_dead_runs_are_given_back(by, tmp_path, caplog):
    await save_block()
    (tmp_path / "go").touch()
    await start_waiting_run(tmp_path / "go")
    async with get_client() as client:  # as a run that is killed
        await client.increment_concurrency_slots_with_lease([LIMIT], 2, "concurrency", 60)
    lose_leases()
    assert await count_slots() == 2
    if by == "reap":
        async with get_client() as client:  # as a person does
            await client.upsert_global_concurrency_limit_by_name(LIMIT, 1)
        await reap()
        assert f"the 2 slots in use of {LIMIT} are free again" in caplog.text
        async with get_client() as client:
            assert (await client.read_global_concurrency_limit_by_name(LIMIT)).limit == 1
    else:
        assert len(await start_waiting_run(tmp_path / "go")) == 2
    assert await count_slots() == 0


@pytest.mark.full
async def test_a_server_that_is_killed_and_started_again_costs_no_run_and_no_slot(ordinary_server, tmp_path):
    await save_block()
    run = start_waiting_run(tmp_path / "go")
    proof = await wait_for_slots(2)
    ordinary_server.kill()
    await asyncio.to_thread(ordinary_server.start)
    await wait_for_slots(2, other_than=proof)
    (tmp_path / "go").touch()
    assert len(await run) == 2
    assert await count_slots() == 0
