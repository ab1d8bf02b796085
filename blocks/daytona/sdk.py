"""Daytona's SDK, imported when the first sandbox is opened: that costs seconds and a hundred megabytes, once."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def get_sdk() -> Any:
    """The SDK's module; most of it is imported when it is first asked for."""
    import daytona

    return daytona


def import_client() -> None:
    """Imports what a client is made of; the SDK's own import leaves it until it is asked for."""
    _ = get_sdk().AsyncDaytona
