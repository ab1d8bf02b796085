"""The check of mount targets in local sandboxes, which depends on their isolation."""

from collections.abc import Sequence

from ...sandbox.errors import ConfigurationError
from ..host_files.mounts import HostMount, overlaps
from .isolation import IsolationLevel, find_python_prefixes


def check_mount_places(mounts: Sequence[HostMount], level: IsolationLevel) -> None:
    """Raise ConfigurationError if sandboxes of this level cannot have the mounts at their targets.

    Without namespaces nothing is mounted: code sees the machine's own paths, and Landlock opens those of the mounts.
    """
    for mount in mounts:
        source = str(mount.source)
        if level != "bubblewrap" and mount.target != source:
            raise ConfigurationError(
                f"mounts: with isolation {level} code sees this machine's own paths, and {source!r} cannot be at "
                f"{mount.target}: name it by its own (mounts={{{source!r}: {source!r}}}), or use isolation bubblewrap"
            )
        for prefix in find_python_prefixes():
            if level == "bubblewrap" and overlaps(mount.target, prefix):
                raise ConfigurationError(
                    f"mounts: {mount.target} is where Python is ({prefix}): name another place, such as /data/set"
                )
