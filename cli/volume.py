"""What is on a volume, and files to it and from it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ..blocks.registry import resolve_provider
from ..blocks.volume import VolumeStore, check_volume_name, split_volume_path
from .argument_parsing import refuse_usage

T = TypeVar("T")


def list_files(provider: str, name: str, path: str) -> int:
    """Prints a line for each file: its size in bytes, and its path."""
    files = _use_volume(provider, name, lambda volume: volume.ls(path))
    width = max((len(f"{file.size:,}") for file in files), default=0)
    for file in files:
        # Code chose the name: what a terminal would take for a command is shown as Python writes it.
        print(f"{file.size:>{width},}  {file.path if file.path.isprintable() else ascii(file.path)}")
    return 0


def get_files(provider: str, name: str, path: str, target: str) -> int:
    """Writes a file of the volume, or all files of a directory there, to this machine."""
    below = "/".join(split_volume_path(path))
    home = Path(target).expanduser()

    async def bring(volume: VolumeStore) -> int:
        files = await volume.ls(below)
        single = [file.path for file in files] == [below]
        # As cp does it: into a directory that is there, else under the name that was given.
        top = home / PurePosixPath(below).name if home.is_dir() else home
        for file in files:
            split_volume_path(file.path)  # not out of the target either
            place = top if single else top / PurePosixPath(file.path).relative_to(below)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(await volume.get(file.path))
        return len(files)

    count = _use_volume(provider, name, bring)
    print(f"{count} {'file' if count == 1 else 'files'} brought home from {name}", file=sys.stderr)
    return 0


def put_file(provider: str, name: str, source: str, path: str | None) -> int:
    """Writes a file of this machine's to the volume."""
    file = Path(source).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        refuse_usage(f"the file {source} cannot be read: {error.strerror}")
    where = file.name if path is None else path
    if where.endswith("/"):
        where += file.name
    _use_volume(provider, name, lambda volume: volume.put(where, data))
    print(f"{where} ({len(data):,} bytes) is on {name}", file=sys.stderr)
    return 0


def _use_volume(provider: str, name: str, work: Callable[[VolumeStore], Awaitable[T]]) -> T:
    async def run() -> T:
        block = await resolve_provider(provider)
        volume = await block.volume(check_volume_name(name))
        try:
            return await work(volume)
        finally:
            await volume.close()

    return asyncio.run(run())
