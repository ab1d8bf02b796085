"""Parsing of locations: a path on this machine, a location that fsspec reaches, or one through a saved block.

`s3://bucket/dir`, `gs://`, `sftp://` and others need their fsspec package. `file:///dir` is an ordinary path.
`block://<slug>/<name>/<path below>` is a path below the base path of a Prefect storage block, with that block's
credentials. The first location imports fsspec.
"""

import os
import urllib.parse
import warnings
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ..worker_consent import check_location
from .location import (
    LOCAL_SCHEMES,
    SCHEME_PATTERN,
    Location,
    PathOrLocation,
    collect_secrets,
    describe_error,
    is_remote,
    locate_local,
    parse_scheme,
)


def parse_location(text: str | os.PathLike[str] | Location) -> PathOrLocation:
    """Return the absolute path or the location that a text names.

    Raises:
        ConfigurationError: The text is invalid, its block or package is missing, or the store cannot be reached.
    """
    if isinstance(text, Location):
        return text
    text = os.fspath(text)
    scheme = parse_scheme(text)
    if scheme is None or scheme in LOCAL_SCHEMES:
        return locate_local(text, "the location")
    return _parse_block_location(text) if scheme == "block" else _open_location(text, text, {})


def make_absolute(text: str) -> str:
    """Return an absolute path for a path on this machine, and a remote location unchanged."""
    return text if is_remote(text) else str(parse_location(text))


def _parse_block_location(text: str) -> PathOrLocation:
    _, _, address = text.partition("://")
    slug, _, rest = address.partition("/")
    name, _, below = rest.partition("/")
    if not slug or not name:
        raise ConfigurationError(
            f"{text!r} names no block: write block://SLUG/NAME/PATH, as in block://remote-file-system/results/job-1"
        )
    if ".." in below.split("/"):
        raise ConfigurationError(f"{text!r} leaves the block's base path: name a path below it")
    base, settings = _load_base_path(slug, name)
    below = below.strip("/")
    url = f"{base.rstrip('/')}/{below}" if below else base
    if SCHEME_PATTERN.match(base) is None:
        return Path(url).expanduser().absolute()
    return _open_location(text, url, settings)


def _load_base_path(slug: str, name: str) -> tuple[str, dict[str, Any]]:
    """Load a storage block and return its base path and its settings. Raises ConfigurationError."""
    from prefect import filesystems  # This import registers Prefect's own block types.
    from prefect.blocks.core import Block

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Prefect warns about a changed schema.
            block: Any = Block.load(f"{slug}/{name}", _sync=True)  # type: ignore[call-arg]
    except Exception as error:
        if type(error).__module__.startswith(("httpx", "httpcore")):
            raise  # The server cannot be reached. The caller reports this.
        raise ConfigurationError(
            f"there is no block {slug}/{name} that can be loaded from this Prefect server ({type(error).__name__}): "
            "save it in the UI, and install the package of its kind"
        ) from None
    if isinstance(block, filesystems.SMB):
        block = block.filesystem
    if isinstance(block, filesystems.RemoteFileSystem):
        return block.basepath, dict(block.settings)
    if isinstance(block, filesystems.LocalFileSystem):
        return str(Path(block.basepath or ".").expanduser().absolute()), {}
    raise ConfigurationError(
        f"the block {slug}/{name} has no base path for results: use a remote-file-system or local-file-system"
    )


def _open_location(text: str, url: str, settings: dict[str, Any]) -> PathOrLocation:
    """Return the location at `url`, with `text` as its name. Raises ConfigurationError if it cannot be reached."""
    scheme = url.partition("://")[0].lower()
    if scheme in LOCAL_SCHEMES:
        return locate_local(url, "the location")
    check_location(text, url, settings)
    from fsspec.core import url_to_fs

    secrets = (*collect_secrets(settings), *collect_secrets(urllib.parse.urlsplit(url).password))
    try:
        file_system, path = url_to_fs(url, **settings)
        return Location(text.rstrip("/"), file_system, path.rstrip("/"), secrets)
    except Exception as error:  # noqa: BLE001 - some packages connect here, each with its own error types
        raise ConfigurationError(f"{text} cannot be used: {describe_error(error, secrets)}") from None
