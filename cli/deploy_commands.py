"""The command `deploy`: our deployments on a server that is there, and one's own, of each flow."""

import inspect
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import App, Parameter

from ..flows.docstrings import read_docstring
from ..sandbox.errors import ConfigurationError
from .parameter_options import build_flow_command

FLOWS = ("batch", "sweep", "chunks", "sequence", "rlm", "reap")
FLOW_NAMES = f"{', '.join(FLOWS[:-1])} or {FLOWS[-1]}"
# Prefect takes no name that has one of the first five, and reads another than the one that was meant for the others.
BANNED_CHARACTERS = "/%&<>#?\\"
MAX_NAME_CHARACTERS = 200
MAX_INTERVAL_SECONDS = 10 * 366 * 86400.0  # ten years

Name = Annotated[str, Parameter(help="What the deployment is called, in Prefect FLOW/NAME.", group="Deployment")]
Cron = Annotated[str | None, Parameter(help='When it runs, as in "0 2 * * *".', group="Deployment")]
Interval = Annotated[float | None, Parameter(help="Or the seconds from one run to the next.", group="Deployment")]
Timezone = Annotated[
    str | None, Parameter(help="That of --cron, such as Europe/Berlin; by default UTC.", group="Deployment")
]
WorkPool = Annotated[str | None, Parameter(help="Where its runs go; by default to rlm-batch.", group="Deployment")]

DEPLOYMENT_OPTIONS = [
    inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation=Name),
    *(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (
            ("cron", Cron),
            ("interval", Interval),
            ("timezone", Timezone),
            ("work_pool", WorkPool),
        )
    ),
]


@dataclass(frozen=True, slots=True)
class DeployAction:
    """Makes a deployment of the flow with these parameters, or brings the one of that name up to date.

    `interval` is in seconds; there is no schedule without it and without `cron`.
    """

    name: str
    cron: str | None = None
    interval: float | None = None
    timezone: str | None = None
    work_pool: str | None = None

    def __call__(self, flow: str, files: Sequence[str], /, **parameters: Any) -> int:
        from .deploy import build_schedule, deploy_flow

        schedule = build_schedule(self.cron, self.interval, self.timezone)
        return deploy_flow(flow, files, parameters, self.name, schedule, self.work_pool)


def build_deploy_app(flow_commands: Iterable[Callable[..., int]]) -> App:
    """The command, with one below it for each of these, which run flows, and for `reap`."""
    app = App(name="deploy", help="Make deployments on the Prefect server in PREFECT_API_URL.")
    app.default(deploy_package)
    commands = {command.__name__: _build_deploy_command(command) for command in flow_commands}
    for name, command in {**commands, "reap": deploy_reap}.items():
        purpose = inspect.cleandoc(read_docstring(command)).partition("\n")[0]
        app.command(command, name=name, help=f"Make or update a deployment: {purpose[0].lower()}{purpose[1:]}")
    return app


def deploy_package(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    work_pool: str = "rlm-batch",
    provider: Annotated[list[str] | None, Parameter(negative=())] = None,
    reset: Annotated[bool, Parameter(negative=())] = False,
    lists: Annotated[bool, Parameter(name="--list", negative=())] = False,
    remove: str | None = None,
) -> int:
    """Make the block types, the work pool, the limits and our deployments; with a FLOW, a deployment of one's own.

    Args:
        work_pool: The pool that the deployments' runs go to, made as one of processes where there is none of that name.
        provider: Make the templates for sandboxes of an account too: daytona or modal.
        reset: Put our deployments that are there back to their first parameters, schedules and limits, which are kept
            otherwise.
        lists: List one's own deployments, with their schedules, and make nothing.
        remove: Remove one's own deployment of that name, or a template, and make nothing.
    """
    if words:
        if (flow := next((word for word in words if word in FLOWS), None)) is not None:
            raise ConfigurationError(f"the flow comes first and its options after it: rlm-batch deploy {flow} FILE ...")
        what = "option" if words[0].startswith("-") else "flow"
        remedy = "rlm-batch deploy --help has those that there are" if what == "option" else f"it is {FLOW_NAMES}"
        raise ConfigurationError(f"there is no {what} {words[0]!r}: {remedy}")
    from .deploy import print_own_deployments, remove_deployment, run_deploy

    if lists and remove is not None:
        raise ConfigurationError("--list and --remove are two things to do: give one of them")
    if lists:
        return print_own_deployments()
    if remove is not None:
        return remove_deployment(remove)
    return run_deploy(work_pool, provider or [], reset=reset)


def deploy_reap(
    *,
    name: Name,
    cron: Cron = None,
    interval: Interval = None,
    timezone: Timezone = None,
    work_pool: WorkPool = None,
    provider: str = "local",
    older_than: float | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Remove the sandboxes that nobody uses any more.

    Args:
        provider: local, container, daytona, modal, or a saved block such as daytona-sandbox/NAME.
        older_than: Also take those of a flow run that is not over, but has been silent for so many seconds; 360 at
            least.
        dry_run: Say what would be removed, and remove nothing.
    """
    action = make_deploy_action(name=name, cron=cron, interval=interval, timezone=timezone, work_pool=work_pool)
    return action("reap", [], provider=provider, older_than=older_than, dry_run=dry_run)


def make_deploy_action(**options: Any) -> DeployAction:
    """What DEPLOYMENT_OPTIONS stand for. Raises ConfigurationError where they are wrong, or do not go together."""
    action = DeployAction(**options)
    name = action.name
    if not name.strip(".") or name != name.strip() or not name.isprintable() or set(name) & set(BANNED_CHARACTERS):
        raise ConfigurationError(
            f"--name is empty, has spaces around it, or has one of {BANNED_CHARACTERS} in it or what is not printed: "
            "give one without"
        )
    if len(name) > MAX_NAME_CHARACTERS:
        raise ConfigurationError(f"--name has {len(name):,} characters: give one of at most {MAX_NAME_CHARACTERS}")
    if action.cron is not None and action.interval is not None:
        raise ConfigurationError("--cron and --interval are two schedules: give one of them")
    if action.timezone is not None and action.cron is None:
        raise ConfigurationError("--timezone is that of --cron, and there is none")
    if action.timezone is not None and action.timezone not in zoneinfo.available_timezones():
        raise ConfigurationError(f"there is no time zone {action.timezone!r}: it is one such as Europe/Berlin or UTC")
    if action.interval is not None and not 1 <= action.interval <= MAX_INTERVAL_SECONDS:
        raise ConfigurationError("--interval is a number of seconds, from 1 to those of ten years")
    if action.work_pool is not None and not action.work_pool.strip():
        raise ConfigurationError("--work-pool is empty: name the pool, or leave it out for rlm-batch")
    return action


def _build_deploy_command(command: Callable[..., int]) -> Callable[..., int]:
    """The command of a flow that makes a deployment where that runs it."""
    return build_flow_command(inspect.unwrap(command), DEPLOYMENT_OPTIONS, make_deploy_action)
