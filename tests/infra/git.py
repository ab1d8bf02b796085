"""Commits to repositories of tests."""

import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")


def commit_all(folder: Path, message: str = "more") -> str:
    """Commit all files of a folder, which becomes a repository, and return the commit."""
    git = ["git", "-C", str(folder), *IDENTITY]
    for words in (["init", "--quiet"], ["add", "-A"], ["commit", "--quiet", "--allow-empty", "-m", message]):
        subprocess.run([*git, *words], check=True, timeout=60)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
