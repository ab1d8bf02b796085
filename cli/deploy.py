"""The command `deploy`: our deployments on the configured Prefect server, or one of a flow with a person's own code."""

import asyncio
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from ..flows.docstrings import read_docstring
from ..sandbox.errors import ConfigurationError
from .parameter_options import FlowAction, build_flow_command

Name = Annotated[str, Parameter(help="The name of the deployment, in Prefect FLOW/NAME.", group="Deployment")]
Cron = Annotated[str | None, Parameter(help='When it runs, as in "0 2 * * *".', group="Deployment")]
Timezone = Annotated[
    str | None, Parameter(help="The time zone of --cron, such as Europe/Berlin; by default UTC.", group="Deployment")
]
WorkPool = Annotated[str, Parameter(help="The work pool of its runs.", group="Deployment")]


def build_deploy_app(flow_commands: Iterable[Callable[..., int]]) -> App:
    """Return the command, with a subcommand for each of these commands that run flows, and for `reap`."""
    app = App(name="deploy", help="Make deployments on the Prefect server in PREFECT_API_URL.")
    app.default(deploy_package)
    app.command(deploy_reap, name="reap")
    options = [*inspect.signature(make_deploy_action).parameters.values()]
    for command in flow_commands:
        purpose = inspect.cleandoc(read_docstring(command)).partition("\n")[0]
        deploying = build_flow_command(inspect.unwrap(command), options, make_deploy_action)
        app.command(deploying, name=command.__name__, help=f"Make a deployment: {purpose[0].lower()}{purpose[1:]}")
    return app


def deploy_package(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)], work_pool: str = "rlm-batch"
) -> int:
    """Make the block types, the work pool and our deployments; with a FLOW, a deployment of your own.

    Args:
        work_pool: The pool that the deployments' runs go to, made as one of processes if it is missing.
    """
    if words:
        flows = "batch, sweep, chunks, sequence, rlm or reap"
        raise ConfigurationError(f"{words[0]!r} is no flow: give {flows} first, and its files and options after it")
    from ..deployments.deploy import deploy

    for name in asyncio.run(deploy(work_pool)):
        print(name)
    print(f"\nA worker runs them, with this package installed: prefect worker start --pool {shlex.quote(work_pool)}")
    return 0


def deploy_reap(
    *,
    name: Name,
    cron: Cron = None,
    timezone: Timezone = None,
    work_pool: WorkPool = "rlm-batch",
    provider: str = "local",
) -> int:
    """Make a deployment: remove the sandboxes that nobody uses any more.

    Args:
        provider: local, container, daytona, modal, or a saved block such as daytona-sandbox/NAME.
    """
    action = make_deploy_action(name=name, cron=cron, timezone=timezone, work_pool=work_pool)
    return action("reap", [], provider=provider)


def make_deploy_action(
    *, name: Name, cron: Cron = None, timezone: Timezone = None, work_pool: WorkPool = "rlm-batch"
) -> FlowAction:
    """Return the action that makes a deployment of a flow with its parameters.

    Raises:
        ConfigurationError: Prefect takes no such name or schedule.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigurationError(f"--name {name!r} is not a name of letters, digits, dots, dashes and underscores")
    schedules = [] if cron is None and timezone is None else [_build_schedule(cron, timezone)]

    def deploy_flow(flow_name: str, files: Sequence[str], /, **parameters: Any) -> int:
        from ..blocks.registry import make_unsaved_provider
        from ..blocks.volume import check_volume_name
        from ..deployments.deploy import deploy_own
        from ..flows.validation import load_flow, open_flow_inputs
        from .progress import print_reading

        flow = load_flow(flow_name)
        defaults = inspect.signature(flow.fn).parameters
        given = {key: value for key, value in parameters.items() if value != defaults[key].default}
        flow.check_parameters(given)
        make_unsaved_provider(given.get("provider", "local"), given.get("provider_options"))
        if "volume_name" in given:
            check_volume_name(given["volume_name"])
        _inputs = open_flow_inputs(flow_name, parameters, print_reading)
        names = ", ".join(Path(file).name for file in files[:5]) + ", ..." * (len(files) > 5)
        description = f"A {flow_name}{f' of {names}' if files else ''}, by rlm-batch deploy."
        asyncio.run(deploy_own(flow, name, given, description, schedules, work_pool))
        print(f"{flow_name}/{name} made, in the work pool {work_pool}")
        if cron is not None:
            print(f"It runs by itself: {cron} ({timezone or 'UTC'})")
        print(f"\nRun it now: prefect deployment run {flow_name}/{name} --watch")
        return 0

    return deploy_flow


def _build_schedule(cron: str | None, timezone: str | None) -> dict[str, Any]:
    """Return the schedule for Prefect.

    Raises:
        ConfigurationError: It is none.
    """
    from prefect.client.schemas.schedules import CronSchedule

    schedule: dict[str, Any] = {"cron": cron, "timezone": timezone or "UTC"}
    try:
        CronSchedule(**schedule)
    except ValueError:
        zone = "" if timezone is None else f" with --timezone {timezone!r}"
        raise ConfigurationError(
            f"--cron {cron!r}{zone} is no schedule: give minute, hour, day, month and day of week, as in --cron "
            '"0 2 * * *" --timezone Europe/Berlin for every night at two'
        ) from None
    return schedule
