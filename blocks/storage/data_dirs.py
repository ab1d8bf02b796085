"""Where what lasts is kept on this machine, below the user's data directory unless a person says otherwise."""

import os
from pathlib import Path


def get_data_dir() -> Path:
    """Our directory in the user's data directory."""
    data = os.environ.get("XDG_DATA_HOME")
    base = Path(data) if data and os.path.isabs(data) else Path.home() / ".local" / "share"
    return base / "rlm-batch"


def resolve_data_dir(room: str, variable: str) -> Path:
    """The directory that an environment variable names, or else `room` below ours in the user's data directory."""
    named = os.environ.get(variable)
    return Path(named).expanduser().absolute() if named else get_data_dir() / room
