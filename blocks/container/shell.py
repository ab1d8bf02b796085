"""A shell in a kept container, in the terminal of this process."""

import asyncio
import os
from collections.abc import Mapping

from pydantic import SecretStr

from ...sandbox.errors import SandboxLost
from ..host_terminal import build_shell_command
from .deletion import find_container
from .engine import Engine
from .launch import CWD


async def open_shell(engines: list[Engine], sandbox_id: str, environment: Mapping[str, SecretStr]) -> int:
    """Run a shell in a container with the engine's `exec`, and return its exit status. Raise RlmBatchError.

    The engine's client takes the values of variables from its own environment, so that no command line has them.
    """
    values = {name: secret.get_secret_value() for name, secret in environment.items()}
    variables = (f"HOME={CWD}", "TERM", *values)
    for engine in engines:
        container = await find_container(engine, sandbox_id)
        if container is not None:
            options = [word for variable in variables for word in ("--env", variable)]
            command = [engine.program, "exec", "--interactive", "--tty", *options, container, *build_shell_command(CWD)]
            process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **values})
            return await process.wait()
    raise SandboxLost(f"the container {sandbox_id} is gone")
