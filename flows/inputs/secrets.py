"""The environment variables of this process that a run passes to its code."""

import os
from typing import TYPE_CHECKING

from pydantic import SecretStr

from ...blocks.worker_consent import is_deployment_run
from ...sandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from ..parameters import Options


def read_secrets(options: "Options") -> dict[str, SecretStr]:
    """Return the variables that `secrets` names, with their values.

    Raises:
        ConfigurationError: A variable is not set, or the code runs in another process: in a worker or in shards.
    """
    if is_deployment_run():
        refuse_secrets("a run of a deployment")
    if options.shards is not None:
        refuse_secrets("a job in shards")
    missing = next((name for name in options.secrets or () if name not in os.environ), None)
    if missing is not None:
        raise ConfigurationError(
            f"`secrets` names {missing!r}, and this process has no such environment variable: export it first"
        )
    return {name: SecretStr(os.environ[name]) for name in options.secrets or ()}


def refuse_secrets(what: str) -> None:
    """Raise ConfigurationError, because another process than this one would need the values."""
    raise ConfigurationError(
        f"{what} cannot take `secrets`, whose values stay in this process: save them in the "
        "environment of a block, and pass the block as the provider"
    )
