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
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from ..blocks import block_types
from ..blocks.registry import MACHINE_PROVIDERS, find_provider_name
from ..flows.prefect_server import check_server
from ..flows.proxies import check_proxies
from ..flows.sharding.work_pool import SHARD_DEPLOYMENT
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.server_message import describe_server_error

WORK_POOL = "rlm-batch"  # the name of the pool whose workers run our deployments
TAG = "rlm-batch"  # a tag of our deployments
PREFECT_FILE = Path(__file__).with_name("prefect.yaml")
# A template without variables. By the command or the environment, a run could start any program on the worker.
POOL_FILE = Path(__file__).with_name("work_pool.json")
PREFECT_IMAGE = "prefecthq/prefect:"  # the image of containers without another one; it lacks this package
MAX_PARAMETERS_BYTES = 512 * 1024  # bytes of JSON that a Prefect server accepts for a run
# A run that is due while another one runs is skipped.
ONE_AT_ONCE = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
# Local sandboxes take the memory and the processors of their worker's machine.
FOUR_AT_ONCE = {"limit": 4, "collision_strategy": "ENQUEUE"}


async def deploy(work_pool: str = WORK_POOL, image: str | None = None) -> dict[str, str]:
    """Create or update our deployments on the configured server, with the block types and the work pool.

    An existing deployment keeps the settings that a user may have changed: parameters, schedules, limit, tags and work
    pool. It gets the entrypoint, description and parameter schema of this version of the package.

    Args:
        work_pool: The work pool of new deployments. Without an image, a missing one becomes a process pool.
        image: The image of the runs of all our deployments in that pool, if the pool starts containers.

    Returns:
        The work pools of our deployments, by their names as FLOW/NAME.

    Raises:
        ConfigurationError: No server is configured, the server does not answer or refuses a request, or the work pool
            needs an image or takes none.
    """
    template = json.loads(POOL_FILE.read_text(encoding="utf-8"))
    pools: dict[str, str] = {}
    async with open_client() as client:
        for name in block_types.__all__:
            await getattr(block_types, name).aregister_type_and_schema(client=client)
        if image:
            await _set_image(client, work_pool, {}, image)  # The pool exists and takes an image.
        else:
            pool = WorkPoolCreate(name=work_pool, type="process", base_job_template=template)
            try:
                await client.create_work_pool(pool)
            except ObjectAlreadyExists:
                _warn_of_open_pool(await client.read_work_pool(work_pool))
        for entry in load_entries():
            flow = _load_flow(entry["entrypoint"])
            name = f"{flow.name}/{entry['name']}"
            existing = await _read_deployment(client, name)
            pools[name] = work_pool if existing is None else existing.work_pool_name or work_pool
            variables = {} if existing is None else existing.job_variables
            if pools[name] == work_pool:
                variables = await _set_image(client, work_pool, variables, image)
            if existing is None:
                await _apply(flow, {**entry, "job_variables": variables}, work_pool)
            else:
                changes = DeploymentUpdate(
                    version=version("rlm-batch"),
                    description=entry["description"],
                    entrypoint=entry["entrypoint"],
                    parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True),
                    job_variables=variables,
                )
                await client.update_deployment(existing.id, changes)
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


async def _set_image(
    client: PrefectClient, work_pool: str, job_variables: dict[str, Any], image: str | None
) -> dict[str, Any]:
    """Return a deployment's job variables with the image of its runs, if there is one.

    Raises:
        ConfigurationError: The work pool is missing, needs an image, or takes none.
    """
    try:
        pool = await client.read_work_pool(work_pool)
    except ObjectNotFound:
        raise ConfigurationError(f"Work pool {work_pool!r} not found.") from None
    template = pool.base_job_template or await get_default_base_job_template_for_infrastructure_type(pool.type) or {}
    image_setting = template.get("variables", {}).get("properties", {}).get("image")
    if image_setting is None:
        if image:
            raise ConfigurationError(f"work pool {work_pool!r} takes no image from deployments: omit --image")
        return {name: value for name, value in job_variables.items() if name != "image"}  # the pool's former image
    if image:
        return {**job_variables, "image": image}
    image_of_pool = image_setting.get("default") or PREFECT_IMAGE
    if not job_variables.get("image") and PREFECT_IMAGE in image_of_pool:
        raise ConfigurationError(
            f"work pool {work_pool!r} of type {pool.type} starts containers, and Prefect's image lacks rlm-batch: name "
            f"yours with rlm-batch deploy --work-pool {shlex.quote(work_pool)} --image IMAGE, or in the pool's template"
        )
    return job_variables


async def _apply(flow: Any, entry: dict[str, Any], work_pool: str) -> None:
    """Create or replace a deployment. `entry` has its fields, as in prefect.yaml."""
    limit = entry.get("concurrency_limit")
    deployment = await flow.ato_deployment(
        entry["name"],
        description=entry["description"],
        tags=entry["tags"],
        parameters=entry["parameters"],
        schedules=[Schedule(**schedule) for schedule in entry.get("schedules", [])],
        job_variables=entry["job_variables"],
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
            rlm-batch. In a pool that starts containers, runs have the image of our own deployments there.

    Returns:
        The work pool of its runs.

    Raises:
        ConfigurationError: The parameters are too long, the work pool is missing or has no image for its containers, or
            the server refuses a request.
    """
    size = len(json.dumps(entry["parameters"], separators=(",", ":")))
    if size > MAX_PARAMETERS_BYTES:
        raise ConfigurationError(
            f"the code and the parameters have {size:,} bytes, and Prefect takes {MAX_PARAMETERS_BYTES:,} for a run: "
            "bring modules with `python_path`, and data in files"
        )
    entry = {**entry, "tags": [TAG]}
    if flow.fn.__name__ != "reap":  # Two of its runs at the same time do no harm.
        uses_machine = find_provider_name(entry["parameters"].get("provider", "local")) in MACHINE_PROVIDERS
        if entry["schedules"]:
            entry["concurrency_limit"] = ONE_AT_ONCE
        elif uses_machine:
            entry["concurrency_limit"] = FOUR_AT_ONCE
    async with open_client() as client:
        existing = await _read_deployment(client, f"{flow.name}/{entry['name']}")
        if not work_pool and existing is not None:
            work_pool = existing.work_pool_name
        work_pool = work_pool or WORK_POOL
        shards = await _read_deployment(client, SHARD_DEPLOYMENT)
        image = shards.job_variables.get("image") if shards and shards.work_pool_name == work_pool else None
        variables = {} if existing is None else existing.job_variables
        entry["job_variables"] = await _set_image(client, work_pool, variables, image)
        await _apply(flow, entry, work_pool)
        return work_pool


@asynccontextmanager
async def open_client() -> AsyncIterator[PrefectClient]:
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
