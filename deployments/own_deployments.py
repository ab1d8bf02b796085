"""Deployments of one's own: of a flow of ours, with code, parameters and a schedule that a person gives.

They are known by their entrypoint, which is that of a flow of ours, and by a name that is none of prefect.yaml's.
"""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, WorkerStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema

from ..sandbox.errors import ConfigurationError
from .deploy import load_entries
from .server import WORK_POOL
from .server_client import open_server_client

Schedule = CronSchedule | IntervalSchedule
FLOWS = ("batch", "sweep", "chunks", "sequence", "rlm", "reap")
ENTRYPOINT = re.compile(rf"rlm_batch\.flows\.({'|'.join(FLOWS)})\.\1")
SLUG = "rlm-batch-deploy"  # of the schedule that the command line gives, beside others that a person has added
MAX_PARAMETERS_BYTES = 512 * 1024  # of JSON, that a Prefect server takes
PAGE = 200  # deployments that a server lists at one time
WORKERLESS = (":push", ":managed")  # the types of work pools that begin runs by themselves
# As prefect.yaml has them: local sandboxes share a machine with their worker, and what is late is not made up for.
MAX_LOCAL_RUNS = 4
LOCAL_PROVIDERS = ("local", "container")


@dataclass(frozen=True, slots=True)
class OwnDeployment:
    """What was made or brought up to date; `name` is FLOW/NAME.

    `replaced` are the parameters that stood there with another value, or stand there no more, other than its code.
    """

    name: str
    work_pool: str
    is_new: bool
    has_worker: bool
    schedules: list[str]
    replaced: dict[str, Any] = field(default_factory=dict[str, Any])


async def deploy_own(
    flow: Any,
    name: str,
    parameters: Mapping[str, Any],
    *,
    description: str,
    schedule: Schedule | None = None,
    work_pool: str | None = None,
) -> OwnDeployment:
    """Makes a deployment of one of our flows on the configured server, or brings the one of that name up to date.

    Its parameters, its code among them, are those that are given. Of one that is there the rest is kept where it is not
    given: schedules, whether they are paused, work pool, limit and tags. Raises ConfigurationError where the name is
    one of prefect.yaml's or of another's deployment, where there is no such work pool, and for too much code.
    """
    full_name = f"{flow.name}/{name}"
    if full_name in map(entry_name, load_entries()):
        raise ConfigurationError(f"{full_name} is a deployment of rlm-batch's own: give another --name")
    check_parameters_size(parameters)
    async with open_server_client() as client:
        try:
            deployment = await client.read_deployment_by_name(full_name)
        except ObjectNotFound:
            deployment = None
        if deployment is not None and (not is_own(deployment) or deployment.work_pool_name is None):
            raise ConfigurationError(
                f"there is a deployment {full_name} that rlm-batch deploy has not made, such as one of .serve(): give "
                "another --name"
            )
        pool_name = work_pool or (WORK_POOL if deployment is None else deployment.work_pool_name) or WORK_POOL
        try:
            pool = await client.read_work_pool(pool_name)
        except ObjectNotFound:
            remedy = "rlm-batch up and rlm-batch deploy make it" if pool_name == WORK_POOL else "name another"
            raise ConfigurationError(f"there is no work pool {pool_name} on this Prefect server: {remedy}") from None
        fields = {
            "version": version("rlm-batch"),
            "description": description,
            "parameters": dict(parameters),
            "entrypoint": f"rlm_batch.flows.{flow.name}.{flow.name}",
            "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
            "enforce_parameter_schema": True,
            "work_pool_name": pool_name,
        }
        if deployment is None:
            await _create(client, flow.name, name, fields, schedule)
        else:
            await client.update_deployment(deployment.id, DeploymentUpdate(**fields))
            await _set_schedule(client, deployment, schedule)
        made = await client.read_deployment_by_name(full_name)
        workers = await client.read_workers_for_work_pool(pool_name)
        return OwnDeployment(
            full_name,
            pool_name,
            is_new=deployment is None,
            has_worker=pool.type.endswith(WORKERLESS) or any(item.status == WorkerStatus.ONLINE for item in workers),
            schedules=describe_schedules(made),
            replaced={} if deployment is None else _find_replaced(deployment.parameters, parameters),
        )


async def list_own_deployments() -> list[tuple[str, DeploymentResponse]]:
    """One's own deployments on the configured server with their names, as FLOW/NAME, in their order."""
    async with open_server_client() as client:
        return await _read_own_deployments(client)


async def remove_own_deployment(name: str) -> str:
    """Removes a deployment of one's own, or a template, and returns its name, as FLOW/NAME.

    `name` is that, or NAME alone where one has it. Runs that have begun go on. Raises ConfigurationError where there is
    none, where there are several, and for one that `rlm-batch up` would make again.
    """
    async with open_server_client() as client:
        removable = dict(await _read_own_deployments(client))
        for entry in load_entries():
            if "template" in entry["tags"]:
                try:
                    removable[entry_name(entry)] = await client.read_deployment_by_name(entry_name(entry))
                except ObjectNotFound:
                    continue
        matches = [full_name for full_name in removable if name in (full_name, full_name.partition("/")[2])]
        if len(matches) > 1:
            raise ConfigurationError(f"{name} is the name of several deployments: name one, {' or '.join(matches)}")
        if not matches:
            if name in map(entry_name, load_entries()):
                raise ConfigurationError(f"{name} is one of rlm-batch's own, which rlm-batch up would make again")
            there = f"there are {', '.join(removable)}" if removable else "there is none at all"
            raise ConfigurationError(f"there is no deployment {name} that could be removed: {there}")
        await client.delete_deployment(removable[matches[0]].id)
        return matches[0]


def entry_name(entry: Mapping[str, Any]) -> str:
    """The name of a deployment of prefect.yaml, as FLOW/NAME."""
    return f"{entry['entrypoint'].rpartition('.')[2]}/{entry['name']}"


def is_own(deployment: DeploymentResponse) -> bool:
    """Whether it is a deployment of a flow of ours; those of prefect.yaml are too."""
    return deployment.entrypoint is not None and ENTRYPOINT.fullmatch(deployment.entrypoint) is not None


def check_parameters_size(parameters: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where they are no JSON, or more than a Prefect server keeps."""
    try:
        size = len(json.dumps(parameters, separators=(",", ":"), allow_nan=False))
    except ValueError:
        raise ConfigurationError(
            "a value is NaN or infinite, which a deployment cannot keep: have the code make it of a text"
        ) from None
    if size > MAX_PARAMETERS_BYTES:
        raise ConfigurationError(
            f"the code and the parameters have {size:,} bytes, and Prefect keeps {MAX_PARAMETERS_BYTES:,} in a "
            "deployment: bring modules with --python-path, and data in files"
        )


def describe_schedules(deployment: DeploymentResponse) -> list[str]:
    """Each of its schedules in words."""
    texts: list[str] = []
    for item in deployment.schedules:
        schedule: Any = item.schedule
        if isinstance(schedule, CronSchedule):
            text = f"{schedule.cron} ({schedule.timezone or 'UTC'})"
        elif isinstance(schedule, IntervalSchedule):
            text = f"every {schedule.interval.total_seconds():g} s"
        else:
            text = "by a rule of dates"
        texts.append(text if item.active and not deployment.paused else f"{text}, paused")
    return texts


async def _create(
    client: PrefectClient, flow: str, name: str, fields: dict[str, Any], schedule: Schedule | None
) -> None:
    provider = str(fields["parameters"].get("provider", "local"))
    is_local = re.split("[-:/]", provider)[0] in LOCAL_PROVIDERS
    limit: tuple[int, ConcurrencyLimitStrategy] | None = None
    if schedule is not None:
        limit = 1, ConcurrencyLimitStrategy.CANCEL_NEW
    elif is_local:
        limit = MAX_LOCAL_RUNS, ConcurrencyLimitStrategy.ENQUEUE
    await client.create_deployment(
        flow_id=await client.create_flow_from_name(flow),
        name=name,
        tags=["rlm-batch"],
        schedules=[] if schedule is None else [DeploymentScheduleCreate(schedule=schedule, active=True, slug=SLUG)],
        concurrency_limit=None if limit is None else limit[0],
        concurrency_options=None if limit is None else ConcurrencyOptions(collision_strategy=limit[1]),
        pull_steps=[],
        **fields,
    )


async def _set_schedule(client: PrefectClient, deployment: DeploymentResponse, schedule: Schedule | None) -> None:
    """Puts the schedule in the place of that of the last time, which stays paused where a person has paused it."""
    if schedule is None:
        return
    earlier = next((item for item in deployment.schedules if item.slug == SLUG), None)
    if earlier is None:
        new = DeploymentScheduleCreate(schedule=schedule, active=True, slug=SLUG)
        await client.create_deployment_schedules(deployment.id, [new])
    else:
        await client.update_deployment_schedule(deployment.id, earlier.id, schedule=schedule)


def _find_replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    texts = ("code", "steps", "reduce", "prepare")
    return {name: value for name, value in before.items() if name not in texts and after.get(name) != value}


async def _read_own_deployments(client: PrefectClient) -> list[tuple[str, DeploymentResponse]]:
    names = {entry_name(entry) for entry in load_entries()}
    flow_filter = FlowFilter(name=FlowFilterName(any_=list(FLOWS)))
    found: list[tuple[str, DeploymentResponse]] = []
    for offset in itertools.count(0, PAGE):
        deployments = await client.read_deployments(flow_filter=flow_filter, limit=PAGE, offset=offset)
        for deployment in deployments:
            full_name = f"{(deployment.entrypoint or '').rpartition('.')[2]}/{deployment.name}"
            if is_own(deployment) and deployment.work_pool_name is not None and full_name not in names:
                found.append((full_name, deployment))
        if len(deployments) < PAGE:
            break
    return sorted(found, key=lambda item: item[0])
