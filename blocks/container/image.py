"""The image of containers: pulled if it is missing, and built once if packages are added."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

from ...sandbox.errors import ConfigurationError
from ..setup_commands import PYTHON_FOR_PIP, build_image_command
from ..worker_consent import check_network
from .command import build_ulimits
from .engine import Engine, get_last_line
from .settings import DEFAULT_IMAGE, ContainerSettings

BUILD_SECONDS = 1800.0
BUILT_REPOSITORY = "localhost/rlm-batch-packages"
PIP_SECRET = "pip"  # name of the build secret with pip's credentials; the image and its history do not contain them
# pip's settings of package sources. Settings that name files of this machine are excluded.
INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")


async def find_image(engine: Engine, image: str) -> str:
    """Return the id of an image in the engine's store, or "" if it is missing."""
    done = await engine.run("image", "inspect", "--format", "{{.Id}}", image)
    return "" if done.returncode else done.stdout.strip()


async def ensure_image(settings: ContainerSettings, engine: Engine) -> str:
    """Return the name of the image with the set-up and packages, after pulling and building what is missing.

    Raise ConfigurationError.
    """
    identity = await find_image(engine, settings.image)
    if not identity:
        done = await engine.run("pull", "--quiet", settings.image, timeout=settings.start_timeout)
        if done.returncode:
            raise ConfigurationError(
                f"{engine.name} has no image {settings.image} and could not pull it: {get_last_line(done.stderr)}. "
                "Set `image` to another, or pull, build or load it"
            )
        identity = await find_image(engine, settings.image)
    if not settings.packages and settings.setup is None:
        return settings.image
    if settings.setup is not None:
        check_network("to run setup")
    elif settings.image != DEFAULT_IMAGE:
        check_network("to install packages")
    content = "\0".join([identity, settings.setup or "", *sorted(settings.packages)])
    name = f"{BUILT_REPOSITORY}:{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    if not await find_image(engine, name):
        await _build(settings, engine, name)
    return name


async def list_image_volumes(engine: Engine, image: str) -> list[str]:
    """List the directories that the image declares as volumes. An engine would create them without a size limit."""
    done = await engine.run("image", "inspect", "--format", "{{json .Config.Volumes}}", image)
    try:
        return sorted(json.loads(done.stdout) or {})
    except ValueError:
        return []


async def _build(settings: ContainerSettings, engine: Engine, name: str) -> None:
    """Build the image with its set-up and packages, or raise ConfigurationError with the build's last lines."""
    with tempfile.TemporaryDirectory(prefix="rlm-batch.build-") as folder:
        Path(folder, "Containerfile").write_text(_format_containerfile(settings), encoding="utf-8")
        Path(folder, "context").mkdir()
        secret = Path(folder, "pip.conf")
        secret.touch(0o600)
        secret.write_text(_format_pip_settings(), encoding="utf-8")
        words = ["--secret", f"id={PIP_SECRET},src={secret}", "--file", f"{folder}/Containerfile"]
        if engine.name == "podman":
            words += ["--pull=never", *build_ulimits(engine)]
        done = await engine.run(
            "build", "--quiet", "--network", "host", "--tag", name, *words, f"{folder}/context", timeout=BUILD_SECONDS
        )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-10:]
        content = "the packages" if settings.setup is None else "setup and the packages"
        raise ConfigurationError(
            f"{content} could not be installed into {settings.image}, from wheels alone: " + "\n".join(lines)
        )


def _format_containerfile(settings: ContainerSettings) -> str:
    lines = [f"FROM {settings.image}", "USER 0"]
    if settings.setup is not None:
        lines.append(f"RUN {build_image_command(settings.setup)}")
    if settings.packages:
        # Only wheels are allowed, because pip runs no code from them.
        install = [*PYTHON_FOR_PIP, "-I", "-m", "pip", "install", "--no-cache-dir", "--only-binary", ":all:", "--"]
        mount = f"--mount=type=secret,id={PIP_SECRET},target=/etc/pip.conf"
        lines.append(f"RUN {mount} {json.dumps([*install, *sorted(settings.packages)])}")
    return "\n".join([*lines, "LABEL managed-by=rlm-batch", ""])


def _format_pip_settings() -> str:
    """Return a pip.conf with the package sources of this process's environment."""
    lines = ["[global]"]
    for variable in INDEX_VARIABLES:
        if os.environ.get(variable):
            option = variable.removeprefix("PIP_").lower().replace("_", "-")
            lines.append(f"{option} = {os.environ[variable]}")
    return "\n".join([*lines, ""])
