"""Volumes from the host's side: what is on one, and bringing files home."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from ..sandbox.driver import OUR_FILES
from ..sandbox.errors import ConfigurationError, VolumeError
from ..sandbox.sync_interpreter import run_blocking

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


class Volume:
    """A volume, for scripts: `provider` is a flow's `provider`, and `name` the volume's, by default the provider's own.

    Its methods are those of `VolumeStore`, called without `await`; like the sandboxes, it makes the volume when it is
    first written to. Where a volume is reached from a sandbox only, each call opens one; within `with` they share it.
    Raises ConfigurationError where there is no such provider.

    Example:
        >>> volume = Volume("results")
        >>> volume.put("notes/today.txt", "hello")
        >>> volume.ls()
        [VolumeFile(path='notes/today.txt', size=5)]
        >>> volume.get("notes/today.txt")
        b'hello'
    """

    def __init__(self, name: str | None = None, *, provider: str = "local") -> None:
        self._name, self._provider = name, provider
        self._store: VolumeStore | None = None
        self._kept = False

    def ls(self, path: str = "") -> list[VolumeFile]:
        """The files at or below that path, sorted by path."""
        return self._run("ls", path)

    def get(self, path: str) -> bytes:
        """A file's bytes."""
        return self._run("get", path)

    def put(self, path: str, data: str | bytes) -> None:
        """Writes a file; text as UTF-8."""
        self._run("put", path, data.encode() if isinstance(data, str) else data)

    def delete(self, path: str) -> None:
        """Removes a file, or a directory with all that is in it."""
        self._run("delete", path)

    def _run(self, method: str, *arguments: Any) -> Any:
        async def call() -> Any:
            if self._store is None:
                from .registry import resolve

                self._store = await (await resolve(self._provider)).volume(self._name)
            try:
                return await getattr(self._store, method)(*arguments)
            finally:
                if not self._kept:
                    await self._store.close()

        return run_blocking(call)

    def __enter__(self) -> Self:
        self._kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self._kept = False
        if self._store is not None:
            run_blocking(self._store.close)


def names(path: str) -> tuple[str, ...]:
    """The names on the way to a path on a volume, none for the volume itself. Raises VolumeError."""
    found = tuple(name for name in path.split("/") if name not in ("", "."))
    if path.startswith("/") or ".." in found or "\0" in path:
        raise VolumeError(f"{path!r} is no path on a volume: paths are relative to it and have no '..'")
    return found


def check_name(name: str) -> str:
    """The name of a volume, if it is one on every provider. Raises ConfigurationError."""
    if NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} is no name of a volume: it has letters, digits, dots, dashes and underscores, 100 at most"
        )
    return name


def ours(name: str) -> bool:
    """Whether a name is one that we keep for ourselves."""
    return name.startswith(OUR_FILES)
