"""The image of Modal sandboxes, built once per process."""

import logging
import shlex

import modal

from .. import git as repository
from ..setup_commands import build_image_command
from .account import make_once, open_account
from .errors import convert_errors, get_last_line
from .settings import PYTHON, ModalSettings

log = logging.getLogger("rlm_batch.modal")


async def build_image(settings: ModalSettings) -> modal.Image:
    """Build the image with its set-up and packages and return it. Raise the errors of `SandboxProvider.open`."""

    async def make() -> modal.Image:
        account = await open_account(settings)
        with convert_errors("the image could not be built"):
            if settings.image:
                image = modal.Image.from_registry(settings.image)
            else:
                image = modal.Image.debian_slim(python_version=PYTHON)
            if settings.setup is not None:
                image = image.run_commands(build_image_command(settings.setup))
            if settings.packages:
                image = image.pip_install(*settings.packages)
            if settings.repo_url is not None:
                image = image.run_commands(repository.INSTALL_GIT)
            return await image.build.aio(account.app)

    contents = (settings.image, settings.setup, tuple(settings.packages), settings.repo_url is not None)
    return await make_once(settings, ("image", *contents), make)


async def add_clone_to_image(settings: ModalSettings, image: modal.Image, commit: str) -> modal.Image | None:
    """Return an image with the repository's clone in it, built once per commit; None if it cannot be built.

    The image does not contain the token, which only git gets during the build, in its environment.
    """

    async def make() -> modal.Image | None:
        account = await open_account(settings)
        program = "; ".join(repository.FETCH_COMMIT.strip().splitlines())
        command = shlex.join(["sh", "-c", program, "clone", settings.workdir, settings.repo_url or "", commit])
        token = modal.Secret.from_dict(dict(repository.build_environment(settings.repo_token)))
        try:
            return await image.run_commands(command, secrets=[token]).build.aio(account.app)
        except modal.exception.Error as error:
            log.warning(
                "every sandbox clones the repository, because no image with it was built: %s", get_last_line(error)
            )
            return None

    return await make_once(settings, ("clone", image.object_id, settings.repo_url, commit), make)
