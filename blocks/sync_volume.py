"""A volume with synchronous methods, for scripts."""

from typing import Any, Self

from ..sandbox.sync_interpreter import run_sync
from .registry import resolve_provider
from .volume import VolumeFile, VolumeStore


def list_volumes(provider: str = "local") -> list[str]:
    """Return the names of a provider's volumes, sorted.

    Args:
        provider: The provider, as in a flow's `provider`.

    Raises:
        ConfigurationError: There is no such provider, or its volumes cannot be listed.
    """

    async def call() -> list[str]:
        resolved = await resolve_provider(provider)
        return await resolved.list_volumes()

    return run_sync(call)


class Volume:
    """A volume for scripts, with the methods of `VolumeStore` but without `await`.

    The first write creates the volume. Some providers' volumes are accessible only from a sandbox. With such a
    provider each call opens a sandbox, and calls within a `with` block share one sandbox. A method raises
    ConfigurationError if there is no such provider.

    Args:
        name: The volume's name; by default the `volume_name` of the provider's block.
        provider: The provider, as in a flow's `provider`. Default: "local".

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
        """Return the files at or below a path, sorted by path.

        Args:
            path: Path relative to the volume. Default: all files.

        Returns:
            A list of `VolumeFile`.

        Raises:
            VolumeError: The path is missing.
        """
        return self._run("ls", path)

    def get(self, path: str) -> bytes:
        """Return a file's content.

        Args:
            path: Path relative to the volume.

        Returns:
            The content as bytes.

        Raises:
            VolumeError: The file is missing.
        """
        return self._run("get", path)

    def put(self, path: str, data: str | bytes) -> None:
        """Write or replace a file, and create its missing directories.

        Args:
            path: Path relative to the volume.
            data: Bytes, or text (written as UTF-8).

        Raises:
            VolumeError: The file could not be written.
        """
        self._run("put", path, data.encode() if isinstance(data, str) else data)

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents.

        Args:
            path: Path relative to the volume.

        Raises:
            VolumeError: The path is missing.
        """
        self._run("delete", path)

    def _run(self, method: str, *arguments: Any) -> Any:
        async def call() -> Any:
            if self._store is None:
                provider = await resolve_provider(self._provider)
                self._store = await provider.volume(self._name)
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
