"""What a command does with the parameters that its options stand for: it runs the flow, or makes a deployment of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .outcome_output import OutputFormat


class FlowAction(Protocol):
    """Takes a flow's name, the files of code that were named, and its parameters; returns the exit status."""

    def __call__(self, flow: str, files: Sequence[str], /, **parameters: Any) -> int: ...


@dataclass(frozen=True, slots=True)
class RunAction:
    """Runs the flow here, and prints its outcomes."""

    output: OutputFormat

    def __call__(self, flow: str, files: Sequence[str], /, **parameters: Any) -> int:
        # Prefect, which it imports, takes a second: what is wrong with a file is said before.
        from .run_flow import run_flow

        return run_flow(flow, list(files), self.output, parameters)


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
        from .deploy import deploy_flow

        return deploy_flow(flow, files, parameters, self)
