"""The interface to a volume's files from the host, for all providers."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..sandbox.errors import ConfigurationError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """A file on a volume.

    Attributes:
        path: Path relative to the volume.
        size: Size in bytes.
    """

    path: str
    size: int


class VolumeStore(ABC):
    """A volume, accessed through its provider's API. Paths are relative to it, and implementations refuse `..`.

    Lists omit rlm-batch's own files, whose names begin with `.rlm-batch`.
    """

    @abstractmethod
    async def ls(self, path: str = "") -> list[VolumeFile]:
        """Return the files at or below that path, sorted by path. Raises VolumeError for a missing path."""

    @abstractmethod
    async def get(self, path: str) -> bytes:
        """Return a file's bytes. Raises VolumeError for a missing file."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write or replace a file, and create missing directories. Raises VolumeError on failure."""

    @abstractmethod
    async def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents. Raises VolumeError for a missing path."""

    async def close(self) -> None:
        """Release the resources that access the volume. The next call opens them again."""
        return


def check_volume_name(name: str) -> str:
    """Return the name if it is valid for a volume of every provider, else raise ConfigurationError."""
    if NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} is not the name of a volume: use at most 100 letters, digits, dots, dashes and underscores"
        )
    return name
