"""The commands on snapshots: they list and delete the set-ups that a provider keeps."""

import asyncio
import sys
import time

from ..blocks.provider import SandboxProvider, SnapshotInfo
from ..blocks.registry import resolve_provider
from ..sandbox.errors import ConfigurationError
from .output import print_json, print_table

COLUMNS = ["name", "GiB", "created (UTC)", "last used (UTC)", "expires (UTC)"]


def print_snapshots(provider: str, *, is_json: bool = False) -> int:
    """Print a row for each snapshot, the latest used first."""

    async def list_all() -> list[SnapshotInfo]:
        block = await _resolve(provider)
        return await block.list_snapshots()

    snapshots = asyncio.run(list_all())
    found = sorted(snapshots, key=lambda snapshot: snapshot.last_used, reverse=True)
    if is_json:
        for snapshot in found:
            print_json(
                {
                    "name": snapshot.name,
                    "id": snapshot.id,
                    "gib": snapshot.size,
                    "created": snapshot.created,
                    "last_used": snapshot.last_used,
                    "expires": snapshot.expires,
                }
            )
    elif found:
        print_table([COLUMNS, *(_format_row(snapshot) for snapshot in found)], len(found))
    else:
        print(f"{provider} keeps no set-up", file=sys.stderr)
    return 0


def remove_snapshots(provider: str, names: list[str]) -> int:
    """Delete snapshots by name. Raise ConfigurationError, and delete none, if one is missing."""

    async def remove() -> None:
        block = await _resolve(provider)
        ids = {snapshot.name: snapshot.id for snapshot in await block.list_snapshots()}
        for name in names:
            if name not in ids:
                raise ConfigurationError(
                    f"rlm-batch made no snapshot {name!r}: see rlm-batch snapshot list --provider {provider}"
                )
        for name in names:
            await block.delete_snapshot(ids[name])

    asyncio.run(remove())
    print(f"deleted {len(names)} {'snapshot' if len(names) == 1 else 'snapshots'}", file=sys.stderr)
    return 0


async def _resolve(provider: str) -> SandboxProvider:
    block = await resolve_provider(provider)
    if not block.keeps_snapshots:
        raise ConfigurationError(
            f"the provider {block.provider_name} has no snapshots: daytona has, as in --provider daytona"
        )
    return block


def _format_row(snapshot: SnapshotInfo) -> list[str]:
    times = (snapshot.created, snapshot.last_used, snapshot.expires)
    dates = [time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in times]
    return [snapshot.name, f"{snapshot.size:.1f}", *dates]
