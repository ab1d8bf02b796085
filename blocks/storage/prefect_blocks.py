"""The base path and the settings of Prefect's storage blocks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError


def load_base_path(slug: str, name: str) -> tuple[str, dict[str, Any]]:
    """The base path and the settings of a storage block. Raises ConfigurationError."""
    from prefect import filesystems  # it registers Prefect's own kinds of blocks
    from prefect.blocks.core import Block

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a schema that has changed
            block: Any = Block.load(f"{slug}/{name}", _sync=True)  # type: ignore[call-arg]
    except ValueError as error:
        raise ConfigurationError(
            f"there is no block {slug}/{name} that can be loaded from this Prefect server: save it in the UI"
            + ("" if "Unable to find" in str(error) else ", with the fields that this version of its kind has")
        ) from None
    except Exception as error:
        if type(error).__module__.startswith(("httpx", "httpcore")):
            raise  # the server is away, which is told by whoever needs it
        raise ConfigurationError(
            f"the block {slug}/{name} cannot be loaded here ({type(error).__name__}): is the package installed that "
            "its kind is from?"
        ) from None
    if isinstance(block, filesystems.SMB):
        block = block.filesystem
    if isinstance(block, filesystems.RemoteFileSystem):
        return block.basepath, dict(block.settings)
    if isinstance(block, filesystems.LocalFileSystem):
        return str(Path(block.basepath or ".").expanduser().absolute()), {}
    raise ConfigurationError(
        f"the block {slug}/{name} has no base path that results could be below: use one of remote-file-system or "
        "local-file-system"
    )
