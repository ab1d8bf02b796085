"""The local provider's volumes: directories on this machine that sandboxed code may write."""

import asyncio
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...sandbox.errors import ConfigurationError, VolumeError
from ...sandbox.wire.names import OWN_FILE_PREFIX
from ..volume import NAME, VolumeFile, VolumeStore, check_volume_name
from ..worker_consent import check_path, check_writable_directory
from .location import locate_local, resolve_data_dir
from .safe_paths import convert_errors, enter_directory_below, read_file_below, replace_file_below, split_path

FIRST_GID = 0x59000000  # The first group id of volumes if the host process is root, far from ids that systems assign.
GIDS = 1 << 24
UMASK = 0o002  # The umask of code with a separate user: the volume's group may write its files.
MAX_DEPTH = 200  # Levels of directories in a list. Each holds an open descriptor.
OWN_MODES, SHARED_MODES = (0o755, 0o644), (0o2775, 0o664)  # modes of folders and files; shared: for a group


def find_volumes_root(named: str | None) -> Path:
    """Return the directory of local volumes.

    Args:
        named: The setting `volume_root`, or None for `RLM_BATCH_VOLUMES` or else a directory in the data directory.

    Raises:
        ConfigurationError: A deployment run has a setting that its worker does not allow.
    """
    default = resolve_data_dir("volumes", "RLM_BATCH_VOLUMES")
    if named is None:
        return default
    root = locate_local(named, "`volume_root`")
    check_path(root, below=default)
    return root  # Links are kept, because the path is part of the result's key.


def find_volume(root: str | None, name: str) -> "LocalVolume":
    """Return the volume of that name below the root from `find_volumes_root`.

    Raises:
        ConfigurationError: The name is invalid, or a deployment run may not use the path.
    """
    volume = LocalVolume(find_volumes_root(root), name)
    if root is not None:  # The root may be inside another volume, where code can create links.
        check_writable_directory(check_path(volume.path, below=resolve_data_dir("volumes", "RLM_BATCH_VOLUMES")))
    return volume


def list_volumes(root: str | None) -> list[str]:
    """Return the names of the volumes below the root from `find_volumes_root`, sorted. Raises OSError."""
    try:
        with os.scandir(find_volumes_root(root)) as entries:
            directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []  # No volume exists yet.
    return sorted(name for name in directories if NAME.fullmatch(name))


class LocalVolume(VolumeStore):
    """A directory below the root. The host follows no link in it that sandboxed code created."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / check_volume_name(name)

    def create(self) -> int | None:
        """Create the directory if it is missing, and return its group id if this process is root, else None.

        Raises:
            ConfigurationError: The directory cannot be created, or is a link and this process is root.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._share_with_group() if os.geteuid() == 0 else None
        except OSError as error:
            raise ConfigurationError(
                f"the volume {self.path} cannot be created: {error.strerror}. Set "
                f"`volume_root` or RLM_BATCH_VOLUMES to another directory"
            ) from error

    def _share_with_group(self) -> int:
        """Give the directory a group of its own, and return the group's id. Raises ConfigurationError, OSError.

        Under root each sandbox has a separate user, but a sandbox must read and replace the files of an earlier one. So
        the setgid bit passes the directory's group on to everything created in it.
        """
        status = self.path.stat()
        group = status.st_gid
        if not FIRST_GID <= group < FIRST_GID + GIDS:
            if self.path.is_symlink():
                raise ConfigurationError(
                    f"the volume {self.path} is a link to {os.path.realpath(self.path)}, which code "
                    "could then write: create a directory instead, or mount that one"
                )
            # The path determines the id, so two processes that create the volume at the same time agree.
            digest = hashlib.sha256(os.fsencode(os.path.realpath(self.path))).digest()
            group = FIRST_GID + int.from_bytes(digest[:3], "big")
            os.chown(self.path, -1, group)
        if stat.S_IMODE(status.st_mode) != 0o2770 or status.st_gid != group:
            self.path.chmod(0o2770)
        return group

    async def ls(self, path: str = "") -> list[VolumeFile]:
        """List the files as `VolumeStore.ls` does, without links, which `get` refuses."""
        return await asyncio.to_thread(self._ls, path)

    async def get(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return a file's bytes as `VolumeStore.get` does. Raises VolumeError for a file of more than `max_bytes`."""
        return await asyncio.to_thread(read_file_below, self._locate(), path, max_bytes)

    async def put(self, path: str, data: bytes) -> None:
        """Write the file as `VolumeStore.put` does. The file gets its name when it is complete."""
        split_path(path)  # A wrong path must not create the volume.
        modes = OWN_MODES if await asyncio.to_thread(self.create) is None else SHARED_MODES
        await asyncio.to_thread(replace_file_below, self.path, path, data, *modes)

    async def delete(self, path: str) -> None:
        await asyncio.to_thread(self._delete, path)

    def _locate(self) -> Path:
        if not self.path.is_dir():
            raise VolumeError(
                f"there is no volume {self.path.name!r} in {self.path.parent}: code creates it, or "
                "`rlm-batch volume put`"
            )
        return self.path

    def _ls(self, path: str) -> list[VolumeFile]:
        names = split_path(path, may_be_empty=True)
        with convert_errors(path, "listed"), enter_directory_below(self._locate(), names[:-1]) as parent:
            if names:
                status = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    return [VolumeFile("/".join(names), status.st_size)]
                if not stat.S_ISDIR(status.st_mode):
                    raise VolumeError(f"{path!r} is a link or a pipe: name the file itself")
            name = names[-1] if names else "."
            return sorted(_walk_directory(parent, name, "/".join(names[:-1])), key=lambda file: file.path)

    def _delete(self, path: str) -> None:
        *parents, name = split_path(path)
        with convert_errors(path, "deleted"), enter_directory_below(self._locate(), tuple(parents)) as parent:
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)


def _walk_directory(parent: int, directory: str, parent_path: str) -> Iterator[VolumeFile]:
    """Yield the files below a directory of a volume, given by its name in the open directory `parent`.

    `parent_path` is the path of that directory, relative to the volume.
    """
    for folder, subfolders, files, fd in os.fwalk(directory, dir_fd=parent):  # It follows no links.
        if folder.count("/") > MAX_DEPTH:
            raise VolumeError(f"{folder[:99]}... has more than {MAX_DEPTH} nested directories: list a path in it")
        subfolders[:] = [name for name in subfolders if not name.startswith(OWN_FILE_PREFIX)]
        for name in files:
            with suppress(FileNotFoundError):  # Code deleted the file meanwhile.
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not name.startswith(OWN_FILE_PREFIX):
                    yield VolumeFile(os.path.normpath(os.path.join(parent_path, folder, name)), status.st_size)
