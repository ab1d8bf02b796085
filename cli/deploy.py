"""Making deployments on a Prefect server that is there, and saying what was made."""

import asyncio
import inspect
import shlex
import sys
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

from ..blocks.registry import make_unsaved_provider
from ..blocks.volume import check_volume_name
from ..deployments.deploy import deploy
from ..deployments.own_deployments import (
    Schedule,
    check_parameters_size,
    deploy_own,
    describe_schedules,
    list_own_deployments,
    remove_own_deployment,
)
from ..flows.validation import load_flow, open_flow_inputs
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from .progress import print_reading
from .table import print_table


def run_deploy(work_pool: str, providers: Collection[str], *, reset: bool) -> int:
    """Makes ours, and prints their names and the next command to type."""
    if not work_pool.strip():
        raise ConfigurationError("--work-pool is empty: name the pool, or leave it out for rlm-batch")
    done = asyncio.run(deploy(work_pool=work_pool, reset=reset, providers=providers))
    for name in done.created:
        print(f"{name} made")
    for name in done.updated:
        print(f"{name} {'put back' if reset else 'brought up to date'}")
    for name in done.limited_blocks:
        print(f"the limits of {escape_text(name)} are on the server")
    for name, reason in done.unreadable_blocks.items():
        print(
            f"rlm-batch: the block {escape_text(name)} cannot be read: {escape_text(reason)}. Save it again",
            file=sys.stderr,
        )
    print(f"\nA worker runs them, with this package installed: prefect worker start --pool {shlex.quote(work_pool)}")
    return 0


def deploy_flow(
    flow_name: str,
    files: Sequence[str],
    parameters: dict[str, Any],
    name: str,
    schedule: Schedule | None,
    work_pool: str | None,
) -> int:
    """Makes a deployment of one's own of the flow, with these parameters, and prints what it is and how it is run.

    What the flow would refuse is refused first. Raises ConfigurationError.
    """
    flow = load_flow(flow_name)
    defaults = {item.name: item.default for item in inspect.signature(flow.fn).parameters.values()}
    given = {key: value for key, value in parameters.items() if value != defaults[key]}
    check_parameters_size(given)
    flow.check_parameters(given)
    make_unsaved_provider(given.get("provider", "local"), given.get("provider_options"))
    if given.get("volume_name") is not None:
        check_volume_name(given["volume_name"])
    _inputs = open_flow_inputs(flow_name, parameters, print_reading)
    names = ", ".join(Path(file).name for file in files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    of_files = f" of {names}, as {'it was' if len(files) == 1 else 'they were'} when it was deployed" if files else ""
    done = asyncio.run(
        deploy_own(
            flow,
            name,
            given,
            description=f"A {flow_name}{of_files}, by rlm-batch deploy.",
            schedule=schedule,
            work_pool=work_pool,
        )
    )
    print(
        f"{escape_text(done.name)} {'made' if done.is_new else 'brought up to date'}, in the work pool {done.work_pool}"
    )
    for text in done.schedules:
        print(f"It runs by itself: {text}")
    for parameter, value in done.replaced.items():
        now = f"is {given[parameter]!r} now" if parameter in given else "is not given any more"
        print(f"{parameter}, which was {escape_text(repr(value))[:200]}, {escape_text(now)[:200]}")
    if not done.has_worker:
        print(f"rlm-batch: no worker of the work pool {done.work_pool} is there: runs wait for one", file=sys.stderr)
    print(f"\nRun it now: prefect deployment run {shlex.quote(done.name)} --watch")
    return 0


def print_own_deployments() -> int:
    """Prints a row for each deployment of one's own."""
    rows = [["deployment", "runs by itself", "work pool", "what it is"]]
    for name, deployment in asyncio.run(list_own_deployments()):
        schedules = ", ".join(describe_schedules(deployment))
        rows.append([name, schedules, deployment.work_pool_name or "", deployment.description or ""])
    if len(rows) == 1:
        print("There is no deployment of one's own: rlm-batch deploy FLOW FILE --name NAME makes one")
    else:
        print_table(rows, len(rows) - 1)
    return 0


def remove_deployment(name: str) -> int:
    """Removes a deployment of one's own, or a template."""
    print(f"{escape_text(asyncio.run(remove_own_deployment(name)))} removed")
    return 0


def build_schedule(cron: str | None, interval: float | None, timezone: str | None) -> Schedule | None:
    """Return the schedule of these options, None without any.

    Args:
        cron: Five fields, or a word such as @daily.
        interval: Seconds between two runs.
        timezone: The time zone of `cron`, by default UTC.

    Raises:
        ConfigurationError: `cron` is no schedule, or one that never runs.
    """
    from prefect.server.schemas.schedules import CronSchedule as ServerCronSchedule

    if interval is not None:
        return IntervalSchedule(interval=timedelta(seconds=interval))
    if cron is None:
        return None
    try:
        if len(cron.split()) != 5 and not cron.startswith("@"):  # six are seconds too, which it would not be told
            raise ValueError
        schedule = CronSchedule(cron=cron, timezone=timezone or "UTC")
    except ValueError:
        raise ConfigurationError(
            f"--cron {cron!r} is no schedule: it is five fields (minute, hour, day, month, day of week), as in "
            '"0 2 * * *" for every night at two'
        ) from None
    try:
        asyncio.run(ServerCronSchedule(cron=schedule.cron, timezone=schedule.timezone).get_dates(1))
    except ValueError:
        raise ConfigurationError(
            f"--cron {cron!r} never runs: none of its months has its day (L is the last day of a month)"
        ) from None
    return schedule
