"""What a Prefect server needs before it can run our flows: block types, a work pool, limits and deployments."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema

from ..blocks import block_types as collection
from ..blocks.provider import SandboxProvider
from ..sandbox.errors import ConfigurationError
from ..tasks.capacity.server_limits import build_limit_settings, reconcile_limits
from ..tasks.server_errors import describe_server_error
from .server import WORK_POOL
from .server_client import open_server_client

PREFECT_FILE = Path(__file__).with_name("prefect.yaml")
FORMER_NAMES = {"shard/shards": "shard/batch-shard"}  # of deployments that versions before have made


@dataclass(frozen=True, slots=True)
class DeployReport:
    """What `deploy` did: the names of the deployments that are new and of those that were there, as `flow/name`.

    `limited_blocks` are the saved blocks whose limits the server has now, as `slug/name`; `unreadable_blocks` are those
    that this version cannot read, with the reason.
    """

    created: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    limited_blocks: list[str] = field(default_factory=list)
    unreadable_blocks: dict[str, str] = field(default_factory=dict)


async def deploy(*, work_pool: str = WORK_POOL, reset: bool = False, providers: Collection[str] = ()) -> DeployReport:
    """Makes on the configured Prefect server whatever is missing there of block types, pool, limits and deployments.

    `work_pool` is where the deployments' runs go; it is made as a pool of processes where there is none of that name.
    Of the templates for sandboxes of an account those of `providers` are made. A deployment that is there already, a
    template too, keeps what a person may have changed: parameters, schedules, limit, tags and work pool. Its
    entrypoint, description and parameter schema come from this version of the package. `reset` puts everything back to
    what prefect.yaml says. Raises ConfigurationError where no server is configured or none answers, and for a provider
    without templates.
    """
    known = {provider for entry in load_entries() if (provider := _find_template_provider(entry)) is not None}
    for provider in providers:
        if provider not in known:
            raise ConfigurationError(
                f"there are no templates for {provider!r}, but for {' and '.join(sorted(known))}: with another "
                "make a deployment of your own: rlm-batch deploy FLOW FILE --provider PROVIDER --name NAME"
            )
    async with open_server_client() as client:
        for name in collection.__all__:
            await getattr(collection, name).aregister_type_and_schema(client=client)
        await _make_pool(client, work_pool)
        report = await _make_deployments(client, work_pool, reset, providers)
        await _make_limits(client, report)
        return report


def load_entries() -> list[dict[str, Any]]:
    """The deployments of prefect.yaml as dicts."""
    return yaml.safe_load(PREFECT_FILE.read_text(encoding="utf-8"))["deployments"]


def _find_template_provider(entry: dict[str, Any]) -> str | None:
    """The provider that a deployment of prefect.yaml is a template for, None where it is none."""
    return entry["parameters"]["provider"] if "template" in entry["tags"] else None


async def _make_pool(client: PrefectClient, name: str) -> None:
    from prefect.workers.process import ProcessWorker

    try:
        await client.read_work_pool(name)
    except ObjectNotFound:
        pool = WorkPoolCreate(
            name=name,
            type=ProcessWorker.type,
            description="Runs of rlm-batch, each in a process of its own beside the worker.",
            base_job_template=ProcessWorker.get_default_base_job_template(),
        )
        with suppress(ObjectAlreadyExists):  # somebody else was as quick
            await client.create_work_pool(pool)


async def _make_limits(client: PrefectClient, report: DeployReport) -> None:
    """The limits of every saved provider: `max_sandboxes` and `creations_per_second`."""
    for name in collection.__all__:
        kind: type[Block] = getattr(collection, name)
        if not issubclass(kind, SandboxProvider):
            continue
        slug = kind.get_block_type_slug()
        for document in await client.read_block_documents_by_type(slug):
            if document.name is None:
                continue  # an anonymous one, which nobody can name
            try:
                block = await kind.aload(document.name)
            except (ValueError, RuntimeError) as error:
                report.unreadable_blocks[f"{slug}/{document.name}"] = " ".join(str(error).split())
                continue
            await reconcile_limits(block)
            if build_limit_settings(block):
                report.limited_blocks.append(f"{slug}/{document.name}")


async def _make_deployments(
    client: PrefectClient, work_pool: str, reset: bool, providers: Collection[str]
) -> DeployReport:
    from prefect.flows import load_flow_from_entrypoint

    report = DeployReport()
    for entry in load_entries():
        flow = load_flow_from_entrypoint(entry["entrypoint"])
        name = f"{flow.name}/{entry['name']}"
        try:
            deployment = await client.read_deployment_by_name(name)
        except ObjectNotFound:
            deployment = None
            if _find_template_provider(entry) not in (None, *providers):
                continue
        if deployment is None or reset:
            await _create_deployment(client, entry, flow, work_pool)
            if name in FORMER_NAMES and not reset:
                await _take_over_changes(client, name, FORMER_NAMES[name])
        else:
            await _update_deployment(client, entry, flow, deployment)
        (report.created if deployment is None else report.updated).append(name)
        if name in FORMER_NAMES:
            await _remove_former(client, FORMER_NAMES[name])
    return report


async def _take_over_changes(client: PrefectClient, name: str, former_name: str) -> None:
    """Puts into a deployment what a person may have changed under its former name. Shards take no schedule or limit."""
    with suppress(ObjectNotFound):
        former = await client.read_deployment_by_name(former_name)
        fields = ("parameters", "tags", "work_pool_name", "work_queue_name", "paused", "job_variables")
        changes = DeploymentUpdate(**{field: getattr(former, field) for field in fields})
        await client.update_deployment((await client.read_deployment_by_name(name)).id, changes)


async def _remove_former(client: PrefectClient, former_name: str) -> None:
    """Removes a deployment that has another name now, but for one with runs to come or under way: the next time."""
    with suppress(ObjectNotFound):
        former = await client.read_deployment_by_name(former_name)
        unfinished = await client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[former.id])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(not_any_=[*TERMINAL_STATES]))
            ),
            limit=1,
        )
        if not unfinished:
            await client.delete_deployment(former.id)


def _build_package_fields(entry: dict[str, Any], flow: Any) -> dict[str, Any]:
    """The fields of a deployment that this version of the package decides, and no person."""
    return {
        "version": version("rlm-batch"),
        "description": entry["description"],
        "entrypoint": entry["entrypoint"],
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "enforce_parameter_schema": True,
        "pull_steps": [],
    }


async def _create_deployment(client: PrefectClient, entry: dict[str, Any], flow: Any, work_pool: str) -> None:
    limit = entry.get("concurrency_limit", {})
    await client.create_deployment(
        flow_id=await client.create_flow_from_name(flow.name),
        name=entry["name"],
        tags=entry["tags"],
        parameters=entry["parameters"],
        schedules=[
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]),
                active=schedule["active"],
                slug=schedule["slug"],
            )
            for schedule in entry.get("schedules", [])
        ],
        concurrency_limit=limit.get("limit"),
        concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]) if limit else None,
        paused=False,
        job_variables={},
        work_pool_name=work_pool,
        **_build_package_fields(entry, flow),
    )


async def _update_deployment(client: PrefectClient, entry: dict[str, Any], flow: Any, deployment: Any) -> None:
    try:
        fields = _build_package_fields(entry, flow)
        if set(deployment.tags) == set(entry["tags"]) - {"internal"}:  # as a version made it that had no such tag
            fields["tags"] = entry["tags"]
        await client.update_deployment(deployment.id, DeploymentUpdate(**fields))
    except PrefectHTTPStatusError as error:
        raise ConfigurationError(
            f"the deployment {flow.name}/{entry['name']} has parameters that this version of rlm-batch does not take "
            f"({describe_server_error(error)}): mend them in the UI, or put the deployments back with rlm-batch deploy "
            "--reset"
        ) from error
