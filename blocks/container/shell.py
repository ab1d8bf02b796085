"""A shell in a kept container, in the terminal of this process."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress

from pydantic import SecretStr

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import SandboxLost
from ..host_terminal import ShellNote, build_shell_command, restore_terminal
from .deletion import find_container
from .engine import Engine
from .launch import CWD


async def open_shell(engines: list[Engine], sandbox_id: str, environment: Mapping[str, SecretStr]) -> int:
    """Run a shell in a container with the engine's `exec`, and return its exit status. Raise RlmBatchError.

    The engine's client takes the values of variables from its own environment, so that no command line has them.
    """
    note, values = ShellNote(), {name: secret.get_secret_value() for name, secret in environment.items()}
    variables = (f"HOME={CWD}", "TERM", *values)
    for engine in engines:
        container = await find_container(engine, sandbox_id)
        if container is not None:
            options = [word for variable in variables for word in ("--env", variable)]
            shell = build_shell_command(CWD, note.path)
            command = [engine.program, "exec", "--interactive", "--tty", *options, container, *shell]
            with restore_terminal():
                process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **values})
                try:
                    return await process.wait()
                finally:
                    await run_shielded(_end(process, engine, ["exec", container, *note.end_command]))
    raise SandboxLost(f"the container {sandbox_id} is gone")


async def _end(client: asyncio.subprocess.Process, engine: Engine, command: list[str]) -> None:
    """End the shell and the engine's client if the client still runs. The shell would outlive the client."""
    if client.returncode is None:
        await engine.run(*command)
        with suppress(ProcessLookupError):
            client.kill()
        await client.wait()
