"""The commands on snapshots: they list and delete the set-ups that a provider keeps."""

import asyncio
import sys
import time
from typing import Annotated

from cyclopts import App, Parameter

from ..blocks.provider import SandboxProvider, SnapshotInfo
from ..blocks.registry import resolve_provider
from ..sandbox.errors import ConfigurationError
from .output import Json, count, print_json, print_table

snapshot = App(name="snapshot")
Provider = Annotated[str, Parameter(help="daytona, or a saved block: rlm-daytona-sandbox/NAME", metavar="PROVIDER")]
COLUMNS = ["name", "GiB", "created (UTC)", "last used (UTC)", "expires (UTC)"]


@snapshot.command(name="list")
def print_snapshots(*, provider: Provider = "daytona", json: Json = False) -> int:
    """List the snapshots of set-ups, with their sizes, ages and last use."""

    async def list_all() -> list[SnapshotInfo]:
        block = await _resolve(provider)
        return await block.list_snapshots()

    snapshots = sorted(asyncio.run(list_all()), key=lambda info: info.last_used, reverse=True)
    if json:
        for info in snapshots:
            print_json(
                {
                    "name": info.name,
                    "id": info.id,
                    "gib": info.size,
                    "created": info.created,
                    "last_used": info.last_used,
                    "expires": info.expires,
                }
            )
    elif snapshots:
        print_table([COLUMNS, *(_format_row(info) for info in snapshots)], len(snapshots))
    else:
        print(f"{provider} keeps no set-up", file=sys.stderr)
    return 0


@snapshot.command(name="rm")
def remove_snapshots(name: str, /, *names: str, provider: Provider = "daytona") -> int:
    """Delete snapshots of set-ups. The next run with such a set-up makes it again.

    Args:
        name: The snapshot
        names: More snapshots

    Raises:
        ConfigurationError: A snapshot is missing. Then none is deleted.
    """

    async def remove_all(names: list[str]) -> None:
        block = await _resolve(provider)
        ids = {info.name: info.id for info in await block.list_snapshots()}
        for name in names:
            if name not in ids:
                raise ConfigurationError(
                    f"rlm-batch made no snapshot {name!r}: see rlm-batch snapshot list --provider {provider}"
                )
        for name in names:
            await block.delete_snapshot(ids[name])

    asyncio.run(remove_all([name, *names]))
    print(f"deleted {count(1 + len(names), 'snapshot')}", file=sys.stderr)
    return 0


async def _resolve(provider: str) -> SandboxProvider:
    block = await resolve_provider(provider)
    if not block.keeps_snapshots:
        raise ConfigurationError(
            f"the provider {block.provider_name} has no snapshots: daytona has, as in --provider daytona"
        )
    return block


def _format_row(info: SnapshotInfo) -> list[str]:
    times = (info.created, info.last_used, info.expires)
    dates = [time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) for seconds in times]
    return [info.name, f"{info.size:.1f}", *dates]
