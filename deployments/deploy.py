"""Deployments on the configured Prefect server: the deployments in prefect.yaml, and a user's own."""

import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import DeploymentApplyError
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL
from prefect.utilities.callables import parameter_schema

from ..blocks import block_types
from ..flows.prefect_server import check_server
from ..flows.proxies import check_proxies
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.server_message import describe_server_error

WORK_POOL = "rlm-batch"  # the name of the pool whose workers run our deployments
TAG = "rlm-batch"  # a tag of our deployments
PREFECT_FILE = Path(__file__).with_name("prefect.yaml")
# A template without variables. By the command or the environment, a run could start any program on the worker.
POOL_FILE = Path(__file__).with_name("work_pool.json")
MAX_PARAMETERS_BYTES = 512 * 1024  # bytes of JSON that a Prefect server accepts for a run
# A run that is due while another one runs is skipped.
ONE_AT_ONCE = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
# Local sandboxes take the memory and the processors of their worker's machine.
FOUR_AT_ONCE = {"limit": 4, "collision_strategy": "ENQUEUE"}


async def deploy(work_pool: str = WORK_POOL) -> dict[str, str]:
    """Create or update our deployments on the configured server, with the block types and the work pool.

    An existing deployment keeps the settings that a user may have changed: parameters, schedules, limit, tags and work
    pool. It gets the entrypoint, description and parameter schema of this version of the package.

    Args:
        work_pool: The work pool of new deployments. A missing pool is created with the type `process`.

    Returns:
        The work pools of our deployments, by their names as FLOW/NAME.

    Raises:
        ConfigurationError: No server is configured, or the server does not answer or refuses a request.
    """
    template = json.loads(POOL_FILE.read_text(encoding="utf-8"))
    pools: dict[str, str] = {}
    async with _open_client() as client:
        for name in block_types.__all__:
            await getattr(block_types, name).aregister_type_and_schema(client=client)
        try:
            await client.create_work_pool(WorkPoolCreate(name=work_pool, type="process", base_job_template=template))
        except ObjectAlreadyExists:
            _warn_of_open_pool(await client.read_work_pool(work_pool))
        for entry in load_entries():
            flow = _load_flow(entry["entrypoint"])
            name = f"{flow.name}/{entry['name']}"
            existing = await _read_deployment(client, name)
            if existing is None:
                await _apply(flow, entry, work_pool)
                pools[name] = work_pool
            else:
                changes = DeploymentUpdate(
                    version=version("rlm-batch"),
                    description=entry["description"],
                    entrypoint=entry["entrypoint"],
                    parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True),
                )
                await client.update_deployment(existing.id, changes)
                pools[name] = existing.work_pool_name or work_pool
    return pools


def _warn_of_open_pool(pool: WorkPool) -> None:
    """Say how to close a process pool whose runs can set the command, environment or directory of their process."""
    template = json.dumps(pool.base_job_template)
    # Prefect adds a run's `env` to a fixed one, too.
    if pool.type == "process" and any(f'"{name}"' in template for name in ("command", "env", "working_dir")):
        words = ("prefect", "work-pool", "update", pool.name, "--base-job-template", str(POOL_FILE))
        print(
            f"Everyone who starts a run in the work pool {pool.name} can run any program as its worker's user. Close "
            f"the pool, unless deployments in it set job variables: {shlex.join(words)}",
            file=sys.stderr,
        )


def load_entries() -> list[dict[str, Any]]:
    """Return the deployments of prefect.yaml."""
    return yaml.safe_load(PREFECT_FILE.read_text(encoding="utf-8"))["deployments"]


def _load_flow(entrypoint: str) -> Flow[..., Any]:
    """Return the flow of an entrypoint such as `rlm_batch.flows.batch.batch`."""
    # Prefect puts the working directory first on sys.path for the import, and a file there may have any module's name.
    # It does not import the module again.
    import_module(entrypoint.rpartition(".")[0])
    return load_flow_from_entrypoint(entrypoint)


async def _read_deployment(client: PrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


async def _apply(flow: Any, entry: dict[str, Any], work_pool: str) -> None:
    """Create or replace a deployment. `entry` has its fields, as in prefect.yaml."""
    limit = entry.get("concurrency_limit")
    deployment = await flow.ato_deployment(
        entry["name"],
        description=entry["description"],
        tags=entry["tags"],
        parameters=entry["parameters"],
        schedules=[Schedule(**schedule) for schedule in entry.get("schedules", [])],
        concurrency_limit=ConcurrencyLimitConfig(**limit) if limit else None,
        work_pool_name=work_pool,
        version=version("rlm-batch"),
        # By default, Prefect runs git in the working directory, and git settings there can run code.
        version_type="prefect:simple",
    )
    await deployment.aapply()


async def deploy_own(flow: Any, entry: dict[str, Any], work_pool: str | None) -> str:
    """Create a user's deployment of one of our flows on the configured server, or replace the one of that name.

    Args:
        flow: The flow.
        entry: Name, description, schedules and parameters, as in prefect.yaml.
        work_pool: The work pool of its runs. By default a replaced deployment keeps its pool, and a new one gets
            rlm-batch.

    Returns:
        The work pool of its runs.

    Raises:
        ConfigurationError: The parameters are too long, or the server refuses a request.
    """
    size = len(json.dumps(entry["parameters"], separators=(",", ":")))
    if size > MAX_PARAMETERS_BYTES:
        raise ConfigurationError(
            f"the code and the parameters have {size:,} bytes, and Prefect takes {MAX_PARAMETERS_BYTES:,} for a run: "
            "bring modules with `python_path`, and data in files"
        )
    entry = {**entry, "tags": [TAG]}
    if flow.fn.__name__ != "reap":  # Two of its runs at the same time do no harm.
        uses_machine = str(entry["parameters"].get("provider", "local")).startswith(("local", "container"))
        if entry["schedules"]:
            entry["concurrency_limit"] = ONE_AT_ONCE
        elif uses_machine:
            entry["concurrency_limit"] = FOUR_AT_ONCE
    async with _open_client() as client:
        existing = await _read_deployment(client, f"{flow.name}/{entry['name']}")
        if existing is not None and work_pool:
            try:
                await client.read_work_pool(work_pool)  # For a missing pool, Prefect fails with an internal error.
            except ObjectNotFound:
                raise ConfigurationError(f"Work pool {work_pool!r} not found.") from None
        if not work_pool and existing is not None:
            work_pool = existing.work_pool_name
        work_pool = work_pool or WORK_POOL
        await _apply(flow, entry, work_pool)
        return work_pool


@asynccontextmanager
async def _open_client() -> AsyncIterator[PrefectClient]:
    """Open a client of the server in PREFECT_API_URL.

    Raises:
        ConfigurationError: No server is configured, or the server does not answer, refuses a request or ends.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigurationError(
            "no Prefect server is configured: name one in PREFECT_API_URL, or start one with rlm-batch up"
        )
    check_proxies()
    try:
        async with get_client() as client:
            await check_server(client, url)
            yield client
    except (httpx.HTTPError, DeploymentApplyError) as error:
        raise ConfigurationError(f"the Prefect server at {url} refused: {describe_server_error(error)}") from error
