"""The commands on volumes: list their files, download from them, upload to them."""

import sys
from pathlib import Path, PurePosixPath

from ..blocks.sync_volume import Volume
from ..blocks.volume import check_volume_name, split_volume_path
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text


def list_files(provider: str, name: str, path: str) -> int:
    """Prints a line for each file: its size in bytes, and its path."""
    files = Volume(check_volume_name(name), provider=provider).ls(path)
    width = max((len(f"{file.size:,}") for file in files), default=0)
    for file in files:
        print(f"{file.size:>{width},}  {escape_text(file.path)}")  # code chose the name
    return 0


def get_files(provider: str, name: str, path: str, target: str) -> int:
    """Writes a file of the volume, or all files of a directory there, to this machine."""
    source = "/".join(split_volume_path(path))
    destination = Path(target).expanduser()
    if destination.is_dir():  # as cp does it: into a directory that is there, else under the name that was given
        destination /= PurePosixPath(source).name

    with Volume(check_volume_name(name), provider=provider) as volume:
        files = volume.ls(source)
        is_single_file = [file.path for file in files] == [source]
        for file in files:
            split_volume_path(file.path)  # not out of the target either
            local_path = destination if is_single_file else destination / PurePosixPath(file.path).relative_to(source)
            local_path.parent.mkdir(parents=True, exist_ok=True)
            local_path.write_bytes(volume.get(file.path))
    print(f"{len(files)} {'file' if len(files) == 1 else 'files'} brought home from {name}", file=sys.stderr)
    return 0


def put_file(provider: str, name: str, source: str, path: str | None) -> int:
    """Uploads a file to `path` on the volume, below it where it ends in a slash; by default under its own name."""
    file = Path(source).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the file {source} cannot be read: {error.strerror}") from None
    target = file.name if path is None else path
    if target.endswith("/"):
        target += file.name
    Volume(check_volume_name(name), provider=provider).put(target, data)
    print(f"{target} ({len(data):,} bytes) is on {name}", file=sys.stderr)
    return 0
