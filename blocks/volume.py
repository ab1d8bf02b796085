"""A volume from the host's side, whatever its provider: what is on it, and its files."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..sandbox.errors import ConfigurationError, VolumeError
from ..sandbox.wire.names import OWN_FILE_PREFIX

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """A file on a volume: its path there, and its size in bytes."""

    path: str
    size: int


class VolumeStore(ABC):
    """One volume, through its provider's own API. Paths are relative to it; `..` is refused by whoever implements this.

    What we keep on a volume for ourselves, names that begin with `.rlm-batch`, is left out of lists.
    """

    @abstractmethod
    async def ls(self, path: str = "") -> list[VolumeFile]:
        """The files at or below that path, sorted by path. Raises VolumeError where there is nothing of that path."""

    @abstractmethod
    async def get(self, path: str) -> bytes:
        """A file's bytes. Raises VolumeError."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Writes a file, with the directories above it, in the place of one that is there. Raises VolumeError."""

    @abstractmethod
    async def delete(self, path: str) -> None:
        """Removes a file, or a directory with all that is in it. Raises VolumeError where there is none."""

    async def close(self) -> None:
        """Gives up what was opened to reach the volume; the next call opens it again."""
        return


def split_volume_path(path: str) -> tuple[str, ...]:
    """The names on the way to a path on a volume, none for the volume itself. Raises VolumeError."""
    parts = tuple(name for name in path.split("/") if name not in ("", "."))
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise VolumeError(f"{path!r} is no path on a volume: paths are relative to it and have no '..'")
    return parts


def check_volume_name(name: str) -> str:
    """The name of a volume, if it is one on every provider. Raises ConfigurationError."""
    if NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} is no name of a volume: it has letters, digits, dots, dashes and underscores, 100 at most"
        )
    return name


def is_reserved_name(name: str) -> bool:
    """Whether a name is one that we keep for ourselves."""
    return name.startswith(OWN_FILE_PREFIX)
