"""Where code runs, and what it finds there beside its names: the directory, the environment, modules."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def enter_environment(settings: dict[str, Any]) -> None:
    """Gives the calling process, and each that it forks, what the settings say; ``cwd`` is absolute then.

    Raises OSError where the directory cannot be entered.
    """
    settings["cwd"] = os.path.abspath(settings["cwd"])
    os.chdir(settings["cwd"])
    os.environ.update(settings["environment"])
    sys.path += settings["path"]
