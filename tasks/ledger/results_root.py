"""Where ledgers are made by default."""

from __future__ import annotations

import os
from pathlib import Path

from ...blocks.storage.data_dirs import resolve_data_dir
from ...blocks.storage.location_parsing import is_remote, parse_location, parse_scheme
from ...sandbox.errors import ConfigurationError


def get_results_root() -> Path:
    """The directory that `RLM_BATCH_RESULTS` names, or the user's data directory.

    Raises ConfigurationError where that variable names a location that is no directory of this machine.
    """
    text = os.environ.get("RLM_BATCH_RESULTS", "")
    if is_remote(text):
        raise ConfigurationError(
            f"RLM_BATCH_RESULTS is {text}, and must be a directory of this machine: it has an index and large "
            "parameters too. Name the location with results_path"
        )
    if parse_scheme(text) is not None:
        return Path(str(parse_location(text)))
    return resolve_data_dir("results", "RLM_BATCH_RESULTS")
