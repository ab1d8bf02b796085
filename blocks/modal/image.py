"""The image of Modal sandboxes, built once per process."""

import modal

from ...sandbox.errors import ConfigurationError
from .account import get_account_key, make_once, open_account
from .errors import get_last_line, map_error
from .settings import PYTHON, ModalSettings

INSTALL_GIT = "command -v git || (apt-get update && apt-get install -y --no-install-recommends git)"


async def build_image(settings: ModalSettings) -> modal.Image:
    """Build the image with its packages and return it. Raise the errors of `SandboxProvider.open`."""

    async def make() -> modal.Image:
        account = await open_account(settings)
        try:
            if settings.image is None:
                image = modal.Image.debian_slim(python_version=PYTHON)
            else:
                image = modal.Image.from_registry(settings.image)
            if settings.packages:
                image = image.pip_install(*settings.packages)
            if settings.repo_url is not None:
                image = image.run_commands(INSTALL_GIT)
            return await image.build.aio(account.app)
        except modal.exception.ImageBuildError as error:
            raise ConfigurationError(
                f"the image could not be built: {get_last_line(error)}; correct `image` or `packages` "
                f"(its log: modal image logs {getattr(error, 'image_id', 'IMAGE_ID')})"
            ) from error
        except modal.exception.Error as error:
            raise map_error(error, "the image could not be loaded") from error

    contents = (settings.image, tuple(settings.packages), settings.repo_url is not None)
    return await make_once(("image", *get_account_key(settings), *contents), make)
