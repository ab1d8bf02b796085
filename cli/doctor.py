"""The command `doctor`: tests providers, isolation levels, directories and the Prefect server."""

import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_HOME
from rich.table import Table
from rich.text import Text

from ..blocks.host_files.cache import resolve_cache_root
from ..blocks.registry import PROVIDERS, ProviderEntry, make_unsaved_provider
from ..blocks.storage.local_volume import find_volumes_root
from ..flows.prefect_server import check_server, describe_lost_leases
from ..flows.proxies import check_proxies
from ..flows.server.shared import SharedServerUnusable, list_shared_servers, wants_shared_server
from ..sandbox.errors import RlmBatchError
from ..tasks.ledger.result_index import get_results_root
from .output import Json, print_json, print_whole_lines


def doctor(*, json: Json = False) -> int:
    """Print a row for each check, and return 0 if code can be isolated here, else 2."""
    rows = [("Python", True, f"{platform.python_version()} at {sys.executable}")]
    can_isolate = False
    for entry in PROVIDERS.values():
        kinds = [kind for kind in entry.kinds if kind != "none"]
        for kind in kinds:
            works, text = asyncio.run(_check_provider(entry, f"{entry.name}:{kind}"))
            can_isolate = can_isolate or works
            rows.append((f"{entry.name}, {kind}", works, text))
        if not kinds:
            rows.append((entry.name, *asyncio.run(_check_provider(entry, entry.name))))
    rows.append(_check_directory("results", get_results_root, "RLM_BATCH_RESULTS"))
    rows.append(_check_directory("volumes", partial(find_volumes_root, None), "RLM_BATCH_VOLUMES"))
    rows.append(_check_directory("cache", resolve_cache_root, "RLM_BATCH_CACHE"))
    rows.append(_check_directory("Prefect's files", PREFECT_HOME.value, "PREFECT_HOME"))
    rows.append(asyncio.run(_check_server()))
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, works, text in rows:
        if json:
            print_json({"check": name, "works": works, "details": text})
        table.add_row(name, Text("ok", "green") if works else Text("no", "red"), text)
    if not json:
        print_whole_lines(table)
    return 0 if can_isolate else 2


async def _check_provider(entry: ProviderEntry, provider_name: str) -> tuple[bool, str]:
    provider = make_unsaved_provider(provider_name)
    assert provider is not None
    if not provider.has_credentials():
        return False, entry.sign_in
    try:
        text = await provider.check()
    except RlmBatchError as error:
        return False, str(error)
    try:
        kept = sum(info.kept_until > time.time() for info in await provider.list_sandboxes())
        snapshots = await provider.list_snapshots()
    except RlmBatchError as error:
        return True, f"{text}; {error.summary}"
    if kept:
        text += f"; {kept} kept {'sandbox' if kept == 1 else 'sandboxes'} of failed executions"
    if snapshots:
        size = sum(snapshot.size for snapshot in snapshots)
        oldest = (time.time() - min(snapshot.last_used for snapshot in snapshots)) / 86_400
        text += (
            f"; {len(snapshots)} kept {'set-up' if len(snapshots) == 1 else 'set-ups'} "
            f"({size:.1f} GiB, unused for up to {oldest:.0f} days; see rlm-batch snapshot list)"
        )
    return True, text


def _check_directory(name: str, find: Callable[[], Path], variable: str) -> tuple[str, bool, str]:
    try:
        root = find()
    except RlmBatchError as error:
        return name, False, str(error)
    try:
        closest = next(directory for directory in (root, *root.parents) if directory.exists())
        with tempfile.TemporaryDirectory(dir=closest):
            return name, True, str(root)
    except OSError as error:
        return name, False, f"{root} cannot be written ({error.strerror}): set {variable} to another directory"


def _check_shared_server() -> tuple[str, bool, str]:
    try:
        if not wants_shared_server():
            return "Prefect", True, "no server is configured, so each program starts its own"
        running = next(
            (f"process {server.pid} at {server.ui_url}" for server in list_shared_servers()), "not running now"
        )
    except (RlmBatchError, SharedServerUnusable) as error:
        return "Prefect", False, str(error)
    return "Prefect", True, f"no server is configured, so commands share one in the background ({running})"


async def _check_server() -> tuple[str, bool, str]:
    url = PREFECT_API_URL.value()
    if not url:
        return _check_shared_server()
    try:
        check_proxies()
        async with get_client() as client:
            await check_server(client, url, "unset PREFECT_API_URL")
            warning = await describe_lost_leases(client)
    except RlmBatchError as error:
        return "Prefect", False, str(error)
    return "Prefect", True, f"the server at {url} answers{f'; {warning}' if warning else ''}"
