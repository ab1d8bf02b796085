"""The repository's clone in a sandbox of Modal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sandbox.errors import SandboxStartError
from .. import git as repository
from .calls import retry_refused
from .errors import map_error
from .settings import ModalSettings

if TYPE_CHECKING:
    import modal

CLONE_SECONDS = 600

CLONE = """
set -e
mkdir -p "$1"
cd "$1"
git init -q
git remote add origin "$2"
git fetch -q --depth 1 origin "$3" || git fetch -q origin "+refs/heads/*:refs/remotes/origin/*" --tags
git checkout -q --detach "$3"
"""


async def clone_repository(sandbox: modal.Sandbox, settings: ModalSettings, commit: str) -> None:
    """Clones the repository. The token is in the environment of git alone, which has ended when code runs.

    Raises what `open` raises.
    """
    import modal

    url = settings.repo_url
    assert url is not None
    words = ("sh", "-c", CLONE, "clone", settings.workdir, url, commit)
    environment: dict[str, str | None] = {
        "GIT_TERMINAL_PROMPT": "0",
        **repository.build_sign_in_environment(settings.repo_token),
    }
    try:
        process = await retry_refused(
            lambda: sandbox.exec.aio(*words, text=False, env=environment, timeout=CLONE_SECONDS)
        )
        status = await retry_refused(process.wait.aio)
        if status == 0:
            return
        complaint = (await process.stderr.read.aio()).decode("utf-8", "replace").strip()[-1000:]
    except modal.exception.Error as error:
        raise map_error(error, f"{url} could not be cloned") from error
    raise SandboxStartError(
        f"{url} could not be cloned in the sandbox: {complaint or f'git ended with status {status}'}"
    )
