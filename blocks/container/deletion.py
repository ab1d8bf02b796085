"""The deletion of containers by their names, and the list of containers with this package's label."""

import json
import uuid
from dataclasses import dataclass

from ...sandbox.errors import RlmBatchError
from ..provider import MANAGED_LABELS, SandboxInfo
from .engine import Engine, get_last_line

NAME_PREFIX = "rlm-batch-"
KEPT_SUFFIX = ".kept-"  # between the name of a kept container and the epoch seconds until which it is kept
EXECUTION_SUFFIX = ".execution-"  # between these seconds and the number of its failed execution
REMOVE_SECONDS = 60.0
((LABEL, LABEL_VALUE),) = MANAGED_LABELS.items()


@dataclass(frozen=True, slots=True)
class Container:
    """A container that carries this package's label."""

    engine_id: str
    name: str
    labels: dict[str, str]

    @property
    def sandbox_id(self) -> str:
        """Return the container's name without the suffix that `mark_as_kept` appends."""
        return self.name.partition(KEPT_SUFFIX)[0]


def make_name() -> str:
    """Make a name for a new container. It serves as the sandbox's id."""
    return f"{NAME_PREFIX}{uuid.uuid4().hex[:16]}"


async def list_containers(engine: Engine) -> list[SandboxInfo]:
    """List the containers that carry this package's label, running or not."""
    infos: list[SandboxInfo] = []
    for container in await _find(engine, f"label={LABEL}={LABEL_VALUE}"):
        labels = dict(container.labels)
        _, is_kept, suffix = container.name.partition(KEPT_SUFFIX)
        if is_kept:
            until, _, execution = suffix.partition(EXECUTION_SUFFIX)
            labels |= {"rlm-batch-kept": until, "rlm-batch-execution": execution}
        infos.append(SandboxInfo(container.sandbox_id, labels))
    return infos


async def mark_as_kept(engine: Engine, name: str, until: float, execution: int | None) -> None:
    """Rename a container so that `list_containers` shows it as kept. Raise RlmBatchError."""
    # The labels of a container cannot change, only its name.
    new_name = f"{name}{KEPT_SUFFIX}{until:.0f}"
    if execution is not None:
        new_name += f"{EXECUTION_SUFFIX}{execution}"
    done = await engine.run("rename", name, new_name)
    if done.returncode:
        raise RlmBatchError(f"the container {name} could not be renamed: {get_last_line(done.stderr)}")


async def find_container(engine: Engine, sandbox_id: str) -> str | None:
    """Return the engine's id of a container; None if it is gone or does not carry this package's label."""
    for container in await _find(engine, f"name={sandbox_id}"):
        if container.sandbox_id == sandbox_id:
            return container.engine_id
    return None


async def delete_container(engines: list[Engine], sandbox_id: str) -> bool:
    """Remove a container by its name, with all its processes. Return False if it is missing.

    A container without this package's label counts as missing. Raise RlmBatchError.
    """
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


async def _find(engine: Engine, condition: str) -> list[Container]:
    """Return the containers that meet the engine's filter `condition` and carry this package's label."""
    done = await engine.run("ps", "--all", "--quiet", "--no-trunc", "--filter", condition)
    if done.returncode:
        raise RlmBatchError(f"the containers of {engine.name} could not be listed: {get_last_line(done.stderr)}")
    ids = done.stdout.split()
    return await _inspect(engine, ids) if ids else []


async def _inspect(engine: Engine, names: list[str]) -> list[Container]:
    """Return those of the named containers that exist and carry this package's label."""
    done = await engine.run("container", "inspect", *names)
    try:
        items = json.loads(done.stdout or "[]")  # Containers that are gone are missing here.
        containers = [
            Container(item["Id"], item["Name"].removeprefix("/"), item["Config"]["Labels"] or {}) for item in items
        ]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RlmBatchError(f"{engine.name} could not describe its containers: {get_last_line(done.stderr)}") from None
    return [container for container in containers if container.labels.get(LABEL) == LABEL_VALUE]
