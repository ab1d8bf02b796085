"""Upload to and download from a sandbox's working folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, VolumeError
from ..sandbox_api import LARGE_FILE_REMEDY
from ..wire.names import add_article

if TYPE_CHECKING:
    from ..sandbox_api import Sandbox

MAX_FILE_BYTES = 256 * 1024 * 1024  # the whole file is in memory, with some providers twice

FileData = bytes | str | os.PathLike[str]


async def upload_file(sandbox: Sandbox, path: str, data: FileData) -> None:
    """Write a file below the sandbox's working folder: bytes, text as UTF-8, or a local file by its path.

    Raises ConfigurationError for other types of data, and VolumeError.
    """
    _check_path(path)
    await sandbox.upload(path, await asyncio.to_thread(_read_data, path, data))


async def download_file(sandbox: Sandbox, path: str) -> bytes:
    """Return the bytes of a file below the sandbox's working folder. Raises VolumeError."""
    _check_path(path)
    max_bytes = MAX_FILE_BYTES
    if sandbox.disk_mib is not None:  # Sparse files can exceed the sandbox's disk size.
        max_bytes = min(max_bytes, sandbox.disk_mib * 1024 * 1024)
    return await sandbox.download(path, max_bytes=max_bytes)


def _check_path(path: str) -> None:
    is_text = isinstance(path, str)  # type: ignore[reportUnnecessaryIsInstance]
    parts = PurePosixPath(path).parts if is_text else ()
    is_in_folder = parts and not path.startswith("/") and ".." not in parts
    if not is_in_folder or "\0" in path:
        raise VolumeError(f"{path!r} is not in the sandbox's working folder: name a file in it, without '..'")


def _read_data(path: str, data: Any) -> bytes:
    try:
        if isinstance(data, os.PathLike):
            with open(data, "rb") as file:  # type: ignore[reportUnknownArgumentType]
                data = file.read(MAX_FILE_BYTES + 1)
        elif isinstance(data, str):
            data = data.encode()
    except (OSError, UnicodeEncodeError) as error:
        raise VolumeError(f"{path} could not be sent: {error}") from error
    if not isinstance(data, bytes | bytearray):
        kind = add_article(type(data).__name__)
        raise ConfigurationError(f"the data of {path!r} is {kind}: pass bytes, text, or the pathlib.Path of a file")
    if len(data) > MAX_FILE_BYTES:
        raise VolumeError(f"{path} could not be sent: it has more than {MAX_FILE_BYTES:,} bytes; {LARGE_FILE_REMEDY}")
    return bytes(data)
