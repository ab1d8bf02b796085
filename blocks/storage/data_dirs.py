"""The directories for persistent data on this machine, by default below the user's data directory."""

import os
from pathlib import Path


def get_data_dir() -> Path:
    """Return rlm-batch's directory in the user's data directory."""
    data = os.environ.get("XDG_DATA_HOME")
    base = Path(data) if data and os.path.isabs(data) else Path.home() / ".local" / "share"
    return base / "rlm-batch"


def resolve_data_dir(room: str, variable: str) -> Path:
    """Return the directory that an environment variable names, or by default `room` below `get_data_dir()`."""
    named = os.environ.get(variable)
    return Path(named).expanduser().absolute() if named else get_data_dir() / room
