"""The prune flow: deletes the results of flow runs that the Prefect server no longer has."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Annotated
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import PrefectClient, get_client
from pydantic import Field

from ..blocks.host_files.cache import resolve_cache_root
from ..tasks.ledger.result_index import get_results_root
from ..tasks.ledger.retention import KeptFolder, OldFolder, delete_folder, list_old_folders
from ..tasks.ledger.run_record import list_run_records
from .inputs.host_paths import SPILLED_FILE, get_spill_directory
from .orphans import PAGE_SIZE, get_server_id, read_flow_runs
from .prefect_flow import define_function_flow
from .reap import DryRun

DAY_SECONDS = 86_400.0

OlderThanDays = Annotated[
    float, Field(gt=0, description="Days for which nothing has used the results. Younger results stay.")
]


@define_function_flow("rlm-prune")
async def prune(older_than_days: OlderThanDays = 30, dry_run: DryRun = False) -> list[str]:
    """Delete old results of flow runs that this Prefect server no longer has.

    `prefect flow-run delete` and Prefect's own retention delete a run from the server, and not its results. This flow
    looks at the results root of the machine that it runs on, and deletes:

    - ledgers all of whose runs were runs of this server, and are no longer on it
    - files of long parameters that no run and no deployment of this server names

    Results of scripts without a server, of other servers, and at a `results_path` elsewhere stay. `rlm-batch prune`
    deletes by age alone.

    Returns:
        The paths of what was deleted; with `dry_run`, of what would be deleted.

    Raises:
        ConfigurationError: A parameter is wrong.
    """
    log, before = get_run_logger(), time.time() - older_than_days * DAY_SECONDS
    root, cache = get_results_root(), resolve_cache_root()
    found = await asyncio.to_thread(lambda: list(list_old_folders(root, cache, before)))
    ledgers = [folder for folder in found if isinstance(folder, OldFolder) and folder.record is not None]
    async with get_client() as client:
        ledgers = await _select_deleted_runs(client, ledgers)
        files = await _list_unused_files(client, before)
    deleted: list[str] = []
    for ledger in ledgers:
        kept = None if dry_run else await asyncio.to_thread(delete_folder, ledger)
        if isinstance(kept, KeptFolder):
            log.warning("%s stays: %s", kept.path, kept.reason)
        else:
            deleted.append(str(ledger.path))
    for file in files:
        if not dry_run:
            file.unlink(missing_ok=True)
        deleted.append(str(file))
    for path in deleted:
        log.info("%s %s", "would delete" if dry_run else "deleted", path)
    return deleted


async def _select_deleted_runs(client: PrefectClient, ledgers: list[OldFolder]) -> list[OldFolder]:
    """Return the ledgers all of whose runs were runs of this server that it no longer has."""
    server = await get_server_id()
    ids: dict[Path, set[UUID]] = {}
    for ledger in ledgers:
        records = list_run_records(ledger.path)
        if records and all(record.server and record.server == server for record in records):
            ids[ledger.path] = {UUID(record.flow_run_id) for record in records}
    existing = await read_flow_runs(client, set().union(*ids.values()))
    return [ledger for ledger in ledgers if ledger.path in ids and ids[ledger.path].isdisjoint(existing)]


async def _list_unused_files(client: PrefectClient, before: float) -> list[Path]:
    """Return the files of long parameters that nothing has used since `before`, and that the server does not name."""
    directory = get_spill_directory()
    if not directory.is_dir():
        return []
    files = [file for file in directory.iterdir() if SPILLED_FILE.fullmatch(file.name) and file.is_file()]
    old = [file for file in files if file.lstat().st_mtime < before]
    if not old:
        return []
    named: set[str] = set()
    for read in (client.read_flow_runs, client.read_deployments):  # Flows of other names may have called ours.
        offset = 0
        while page := await read(limit=PAGE_SIZE, offset=offset):
            text = json.dumps([item.parameters for item in page])
            named |= {match.group() for match in re.finditer(SPILLED_FILE.pattern, text)}
            offset += len(page)
    return [file for file in old if file.name not in named]
