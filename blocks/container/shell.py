"""A shell in a kept container: the engine's `exec`."""

import shlex
from collections.abc import Mapping

from pydantic import SecretStr

from ...sandbox.errors import SandboxLost
from ..host_terminal import SHELL, run_in_terminal
from .deletion import find_container
from .engine import Engine
from .launch import CWD


async def open_shell(engines: list[Engine], sandbox_id: str, environment: Mapping[str, SecretStr]) -> int:
    """Run a shell in a container, and return its exit status. Raise RlmBatchError.

    The engine's client takes the values of variables from its own environment, so that no command line has them.
    """
    values = {name: secret.get_secret_value() for name, secret in environment.items()}
    options = [word for variable in (f"HOME={CWD}", "TERM", *values) for word in ("--env", variable)]
    for engine in engines:
        container = await find_container(engine, sandbox_id)
        if container is not None:
            command = [engine.program, "exec", "-it", "--workdir", CWD, *options, container, *SHELL]
            return await run_in_terminal(command, shlex.join(command), environment=values)
    raise SandboxLost(f"the container {sandbox_id} is gone")
