"""The commands on volumes: they list volumes and files, and download, upload and remove files."""

import sys
from pathlib import Path, PurePosixPath
from typing import Annotated

from cyclopts import App, Parameter

from ..blocks.storage.safe_paths import split_path
from ..blocks.sync_volume import Volume, list_volumes
from ..blocks.volume import check_volume_name
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from .output import Flag, Json, confirm, count, print_json

volume = App(name="volume")
Provider = Annotated[str, Parameter(help="local, or a saved block such as rlm-local-sandbox/NAME", metavar="PROVIDER")]


@volume.command(name="list")
def print_volumes(*, provider: Provider = "local", json: Json = False) -> int:
    """List the names of all volumes."""
    for name in list_volumes(provider):
        if json:
            print_json({"name": name})
        else:
            print(escape_text(name))
    return 0


@volume.command(name="ls")
def list_files(name: str, path: str = "", /, *, provider: Provider = "local", json: Json = False) -> int:
    """List the files on a volume, with their sizes in bytes.

    Args:
        name: The volume
        path: A file or directory on the volume; by default all files
    """
    files = Volume(check_volume_name(name), provider=provider).ls(path)
    if json:
        for file in files:
            print_json({"path": file.path, "bytes": file.size})
        return 0
    width = max((len(f"{file.size:,}") for file in files), default=0)
    for file in files:
        print(f"{file.size:>{width},}  {escape_text(file.path)}")  # Code chose the name.
    return 0


@volume.command(name="get")
def get_files(name: str, path: str, target: str = ".", /, *, force: Flag = False, provider: Provider = "local") -> int:
    """Copy a file, or a directory with its contents, from a volume to this machine.

    Args:
        name: The volume
        path: The file or directory on the volume
        target: Directory for the copy, or its new name; by default the current directory
        force: Overwrite existing files without asking

    Raises:
        ConfigurationError: A file would be overwritten without `force`, and the person at the terminal did not agree.
            Nothing is written then.
    """
    source = "/".join(split_path(path, may_be_empty=True))
    destination = Path(target).expanduser()
    if destination.is_dir():  # As with cp, an existing directory gets the file, and another target is its name.
        destination /= PurePosixPath(source).name

    with Volume(check_volume_name(name), provider=provider) as opened:
        files = opened.ls(source)
        local_paths: dict[str, Path] = {}  # the copies by the paths on the volume
        for file in files:
            split_path(file.path)  # A name cannot lead out of the target.
            below = PurePosixPath(file.path).relative_to(source)  # "." if the source is a file
            local_paths[file.path] = destination / below
        existing = [local_path for local_path in local_paths.values() if local_path.exists()]
        if existing and not force:
            names = escape_text(str(existing[0]))
            if len(existing) > 1:
                names += f" and {len(existing) - 1} more"
            confirm(f"Overwrite {names}?", f"{names} exists, and nothing was written: --force overwrites")
        for volume_path, local_path in local_paths.items():
            local_path.parent.mkdir(parents=True, exist_ok=True)
            local_path.write_bytes(opened.get(volume_path))
    print(f"copied {count(len(files), 'file')} from the volume {name}", file=sys.stderr)
    return 0


@volume.command(name="put")
def put_file(name: str, source: str, path: str | None = None, /, *, provider: Provider = "local") -> int:
    """Copy a file to a volume.

    Args:
        name: The volume, created if it is missing
        source: The file on this machine
        path: Path on the volume; by default the file's name. With a slash at its end it is a directory.
    """
    file = Path(source).expanduser()
    data = file.read_bytes()
    target = file.name if path is None else path
    if target.endswith("/"):
        target += file.name
    Volume(check_volume_name(name), provider=provider).put(target, data)
    print(f"copied {target} ({len(data):,} bytes) to the volume {name}", file=sys.stderr)
    return 0


@volume.command(name="rm")
def remove_files(name: str, path: str, /, *, recursive: Flag = False, provider: Provider = "local") -> int:
    """Remove a file from a volume.

    Args:
        name: The volume
        path: The file on the volume
        recursive: Remove a directory with its contents
    """
    target = "/".join(split_path(path, may_be_empty=True))
    if not target:
        raise ConfigurationError("no path was given: name the file or directory on the volume to remove")
    with Volume(check_volume_name(name), provider=provider) as opened:
        files = opened.ls(target)
        if not recursive and [file.path for file in files] != [target]:
            raise ConfigurationError(f"{path} is a directory with {count(len(files), 'file')}: --recursive removes it")
        opened.delete(target)
    print(f"removed {count(len(files), 'file')} from the volume {name}", file=sys.stderr)
    return 0
