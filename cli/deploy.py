"""Making the deployments on a Prefect server that is there, and saying what was made."""

import asyncio
import shlex
import sys

from ..deployments.deploy import deploy
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text


def run_deploy(work_pool: str, reset: bool) -> int:
    """Makes them, and prints their names and the next command to type."""
    if not work_pool.strip():
        raise ConfigurationError("--work-pool is empty: name the pool, or leave it out for rlm-batch")
    done = asyncio.run(deploy(work_pool=work_pool, reset=reset))
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
