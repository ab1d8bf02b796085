"""The prune flow: it deletes results of runs that the server no longer has, and no others."""

import os
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from rlm_batch import batch
from rlm_batch.flows.inputs.host_paths import get_spill_directory
from rlm_batch.flows.inputs.spilling import PARAMETER_LIMIT
from rlm_batch.flows.prune import prune
from rlm_batch.tasks.ledger.run_record import list_run_records

pytestmark = pytest.mark.anyio

DAY = 86_400


def age(path: Path, days: float) -> None:
    """Set the times of a file, or of a folder and all below it, to the past."""
    for item in [path, *path.rglob("*")]:
        then = time.time() - days * DAY
        os.utime(item, (then, then))


def make_old(ledger: Path) -> None:
    """Let a ledger look as after 40 days."""
    (record,) = list_run_records(ledger)
    record.began, record.ended = record.began - 40 * DAY, (record.ended or record.began) - 40 * DAY
    record.write()
    age(ledger, 40)


async def run_one(code: str = "SUBMIT(y=1)") -> Path:
    return Path((await batch([code], provider="local:none", reuse_sandboxes=True)).results_path)


async def delete_run(ledger: Path) -> None:
    """Delete the flow run from the server, as `prefect flow-run delete` does."""
    async with get_client() as client:
        await client.delete_flow_run(list_run_records(ledger)[0].flow_run_id)  # type: ignore[arg-type]


async def test_only_old_results_of_deleted_runs_of_this_server_go(results: Path, tmp_path: Path) -> None:
    deleted, kept, young, foreign = [await run_one() for _ in range(4)]
    elsewhere = Path((await batch(["SUBMIT()"], results_path=tmp_path / "elsewhere")).results_path)
    for ledger in (deleted, young, foreign, elsewhere):
        await delete_run(ledger)
    (record,) = list_run_records(foreign)
    record.server = ""  # as of a script without a server
    record.write()
    for ledger in (deleted, kept, foreign, elsewhere):
        make_old(ledger)
    assert await prune(dry_run=True) == [str(deleted)]
    assert deleted.is_dir()
    assert await prune() == [str(deleted)]
    assert not deleted.exists()
    assert all(ledger.is_dir() for ledger in (kept, young, foreign, elsewhere))


async def test_files_of_long_parameters_stay_while_a_run_names_them(results: Path) -> None:
    async def run_long(name: str) -> tuple[Path, Path]:
        before = set(get_spill_directory().glob("*"))
        ledger = await run_one(f"SUBMIT(y=1)\n# {name * PARAMETER_LIMIT}")
        (file,) = set(get_spill_directory().glob("*")) - before
        return ledger, file

    (ledger, unused), (_, used) = await run_long("a"), await run_long("b")
    await delete_run(ledger)
    for file in (unused, used):
        age(file, 40)
    assert await prune() == [str(unused)]
    assert used.is_file()
    _, again = await run_long("a")
    assert again == unused


async def test_a_file_that_is_used_again_is_young(results: Path) -> None:
    code = f"SUBMIT(y=1)\n# {'c' * PARAMETER_LIMIT}"
    await run_one(code)
    (file,) = get_spill_directory().glob("*")
    age(file, 40)
    await delete_run(await run_one(code))
    assert file.stat().st_mtime > time.time() - DAY
