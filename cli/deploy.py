"""The command `deploy`: creates rlm-batch's deployments on the Prefect server, or one that runs the user's code."""

import asyncio
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from ..blocks.registry import make_unsaved_provider
from ..flows.parameters import FlowParameters, refuse_secrets
from ..flows.registry import FLOWS, load_flow, load_model
from ..sandbox.errors import ConfigurationError
from .parameter_options import DEPLOYMENT, FlowAction, Option, build_flow_command
from .progress import print_reading

Name = Annotated[str, Parameter(help="Name of the deployment, in Prefect FLOW/NAME", metavar="NAME", group=DEPLOYMENT)]
Cron = Annotated[
    str | None, Parameter(help='Schedule of its runs, as in "0 2 * * *"', metavar="SCHEDULE", group=DEPLOYMENT)
]
Timezone = Annotated[
    str | None,
    Parameter(help="Time zone of --cron, such as Europe/Berlin; by default UTC", metavar="ZONE", group=DEPLOYMENT),
]
WorkPool = Annotated[
    str | None,
    Parameter(
        help="Work pool of its runs; by default that of the deployment it replaces, or rlm-batch",
        metavar="POOL",
        group=DEPLOYMENT,
    ),
]
MAX_NAMED_FILES = 5  # files of code that a deployment's description names

deploy = App(name="deploy")


@deploy.default
def deploy_package(
    *,
    work_pool: Annotated[str, Parameter(metavar="POOL")] = "rlm-batch",
    image: Annotated[str | None, Parameter(metavar="IMAGE")] = None,
) -> int:
    """Create the block types, the work pool and rlm-batch's deployments, or with a FLOW a deployment of your code.

    Args:
        work_pool: Work pool of new deployments. Existing ones stay in theirs. A missing pool becomes a process pool.
        image: Image with this package, for all of these deployments in a pool that starts containers.
    """
    from ..deployments.deploy import deploy as deploy_all

    pools_by_deployment = asyncio.run(deploy_all(work_pool, image))
    for name, pool in pools_by_deployment.items():
        print(name if pool == work_pool else f"{name} stays in the work pool {pool}")
    pools = sorted(set(pools_by_deployment.values()))
    for pool in pools:
        which = "them" if len(pools) == 1 else f"those in {pool}"
        name = shlex.quote(pool)
        if image and pool == work_pool:
            print(f"\nA worker runs {which}: prefect worker start --pool {name}")
        else:
            print(f"\nA worker runs {which}, with this package installed: rlm-batch worker --work-pool {name}")
            print(f"If {name} is no process pool: prefect worker start --pool {name}")
    return 0


@deploy.command(name="reap", sort_key=0)
def deploy_reap(
    *,
    name: Name,
    cron: Cron = None,
    timezone: Timezone = None,
    work_pool: WorkPool = None,
    provider: Annotated[str, Parameter(metavar="PROVIDER")] = "local",
) -> int:
    """Create a deployment that removes unused sandboxes.

    Args:
        provider: local, container, daytona, modal, or a saved block such as rlm-daytona-sandbox/NAME
    """
    entry = _build_entry(name, cron, timezone)
    return _deploy_flow("reap", [], {"provider": provider}, entry, work_pool)


def make_deploy_action(
    *, name: Name, cron: Cron = None, timezone: Timezone = None, work_pool: WorkPool = None
) -> FlowAction:
    """Return the action that creates a deployment of a flow with its parameters.

    Raises:
        ConfigurationError: The name or the schedule is not valid.
    """
    entry = _build_entry(name, cron, timezone)

    def deploy_flow(model: type[FlowParameters[Any]], files: list[str], values: dict[str, Any]) -> int:
        if values.get("secrets"):
            refuse_secrets("a deployment")
        parameters = model.parse(values)
        make_unsaved_provider(values.get("provider", "local"), values.get("provider_options"))
        if not parameters.reads_blocks():
            parameters.make_plan(print_reading)  # Fail now and not in the deployment's runs.
        # The deployment does not store other parameters, so that they follow the defaults of later versions.
        converted = {parameter: getattr(parameters, parameter) for parameter in values}
        return _deploy_flow(model.flow_name, files, converted, entry, work_pool)

    return deploy_flow


for number, flow_name in enumerate(FLOWS, 1):
    purpose = f"Create a deployment of the flow {flow_name}."
    deploy.command(f"{__name__}:{flow_name}", name=flow_name, help=purpose, sort_key=number)


def __getattr__(name: str) -> Callable[..., int]:
    """Build the subcommand of a flow when it is first used."""
    if name not in FLOWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    parameters = inspect.signature(make_deploy_action).parameters.values()
    options = [Option(parameter, DEPLOYMENT) for parameter in parameters]
    return build_flow_command(load_model(name), options, make_deploy_action)


def _build_entry(name: str, cron: str | None, timezone: str | None) -> dict[str, Any]:
    """Return the name and the schedules of a deployment, as in prefect.yaml.

    Raises:
        ConfigurationError: The name or the schedule is not valid.
    """
    from prefect.client.schemas.schedules import CronSchedule

    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigurationError(f"--name {name!r} is not allowed: use letters, digits, dots, dashes and underscores")
    if cron is None and timezone is None:
        return {"name": name, "schedules": []}
    schedule: dict[str, Any] = {"cron": cron, "timezone": timezone or "UTC"}
    try:
        CronSchedule(**schedule)
    except ValueError:
        raise ConfigurationError(
            f"--cron {cron!r} with --timezone {schedule['timezone']!r} is not a schedule: give minute, hour, day, "
            'month and day of week, as in --cron "0 2 * * *" --timezone Europe/Berlin for every night at two'
        ) from None
    return {"name": name, "schedules": [schedule]}


def _deploy_flow(
    flow_name: str, files: list[str], parameters: dict[str, Any], entry: dict[str, Any], work_pool: str | None
) -> int:
    """Create the deployment, print its name and how to run it, and return the exit status."""
    from ..deployments.deploy import deploy_own

    flow = load_flow(flow_name)
    names = [Path(file).name for file in files[:MAX_NAMED_FILES]]
    if len(files) > MAX_NAMED_FILES:
        names.append("...")
    files_phrase = f" of {', '.join(names)}" if names else ""
    entry |= {"description": f"A {flow_name}{files_phrase}, by rlm-batch deploy.", "parameters": parameters}
    work_pool = asyncio.run(deploy_own(flow, entry, work_pool))
    name = f"{flow.name}/{entry['name']}"
    print(f"{name} made, in the work pool {work_pool}")
    for schedule in entry["schedules"]:
        print(f"It runs by itself: {schedule['cron']} ({schedule['timezone']})")
    print(f"\nRun it now: prefect deployment run {name} --watch")
    return 0
