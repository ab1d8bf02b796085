"""The commands on volumes: they list volumes and files, and download, upload and remove files."""

import sys
from pathlib import Path, PurePosixPath

from ..blocks.sync_volume import Volume, list_volumes
from ..blocks.volume import check_volume_name, split_volume_path
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from .output import print_json


def print_volumes(provider: str, *, is_json: bool = False) -> int:
    """Print the name of each volume."""
    for name in list_volumes(provider):
        if is_json:
            print_json({"name": name})
        else:
            print(escape_text(name))
    return 0


def list_files(provider: str, name: str, path: str, *, is_json: bool = False) -> int:
    """Print the size in bytes and the path of each file."""
    files = Volume(check_volume_name(name), provider=provider).ls(path)
    if is_json:
        for file in files:
            print_json({"path": file.path, "bytes": file.size})
        return 0
    width = max((len(f"{file.size:,}") for file in files), default=0)
    for file in files:
        print(f"{file.size:>{width},}  {escape_text(file.path)}")  # Code chose the name.
    return 0


def get_files(provider: str, name: str, path: str, target: str, *, force: bool) -> int:
    """Download a file of the volume, or all files of a directory there.

    Raises:
        ConfigurationError: A file would be overwritten without `force`, and the person at the terminal did not agree.
            Nothing is written then.
    """
    source = "/".join(split_volume_path(path))
    destination = Path(target).expanduser()
    if destination.is_dir():  # As with cp, an existing directory gets the file, and another target is its name.
        destination /= PurePosixPath(source).name

    with Volume(check_volume_name(name), provider=provider) as volume:
        files = volume.ls(source)
        is_single_file = [file.path for file in files] == [source]
        local_paths: dict[str, Path] = {}
        for file in files:
            split_volume_path(file.path)  # A name cannot lead out of the target.
            below = PurePosixPath(file.path).relative_to(source)
            local_paths[file.path] = destination if is_single_file else destination / below
        if not force:
            _confirm_overwriting([local_path for local_path in local_paths.values() if local_path.exists()])
        for file_path, local_path in local_paths.items():
            data = volume.get(file_path)
            try:
                local_path.parent.mkdir(parents=True, exist_ok=True)
                local_path.write_bytes(data)
            except OSError as error:
                raise ConfigurationError(
                    f"{escape_text(str(local_path))} cannot be written ({error.strerror}): name another target"
                ) from None
    print(f"copied {len(files)} {'file' if len(files) == 1 else 'files'} from the volume {name}", file=sys.stderr)
    return 0


def _confirm_overwriting(paths: list[Path]) -> None:
    if not paths:
        return
    rest = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    files = escape_text(f"{paths[0]}{rest}")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(f"{files} exists, and nothing was written: --force overwrites")
    print(f"Overwrite {files}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigurationError("nothing was written")


def put_file(provider: str, name: str, source: str, path: str | None) -> int:
    """Upload a file to `path` on the volume, by default its own name; a path that ends in a slash is a directory."""
    file = Path(source).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the file {source} cannot be read: {error.strerror}") from None
    target = file.name if path is None else path
    if target.endswith("/"):
        target += file.name
    Volume(check_volume_name(name), provider=provider).put(target, data)
    print(f"copied {target} ({len(data):,} bytes) to the volume {name}", file=sys.stderr)
    return 0


def remove_files(provider: str, name: str, path: str, *, recursive: bool) -> int:
    """Remove a file of the volume, or, if `recursive`, a directory with its contents."""
    target = "/".join(split_volume_path(path))
    if not target:
        raise ConfigurationError("no path was given: name the file or directory on the volume to remove")
    with Volume(check_volume_name(name), provider=provider) as volume:
        files = volume.ls(target)
        if not recursive and [file.path for file in files] != [target]:
            count = f"{len(files)} {'file' if len(files) == 1 else 'files'}"
            raise ConfigurationError(f"{path} is a directory with {count}: --recursive removes it")
        volume.delete(target)
    print(f"removed {len(files)} {'file' if len(files) == 1 else 'files'} from the volume {name}", file=sys.stderr)
    return 0
