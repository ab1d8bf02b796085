"""Git on the host: running it, signing in, and resolving a branch, a tag or HEAD to a commit."""

import base64
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from pydantic import SecretStr

from ..sandbox.errors import ConfigurationError
from .subprocess_runner import run_command
from .worker_consent import check_repository

ANSWER_TIMEOUT_SECONDS = 60.0  # seconds for a server to answer
CHECKOUT_TIMEOUT_SECONDS = 5.0
# A program for `sh -c` with a directory, an address and a commit. It fetches only the commit, or all branches
# and tags if the server refuses single commits. Its exit status is 3 if no branch or tag contains the commit.
FETCH_COMMIT = """
set -e
mkdir -p "$1"
cd "$1"
git init -q
git remote add origin "$2" 2>/dev/null || git remote set-url origin "$2"
git fetch -q --depth 1 origin "$3" || git fetch -q origin "+refs/heads/*:refs/remotes/origin/*" --tags
git checkout -q --detach "$3" || exit 3
"""
COMMIT_MISSING_STATUS = 3
# A program for `sh -c` that installs git where it is missing, as root.
INSTALL_GIT = "command -v git >/dev/null || (apt-get update && apt-get install -y --no-install-recommends git)"
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
# Git's options in a folder whose repository could have been made by code: it starts no program and writes nothing.
PASSIVE = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "safe.bareRepository=explicit")
# Settings of a repository for which `git status` could still start a program.
STARTS_PROGRAMS = re.compile(r"^(local|worktree)\s.*(filter|promisor|partialclone)", re.MULTILINE | re.IGNORECASE)


def hide_credentials(text: str) -> str:
    """Return the text with the user and password of each URL hidden. Git and servers quote URLs in messages."""
    return re.sub(r"://[^\s'\"]*@", "://***@", text)


def build_environment(token: SecretStr | None, base: Mapping[str, str] = {}) -> dict[str, str]:
    """Return `base` with variables that sign git in and turn its prompts off.

    The token is not on the command line. In a sandbox only git sees it, and git ends before code runs.
    """
    environment = {**base, "GIT_TERMINAL_PROMPT": "0"}
    if token is None:
        return environment
    number = int(base.get("GIT_CONFIG_COUNT") or 0)
    # GitHub, GitLab and Bitbucket accept any user name with a token. All their manuals show this name.
    basic = base64.b64encode(f"x-access-token:{token.get_secret_value()}".encode()).decode()
    return {
        **environment,
        "GIT_CONFIG_COUNT": str(number + 1),
        f"GIT_CONFIG_KEY_{number}": "http.extraHeader",
        f"GIT_CONFIG_VALUE_{number}": f"Authorization: Basic {basic}",
    }


async def run_git(*arguments: str, token: SecretStr | None = None, timeout: float = ANSWER_TIMEOUT_SECONDS) -> str:
    """Run git on the host and return its output. Raises ConfigurationError with git's error output."""
    action = arguments[2] if arguments[0] == "-C" else arguments[0]
    environment = build_environment(token, {**os.environ, "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"})
    try:
        # In the working directory git would obey the configuration of a repository there, which can start programs.
        # Code can turn a directory into a repository with four plain files. So git runs in `/`.
        done = await run_command("git", *arguments, timeout=timeout, environment=environment, cwd="/")
    except FileNotFoundError as error:
        raise ConfigurationError("repo_url needs git, which is not on the PATH: install git on this machine") from error
    except TimeoutError:
        raise ConfigurationError(
            f"git {action} did not end within {timeout:.0f} s: check the repository's server"
        ) from None
    if done.returncode:
        raise ConfigurationError(f"git {action} failed: {hide_credentials(done.stderr.strip())[-1000:]}")
    return done.stdout


async def describe_checkout() -> str:
    """Return the commit that is checked out in the working directory, and if tracked files differ. Empty if unknown."""
    commit = ""
    with suppress(ConfigurationError, OSError):  # There may be no commit, or no working directory.
        git = partial(run_git, "-C", os.getcwd(), *PASSIVE, timeout=CHECKOUT_TIMEOUT_SECONDS)
        commit = (await git("rev-parse", "--verify", "HEAD")).strip()
        if not STARTS_PROGRAMS.search(await git("config", "--list", "--name-only", "--show-scope")):
            changes = await git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
            return f"{commit}, with changes" if changes else commit
    return commit and f"{commit}, perhaps with changes"


async def resolve_commit(url: str, ref: str | None, token: SecretStr | None) -> str:
    """Return the commit of a branch or a tag, or that of HEAD without `ref`. A full commit id is returned unchanged."""
    if ref is not None and COMMIT_PATTERN.fullmatch(ref):
        return ref
    check_repository(url)
    lines = (await run_git("ls-remote", "--", url, token=token)).splitlines()
    commits: dict[str, str] = {}
    for line in lines:
        commit, _, name = line.partition("\t")
        commits[name] = commit
    names = ["HEAD"]
    if ref is not None:
        # An annotated tag is a separate object, and ^{} names the commit that it points to.
        names = [f"refs/heads/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", ref]
    for name in names:
        if name in commits:
            return commits[name]
    branches = ", ".join(name.removeprefix("refs/heads/") for name in commits if name.startswith("refs/heads/"))
    raise ConfigurationError(
        f"the repository {url} has no branch or tag {ref or 'HEAD'!r} (its branches: {branches[:500] or 'none'}); a "
        "commit is named by all of its 40 digits"
    )
