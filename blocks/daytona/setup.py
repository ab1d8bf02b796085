"""The set-up of a Daytona sandbox before code runs: repository, packages and the host's files."""

import asyncio
import re
import shlex
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import daytona

from ...sandbox.errors import ConfigurationError, SandboxStartError
from .. import git as repository
from ..host_files.files import ARCHIVE_PATH, UNPACK_ARCHIVE, describe_unpacking_failure
from ..setup_commands import PYTHON_FOR_PIP, RUN_AS_ROOT, describe_setup_failure
from .client import NAME_PREFIX
from .errors import CALL_SECONDS, SETUP_SECONDS, get_message, is_transient, is_turned_away, retry_call, says_gone
from .settings import DaytonaSettings

# Messages of go-git and of git, which the daemon returns if a commit is not on the cloned branch.
NOT_ON_BRANCH = re.compile("object not found|git checkout .* exited with|reference is not a tree|unable to read tree")


async def open_session(remote: daytona.AsyncSandbox, retry_seconds: float) -> str:
    """Open a session in the sandbox and return its name. Raise DaytonaError."""
    name = f"{NAME_PREFIX}{uuid.uuid4().hex[:8]}"
    with suppress(daytona.DaytonaConflictError):  # A call whose answer was lost has created the session.
        await retry_call(
            lambda: remote.process.create_session(name, CALL_SECONDS), seconds=retry_seconds, remote=remote
        )
    return name


async def run_command(
    remote: daytona.AsyncSandbox, command: str, seconds: float, retry_seconds: float
) -> tuple[int, str]:
    """Run a shell command to its end; return its exit status and output. Raise TimeoutError or DaytonaError.

    The status is polled, because a proxy ends calls that take minutes. If the answer to the start was lost, the start
    is not retried: the command may be running.
    """
    process = remote.process
    retry = partial(retry_call, seconds=retry_seconds, remote=remote)
    session = await open_session(remote, retry_seconds)
    request = daytona.SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
    started = await retry(
        lambda: process.execute_session_command(session, request, int(CALL_SECONDS)), is_passing=is_turned_away
    )
    pause = 0.05
    async with asyncio.timeout(seconds):
        while True:
            state = await retry(lambda: process.get_session_command(session, started.cmd_id, CALL_SECONDS))
            if state.exit_code is not None:
                break
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 2.0)
    logs = await retry(lambda: process.get_session_command_logs(session, started.cmd_id, CALL_SECONDS))
    return state.exit_code, "\n".join(filter(None, (logs.stdout, logs.stderr)))


async def run_setup(remote: daytona.AsyncSandbox, commands: str, retry_seconds: float) -> None:
    """Run the commands of `setup`. Raise ConfigurationError, SandboxStartError or DaytonaError."""
    command = shlex.join(["sh", "-c", RUN_AS_ROOT, "setup", commands])
    try:
        status, output = await run_command(remote, command, SETUP_SECONDS, retry_seconds)
    except TimeoutError:
        raise SandboxStartError(f"setup did not end within {SETUP_SECONDS:.0f} s in sandbox {remote.id}") from None
    if status:
        raise describe_setup_failure(status, output)


def name_clone(settings: DaytonaSettings) -> str:
    """Return the clone's directory, relative to the working directory."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path(urlsplit(settings.repo_url or "").path).stem) or "repository"


async def clone_repository(remote: daytona.AsyncSandbox, settings: DaytonaSettings, commit: str) -> None:
    """Clone the repository into the directory `name_clone`, and check the commit out.

    The daemon signs in with the token, which is not in the clone or a command line. Raise ConfigurationError,
    SandboxStartError or DaytonaError.
    """
    url = settings.repo_url
    assert url is not None
    path = name_clone(settings)
    token = settings.repo_token.get_secret_value() if settings.repo_token is not None else None
    credentials: dict[str, Any] = {"username": "x-access-token", "password": token} if token else {}
    ref = settings.repo_ref
    # Daytona clones one branch. A ref may be a branch or a tag. Most tags and commits are on the default branch.
    branches = [None] if ref is None or repository.COMMIT_PATTERN.fullmatch(ref) else [ref, None]
    try:
        for branch in branches:
            try:
                await remote.git.clone(
                    url, path, branch=branch, commit_id=commit, request_timeout=SETUP_SECONDS, **credentials
                )
                break
            except daytona.DaytonaError as error:
                if NOT_ON_BRANCH.search(get_message(error)):
                    await _fetch_commit(remote, settings, path, commit)
                    break
                is_refused = isinstance(error, daytona.DaytonaAuthenticationError) or says_gone(error)
                if branch is None or is_refused or is_transient(error):
                    raise
    except daytona.DaytonaError as error:
        if is_transient(error) or says_gone(error):
            raise
        raise ConfigurationError(
            f"the repository {url} could not be cloned at {commit} in a sandbox "
            f"({repository.hide_credentials(get_message(error))}): check "
            "repo_url, repo_ref and repo_token, and that Daytona can reach it"
        ) from error


async def _fetch_commit(remote: daytona.AsyncSandbox, settings: DaytonaSettings, path: str, commit: str) -> None:
    """Check out a commit that is not on the cloned branch, with the sandbox's own git.

    Only git's environment has the token, and git has ended when code runs. Raise ConfigurationError, SandboxStartError
    or DaytonaError.
    """
    url = settings.repo_url
    assert url is not None
    command = shlex.join(["sh", "-c", repository.FETCH_COMMIT, "fetch", path, url, commit])
    environment = {"GIT_TERMINAL_PROMPT": "0", **repository.build_sign_in_environment(settings.repo_token)}
    done = await remote.process.exec(command, env=environment, timeout=int(SETUP_SECONDS))
    if not done.exit_code:
        return
    failure = (
        f"the repository {url} could not be cloned at {commit} in a sandbox: it is not on the branch that Daytona "
        f"clones, and fetching it failed ({repository.hide_credentials(' '.join(done.result.split()))[-1000:]})"
    )
    if done.exit_code == 127:
        raise ConfigurationError(f"{failure}: use an image with git, or a branch as repo_ref")
    if done.exit_code == 3:
        raise ConfigurationError(f"{failure}: check repo_url and repo_ref")
    raise SandboxStartError(failure)


async def install_packages(remote: daytona.AsyncSandbox, packages: list[str], retry_seconds: float) -> None:
    """Install packages. Raise ConfigurationError, SandboxStartError or DaytonaError, with pip's last lines."""
    requirements = " ".join(shlex.quote(package) for package in packages)
    # Run pip in /: a module in the session's directory could shadow one that pip imports.
    python = shlex.join(PYTHON_FOR_PIP)
    command = f"cd / && {python} -m pip install --quiet --disable-pip-version-check --no-input -- {requirements}"
    try:
        status, output = await run_command(remote, command, SETUP_SECONDS, retry_seconds)
    except TimeoutError:
        raise SandboxStartError(f"pip did not end within {SETUP_SECONDS:.0f} s in sandbox {remote.id}") from None
    if status:
        lines = [line for line in output.splitlines() if line.strip()]
        text = f"pip could not install {', '.join(packages)} (status {status}): " + "\n".join(lines[-10:])
        # This line is pip's only sign of a network failure.
        is_network_lost = "Retrying (" in output
        raise (
            SandboxStartError(text) if is_network_lost else ConfigurationError(f"{text}\nChange packages, or the image")
        )


async def unpack_files(remote: daytona.AsyncSandbox, archive: bytes, retry_seconds: float) -> None:
    """Upload an archive of the host's files and unpack it. Raise ConfigurationError or DaytonaError."""
    seconds = int(SETUP_SECONDS)
    command = shlex.join(["sh", "-c", UNPACK_ARCHIVE, "unpack", ARCHIVE_PATH, "python3"])
    retry = partial(retry_call, seconds=retry_seconds, remote=remote)
    await retry(lambda: remote.fs.upload_file(archive, ARCHIVE_PATH, seconds))
    done = await retry(lambda: remote.process.exec(command, timeout=seconds))
    if done.exit_code:
        raise describe_unpacking_failure(done.result)
