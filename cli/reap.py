"""The command `reap`: removes unused sandboxes."""

import sys
from typing import Annotated

from cyclopts import Parameter

from .output import Flag, Json, print_json, print_table
from .progress import ProgressDisplay
from .run_flow import run_with_display


def reap(
    *,
    provider: Annotated[str, Parameter(metavar="PROVIDER")] = "local",
    older_than: Annotated[float | None, Parameter(metavar="SECONDS")] = None,
    kept: Flag = False,
    dry_run: Flag = False,
    json: Json = False,
) -> int:
    """Run the reap flow. Print a row for each sandbox that it removes, and the seconds of all of them.

    Args:
        provider: local, container, daytona, modal, or a saved block such as rlm-daytona-sandbox/NAME
        older_than: Seconds of silence after which sandboxes of an unfinished flow run are removed, too; at least 360
        kept: Also remove the sandboxes that --keep-failed keeps, before their hour ends
        dry_run: Show what would be removed, and remove nothing
    """
    from ..flows.orphans import describe_removal

    parameters = {"provider": provider, "older_than": older_than, "dry_run": dry_run, "kept": kept}
    display = ProgressDisplay()

    async def run_flow() -> None:
        from ..flows.reap import reap as reap_flow

        await reap_flow.call((), parameters, display)

    try:
        run_with_display(run_flow, display, parameters)
    finally:  # If some sandboxes could not be removed, the flow raises, and the others are shown too.
        if json:
            for item in display.orphans:
                labels = {"flow_run": item.info.run, "host": item.info.host}
                print_json({"sandbox": item.info.id, **labels, "reason": item.reason, "seconds": item.seconds})
        elif display.orphans:
            rows = [[item.info.id, item.info.host, item.reason] for item in display.orphans]
            print_table([["sandbox", "host", "why"], *rows], len(rows))
    summary = describe_removal(display.orphans, provider, "would be removed" if dry_run else "removed")
    print(summary, file=sys.stderr if json else sys.stdout)
    return 0
