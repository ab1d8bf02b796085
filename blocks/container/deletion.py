"""How a container is removed: one whose client is ours by its wire, and others by their labels."""

import json
import re
import uuid

from ...sandbox.errors import ConfigurationError, RlmBatchError
from ..provider import MANAGED_LABELS, SandboxInfo
from .engine import Engine
from .errors import get_last_line

NAME_PREFIX = "rlm-batch-"
NAME = re.compile(NAME_PREFIX + "[0-9a-f]{16}")
REMOVE_SECONDS = 60.0
((LABEL, LABEL_VALUE),) = MANAGED_LABELS.items()


def make_name() -> str:
    """The name of a new container, which is its id for us."""
    return f"{NAME_PREFIX}{uuid.uuid4().hex[:16]}"


async def list_containers(engine: Engine) -> list[SandboxInfo]:
    """The containers that carry our labels, running or not."""
    done = await engine.run("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={LABEL_VALUE}")
    if done.returncode:
        raise RlmBatchError(f"the containers of {engine.name} could not be listed: {get_last_line(done.stderr)}")
    ids = done.stdout.split()
    return [SandboxInfo(name, labels) for _, name, labels in (await _inspect(engine, ids) if ids else ())]


async def delete_container(engines: list[Engine], sandbox_id: str) -> None:
    """Removes a container of ours by its name, with all that runs in it; one that has gone is no error.

    A container that does not carry our label is left alone, whatever it is called. Raises ConfigurationError and
    RlmBatchError.
    """
    if NAME.fullmatch(sandbox_id) is None:
        raise ConfigurationError(f"{sandbox_id!r} is no id of a container of ours: they begin with {NAME_PREFIX}")
    for engine in engines:
        for container_id, name, _labels in await _inspect(engine, [sandbox_id]):
            if name == sandbox_id:
                await remove_container(engine, container_id, sandbox_id)


async def remove_container(engine: Engine, container: str, sandbox_id: str) -> None:
    """Removes a container that is known to be ours. Raises RlmBatchError where it is left."""
    at_once = ["--time", "0"] if engine.name == "podman" else []  # without, it gives ten seconds to what is deaf
    command = ("rm", "--force", *at_once, "--volumes", container)
    done = await engine.run(*command, timeout=REMOVE_SECONDS)
    if done.returncode and await _inspect(engine, [container]):
        # Podman's first try only notes that the container has ended, where what watched over it (conmon) was killed.
        done = await engine.run(*command, timeout=REMOVE_SECONDS)
    if done.returncode and await _inspect(engine, [container]):
        raise RlmBatchError(
            f"the container {sandbox_id} could not be removed: {get_last_line(done.stderr)}. Reap again later"
        )


async def _inspect(engine: Engine, names: list[str]) -> list[tuple[str, str, dict[str, str]]]:
    """The id, the name and the labels of those that are there and carry our label."""
    done = await engine.run("container", "inspect", *names)
    try:
        containers = json.loads(done.stdout or "[]")  # without those that have gone meanwhile
        told = [(item["Id"], item["Name"].removeprefix("/"), item["Config"]["Labels"] or {}) for item in containers]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RlmBatchError(
            f"{engine.name} does not say what its containers are: {get_last_line(done.stderr)}"
        ) from None
    return [item for item in told if item[2].get(LABEL) == LABEL_VALUE]
