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
from ..blocks.worker_policy import find_policy_file, read_policy
from ..flows.prefect_server import check_server
from ..flows.proxies import check_proxies
from ..flows.server.shared import list_shared_servers, wants_shared_server
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..tasks.ledger.result_index import get_results_root
from .output import Json, print_json, print_whole_lines


def doctor(*, json: Json = False) -> int:
    """Print a row for each check, and return 0 if code can be isolated here, else 2."""
    checks: dict[str, Callable[[], str]] = {"Python": lambda: f"{platform.python_version()} at {sys.executable}"}
    isolating_checks: set[str] = set()
    for entry in PROVIDERS.values():
        kinds = [kind for kind in entry.kinds if kind != "none"]
        for kind in kinds:
            name = f"{entry.name}, {kind}"
            checks[name] = partial(_check_provider, entry, f"{entry.name}:{kind}")
            isolating_checks.add(name)
        if not kinds:
            checks[entry.name] = partial(_check_provider, entry, entry.name)
    checks["results"] = partial(_check_directory, get_results_root, "RLM_BATCH_RESULTS")
    checks["volumes"] = partial(_check_directory, partial(find_volumes_root, None), "RLM_BATCH_VOLUMES")
    checks["cache"] = partial(_check_directory, resolve_cache_root, "RLM_BATCH_CACHE")
    checks["Prefect's files"] = partial(_check_directory, PREFECT_HOME.value, "PREFECT_HOME")
    checks["worker's file"] = lambda: f"{read_policy()} ({find_policy_file() or 'no file'})"
    checks["Prefect"] = _check_server
    can_isolate = False
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, check in checks.items():
        try:
            works, text = True, check()
        except RlmBatchError as error:
            works, text = False, str(error)
        if works and name in isolating_checks:
            can_isolate = True
        if json:
            print_json({"check": name, "works": works, "details": text})
        table.add_row(name, Text("ok", "green") if works else Text("no", "red"), text)
    if not json:
        print_whole_lines(table)
    return 0 if can_isolate else 2


def _check_provider(entry: ProviderEntry, provider_name: str) -> str:
    async def check() -> str:
        provider = make_unsaved_provider(provider_name)
        assert provider is not None
        if not provider.has_credentials():
            raise ConfigurationError(entry.sign_in)
        text = await provider.check()
        kept = [info for info in await provider.list_sandboxes() if info.kept_until > time.time()]
        if kept:
            noun = "sandbox" if len(kept) == 1 else "sandboxes"
            text += f"; {len(kept)} kept {noun} of failed executions"
        return text

    return asyncio.run(check())


def _check_directory(find: Callable[[], Path], variable: str) -> str:
    """Return the directory that `find` names. Raises ConfigurationError if no files can be created in it."""
    root = find()
    existing = root
    try:
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryDirectory(dir=existing):
            return str(root)
    except OSError as error:
        raise ConfigurationError(
            f"{root} cannot be written ({error.strerror}): set {variable} to another directory"
        ) from None


def _check_server() -> str:
    url = PREFECT_API_URL.value()

    async def check_configured_server() -> str:
        check_proxies()
        async with get_client() as client:
            await check_server(client, url)
        return f"the server at {url} answers"

    if url:
        return asyncio.run(check_configured_server())
    if not wants_shared_server():
        return "no server is configured, so each program starts its own"
    servers = [f"process {server.pid} at {server.ui_url}" for server in list_shared_servers()]
    running = servers[0] if servers else "not running now"
    return f"no server is configured, so commands and programs share one in the background ({running})"
