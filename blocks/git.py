"""What a Git repository's branch, tag or HEAD names, asked from the host, and how to sign in to it."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
from typing import TYPE_CHECKING

from ..sandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import SecretStr

SECONDS = 60.0  # for a server to answer
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def environment(token: SecretStr | None) -> dict[str, str]:
    """What git on the host runs with: it asks nobody, and signs in with the token, which no command line shows."""
    found = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
    return {**found, **sign_in(token, int(found.get("GIT_CONFIG_COUNT") or 0))}


def sign_in(token: SecretStr | None, number: int = 0) -> dict[str, str]:
    """The environment that git signs in with, after `number` other settings that it takes from there."""
    if token is None:
        return {}
    # Any user name does for the tokens of GitHub, GitLab and Bitbucket; this one is in all their manuals.
    basic = base64.b64encode(f"x-access-token:{token.get_secret_value()}".encode()).decode()
    return {
        "GIT_CONFIG_COUNT": str(number + 1),
        f"GIT_CONFIG_KEY_{number}": "http.extraHeader",
        f"GIT_CONFIG_VALUE_{number}": f"Authorization: Basic {basic}",
    }


async def git(*arguments: str, token: SecretStr | None = None, seconds: float = SECONDS) -> str:
    """Runs git on the host; returns what it printed. Raises ConfigurationError with what it complained of."""
    if shutil.which("git") is None:
        raise ConfigurationError("git is not on the PATH, and repo_url needs it: install git on this machine")
    named = arguments[2] if arguments[0] == "-C" else arguments[0]
    process = await asyncio.create_subprocess_exec(
        "git",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(token),
        start_new_session=True,  # Ctrl-C in the terminal is the flow's to handle
    )
    try:
        async with asyncio.timeout(seconds):
            out, complaint = await process.communicate()
    except TimeoutError:
        raise ConfigurationError(f"git {named} did not end within {seconds:.0f} s: is the server there?") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ConfigurationError(f"git {named} failed: {complaint.decode('utf-8', 'replace').strip()[-1000:]}")
    return out.decode("utf-8", "replace")


async def commit(url: str, ref: str | None, token: SecretStr | None) -> str:
    """The commit that a branch, a tag, or with None the repository's HEAD names. Raises ConfigurationError."""
    if ref is not None and COMMIT.fullmatch(ref):
        return ref
    for text, name in ((url, "repo_url"), (ref or "HEAD", "repo_ref")):
        if text.startswith("-") or not text.strip():
            raise ConfigurationError(f"{name} is {text!r}, which is no address or name that git knows")
    lines = (await git("ls-remote", "--", url, token=token)).splitlines()
    found = {name: commit for commit, _, name in (line.partition("\t") for line in lines)}
    # An annotated tag is an object of its own; ^{} is the commit that it is of.
    names = [f"refs/heads/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", ref]
    for name in names if ref is not None else ["HEAD"]:
        if name in found:
            return found[name]
    if ref is None:
        raise ConfigurationError(f"the repository {url} is empty: there is no commit in it to run the code on")
    heads = [name.removeprefix("refs/heads/") for name in found if name.startswith("refs/heads/")]
    raise ConfigurationError(
        f"the repository {url} has no branch or tag {ref!r} (its branches: {', '.join(heads[:10]) or 'none'}); a "
        "commit is named by all of its 40 digits"
    )
