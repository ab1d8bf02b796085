"""The deletion of containers by their names, and the list of containers with this package's label."""

import json
import re
import uuid

from ...sandbox.errors import ConfigurationError, RlmBatchError
from ..provider import MANAGED_LABELS, SandboxInfo
from .engine import Engine, get_last_line

NAME_PREFIX = "rlm-batch-"
NAME = re.compile(NAME_PREFIX + "[0-9a-f]{16}")
KEPT_SUFFIX = ".kept-"  # between the name of a kept container and the epoch seconds until which it is kept
EXECUTION_SUFFIX = ".execution-"  # between these seconds and the number of its failed execution
REMOVE_SECONDS = 60.0
((LABEL, LABEL_VALUE),) = MANAGED_LABELS.items()


def make_name() -> str:
    """Make a name for a new container. It serves as the sandbox's id."""
    return f"{NAME_PREFIX}{uuid.uuid4().hex[:16]}"


async def list_containers(engine: Engine) -> list[SandboxInfo]:
    """List the containers that carry this package's label, running or not."""
    infos: list[SandboxInfo] = []
    for _, full_name, labels in await _find(engine, f"label={LABEL}={LABEL_VALUE}"):
        name, is_kept, rest = full_name.partition(KEPT_SUFFIX)  # Only the name of a container can change.
        if is_kept:
            until, _, execution = rest.partition(EXECUTION_SUFFIX)
            labels |= {"rlm-batch-kept": until, "rlm-batch-execution": execution}
        infos.append(SandboxInfo(name, labels))
    return infos


async def mark_as_kept(engine: Engine, name: str, until: float, execution: int | None) -> None:
    """Rename a container so that `list_containers` shows it as kept. Raise RlmBatchError."""
    number = "" if execution is None else f"{EXECUTION_SUFFIX}{execution}"
    done = await engine.run("rename", name, f"{name}{KEPT_SUFFIX}{until:.0f}{number}")
    if done.returncode:
        raise RlmBatchError(f"the container {name} could not be renamed: {get_last_line(done.stderr)}")


async def find_container(engine: Engine, sandbox_id: str) -> str | None:
    """Return the container's id at the engine; None if it is gone or has not this package's label."""
    containers = await _find(engine, f"name={sandbox_id}")
    return next((found for found, name, _ in containers if name.partition(KEPT_SUFFIX)[0] == sandbox_id), None)


async def delete_container(engines: list[Engine], sandbox_id: str) -> bool:
    """Remove a container by its name, with all its processes. Return False if it is missing.

    A container without this package's label is left alone, whatever its name. Raise ConfigurationError or
    RlmBatchError.
    """
    if NAME.fullmatch(sandbox_id) is None:
        raise ConfigurationError(f"{sandbox_id!r} is not a container of rlm-batch: their ids begin with {NAME_PREFIX}")
    for engine in engines:
        container = await find_container(engine, sandbox_id)
        if container is not None:
            await remove_container(engine, container, sandbox_id)
            return True
    return False


async def remove_container(engine: Engine, container: str, sandbox_id: str) -> None:
    """Remove a container that has this package's label. Raise RlmBatchError if that fails."""
    # Without `--time 0`, Podman waits ten seconds for a process that ignores signals.
    at_once = ["--time", "0"] if engine.name == "podman" else []
    command = ("rm", "--force", *at_once, "--volumes", container)
    done = await engine.run(*command, timeout=REMOVE_SECONDS)
    if done.returncode and await _inspect(engine, [container]):
        # If Podman's monitor (conmon) was killed, the first attempt only records that the container has ended.
        done = await engine.run(*command, timeout=REMOVE_SECONDS)
    if done.returncode and await _inspect(engine, [container]):
        raise RlmBatchError(
            f"the container {sandbox_id} could not be removed: {get_last_line(done.stderr)}. Reap again later"
        )


async def _find(engine: Engine, condition: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the id, name and labels of the containers that meet the condition and carry this package's label."""
    done = await engine.run("ps", "--all", "--quiet", "--no-trunc", "--filter", condition)
    if done.returncode:
        raise RlmBatchError(f"the containers of {engine.name} could not be listed: {get_last_line(done.stderr)}")
    ids = done.stdout.split()
    return await _inspect(engine, ids) if ids else []


async def _inspect(engine: Engine, names: list[str]) -> list[tuple[str, str, dict[str, str]]]:
    """Return the id, name and labels of the existing containers that carry this package's label."""
    done = await engine.run("container", "inspect", *names)
    try:
        containers = json.loads(done.stdout or "[]")  # Containers that are gone are missing here.
        told = [(item["Id"], item["Name"].removeprefix("/"), item["Config"]["Labels"] or {}) for item in containers]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RlmBatchError(f"{engine.name} could not describe its containers: {get_last_line(done.stderr)}") from None
    return [item for item in told if item[2].get(LABEL) == LABEL_VALUE]
