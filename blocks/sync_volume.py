"""A volume for scripts: its methods are called without `await`."""

from typing import Any, Self

from ..sandbox.sync_interpreter import run_sync
from .registry import resolve_provider
from .volume import VolumeFile, VolumeStore


def list_volumes(provider: str = "local") -> list[str]:
    """The names of a provider's volumes, sorted; `provider` is a flow's `provider`. Raises ConfigurationError."""

    async def call() -> list[str]:
        return await (await resolve_provider(provider)).list_volumes()

    return run_sync(call)


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
        self._is_entered = False

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
                self._store = await (await resolve_provider(self._provider)).volume(self._name)
            try:
                return await getattr(self._store, method)(*arguments)
            finally:
                if not self._is_entered:
                    await self._store.close()

        return run_sync(call)

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_entered = False
        if self._store is not None:
            run_sync(self._store.close)
