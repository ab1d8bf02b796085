"""Containers instead of local sandboxes, for a machine that cannot isolate local sandboxes."""

from typing import Any

from pydantic import ValidationError

from ...sandbox.errors import ConfigurationError
from ..host_files.files import HostFiles
from ..provider import SandboxProvider
from ..registry import PROVIDERS
from ..settings import SandboxSettings, describe_problems
from .settings import LocalSettings

LEAST_PROCESSES = 8


def build_stand_in(settings: LocalSettings, commit: str | None, files: HostFiles) -> SandboxProvider:
    """Return a container provider with these settings. Raises ConfigurationError if containers cannot have them.

    A limit on each process becomes a limit on the whole container, unless there is a total.
    """
    fields: dict[str, Any] = {
        **{name: getattr(settings, name) for name in SandboxSettings.model_fields},
        "memory_mib": settings.total_memory_mib or settings.memory_mib,
        "processes": max(settings.total_processes or settings.processes, LEAST_PROCESSES),
        "disk_mib": settings.disk_mib,
        "cpus": settings.cpus,
        "volume_root": settings.volume_root,
    }
    try:
        provider = PROVIDERS["container"].load_provider()(**fields)
    except ValidationError as error:
        raise ConfigurationError(f"no container does for these settings: {describe_problems(error)}") from None
    if commit is not None:
        provider.pin(commit)
    return provider.with_host_files(files.pack())
