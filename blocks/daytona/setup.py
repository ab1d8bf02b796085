"""The set-up of a Daytona sandbox before code runs: its commands and packages."""

import asyncio
import re
import shlex
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import daytona

from ...sandbox.errors import ConfigurationError, SandboxStartError
from ..setup_commands import PYTHON_FOR_PIP, RUN_AS_ROOT
from .client import NAME_PREFIX
from .errors import CALL_SECONDS, SETUP_SECONDS, is_turned_away, retry_call
from .settings import DaytonaSettings


async def open_session(remote: daytona.AsyncSandbox, retry_seconds: float) -> str:
    """Open a session in the sandbox and return its name. Raise DaytonaError."""
    name = f"{NAME_PREFIX}{uuid.uuid4().hex[:8]}"
    with suppress(daytona.DaytonaConflictError):  # A call whose answer was lost has created the session.
        await retry_call(
            lambda: remote.process.create_session(name, CALL_SECONDS), seconds=retry_seconds, remote=remote
        )
    return name


async def run_command(remote: daytona.AsyncSandbox, name: str, command: str, retry_seconds: float) -> tuple[int, str]:
    """Run a shell command to its end, and return its exit status and output. Raise SandboxStartError or DaytonaError.

    The status is polled, because a proxy ends calls that take minutes. A start whose answer was lost is not retried,
    because the command may be running. `name` is the command's name in an error.
    """
    process = remote.process
    retry = partial(retry_call, seconds=retry_seconds, remote=remote)
    session = await open_session(remote, retry_seconds)
    request = daytona.SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
    started = await retry(
        lambda: process.execute_session_command(session, request, int(CALL_SECONDS)), is_passing=is_turned_away
    )
    pause = 0.05
    give_up_at = time.monotonic() + SETUP_SECONDS
    while True:
        state = await retry(lambda: process.get_session_command(session, started.cmd_id, CALL_SECONDS))
        if state.exit_code is not None:
            break
        if time.monotonic() > give_up_at:
            raise SandboxStartError(f"{name} did not end within {SETUP_SECONDS:.0f} s in sandbox {remote.id}")
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, 2.0)
    logs = await retry(lambda: process.get_session_command_logs(session, started.cmd_id, CALL_SECONDS))
    return state.exit_code, f"{logs.stdout or ''}\n{logs.stderr or ''}"


async def run_setup(remote: daytona.AsyncSandbox, commands: str, retry_seconds: float) -> None:
    """Run the commands of `setup`. Raise ConfigurationError, SandboxStartError or DaytonaError."""
    command = shlex.join(["sh", "-c", RUN_AS_ROOT, "setup", commands])
    status, output = await run_command(remote, "setup", command, retry_seconds)
    if status:
        raise ConfigurationError(f"`setup` failed with status {status}: correct it\n{_get_last_lines(output)}")


def _get_last_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-10:])


def name_clone(settings: DaytonaSettings) -> str:
    """Return the clone's directory, relative to the working directory."""
    repository = Path(urlsplit(settings.repo_url or "").path).stem or "repository"
    return re.sub(r"[^A-Za-z0-9._-]", "-", repository)


async def install_packages(remote: daytona.AsyncSandbox, packages: list[str], retry_seconds: float) -> None:
    """Install packages. Raise ConfigurationError, SandboxStartError or DaytonaError, with pip's last lines."""
    # Run pip in /: a module in the session's directory could shadow one that pip imports.
    words = [*PYTHON_FOR_PIP, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--"]
    status, output = await run_command(remote, "pip", f"cd / && {shlex.join([*words, *packages])}", retry_seconds)
    if status:
        text = f"pip could not install {', '.join(packages)} (status {status}): {_get_last_lines(output)}"
        if "Retrying (" in output:  # This line is pip's only sign of a network failure.
            raise SandboxStartError(text)
        raise ConfigurationError(f"{text}\nChange packages, or the image")
