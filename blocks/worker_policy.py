"""The worker's file. No environment variable names it, because the person who starts a run may set variables."""

import os
import pwd
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..sandbox.errors import ConfigurationError
from .problems import describe_problems

MACHINE_FILE = Path("/etc/rlm-batch/worker.toml")


class WorkerPolicy(BaseModel):
    """What runs of deployments may do on this worker; by default nothing that needs consent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    allow_no_isolation: bool = False
    allow_network: bool = False
    allowed_paths: list[Annotated[str, Field(pattern="^/")]] = []
    allowed_tools: list[str] = []
    key_addresses: list[str] = []


def list_policy_files() -> list[Path]:
    """Return the paths of the worker's file. The first existing file counts."""
    with suppress(KeyError):  # The user of a container may be in no database.
        return [MACHINE_FILE, Path(pwd.getpwuid(os.getuid()).pw_dir, ".config/rlm-batch/worker.toml")]
    return [MACHINE_FILE]


def find_policy_file() -> Path | None:
    """Return the worker's file, or None if it does not exist. Raise OSError if it cannot be examined."""
    for path in list_policy_files():
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
            return path
    return None


def read_policy() -> WorkerPolicy:
    """Return what the worker's file allows. Raise ConfigurationError if it is wrong, or other users may change it."""
    try:
        path = find_policy_file()
        if path is None:
            return WorkerPolicy()
        for place in (path, path.parent, path.resolve().parent):
            status = place.stat()
            is_writable_by_others = bool(status.st_mode & 0o022)
            if status.st_uid not in (0, os.getuid()) or is_writable_by_others:
                raise ConfigurationError(
                    f"the worker's file does not count, because other users may change {place}: let root or the "
                    f"worker's user own it, and run chmod go-w {place}"
                )
        return WorkerPolicy.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        problem = describe_problems(error) if isinstance(error, ValidationError) else error
        files = " or ".join(map(str, list_policy_files()))
        keys = ", ".join(WorkerPolicy.model_fields)
        raise ConfigurationError(f"the worker's file ({files}) is wrong: {problem}. Its keys are {keys}") from None
