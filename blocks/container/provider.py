"""The container provider: it runs sandboxes as containers of an engine on this machine."""

import shlex
from typing import Any, ClassVar

from ...sandbox.errors import SandboxLost
from ..host_terminal import SHELL, run_in_terminal
from ..provider import SandboxInfo, SandboxProvider
from ..storage.local_volume import LocalVolume, find_volume, find_volumes_root, list_volumes
from .command import repeat_option
from .creation import check_consent, check_mounts, create_container
from .deletion import delete_container, find_container, list_containers
from .engine import find_engine, list_engines
from .handle import ContainerHandle
from .image import find_image
from .launch import CWD
from .probe import ensure_ready
from .settings import ContainerSettings


class ContainerProvider(ContainerSettings, SandboxProvider):
    """The provider for containers of Docker and Podman."""

    provider_name: ClassVar[str] = "container"
    gradual: ClassVar[bool] = False
    binds_mounts: ClassVar[bool] = True
    result_settings: ClassVar[tuple[str, ...]] = ("image", "network")

    async def open(self, labels: dict[str, str]) -> ContainerHandle:
        """Open a sandbox. Raise ConfigurationError if no engine answers, or the first one cannot run the image."""
        engine = await find_engine(self.engine)
        commit = await self.commit()
        return await create_container(self, engine, labels, commit, self._files, can_stay=self._keeps_failed)

    async def check(self) -> str:
        """Describe the engine. If the image is already here, run it and describe its limits too."""
        check_consent(self)
        engine = await find_engine(self.engine)
        check_mounts(self._files.mounts, engine)
        rights = "rootless" if engine.is_rootless else "with root's rights"
        text = f"{engine.name} {engine.version} ({rights}, {engine.runtime}, cgroup v{engine.cgroup_version})"
        if not await find_image(engine, self.image):
            return f"{text}; the image {self.image} is pulled when the first sandbox is opened"
        ready = await ensure_ready(self, engine, self.labels(""))
        return (
            f"{text}; {ready.image} with Python {ready.python} ({', '.join(ready.layers)}); for a sandbox "
            f"as a whole: {', '.join(ready.limits)}"
        )

    async def describe_sandboxes(self) -> str:
        return f"in containers ({(await find_engine(self.engine)).name})"

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """List the containers with this package's label, of the named engine or of every engine that answers."""
        infos: list[SandboxInfo] = []
        for engine in await list_engines(self.engine):
            infos += await list_containers(engine)
        return infos

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        return await delete_container(await list_engines(self.engine), sandbox_id)

    async def open_terminal(self, sandbox_id: str) -> int:
        """Open a shell with the engine's `exec`. Raise RlmBatchError."""
        # The client takes the values from its own environment, so that no command line has them.
        values = self.reveal_environment()
        options = repeat_option("--env", [f"HOME={CWD}", "TERM", *values])
        for engine in await list_engines(self.engine):
            container = await find_container(engine, sandbox_id)
            if container is not None:
                command = [engine.program, "exec", "-it", "--workdir", CWD, *options, container, *SHELL]
                return await run_in_terminal(command, shlex.join(command), environment=values)
        raise SandboxLost(f"the container {sandbox_id} is gone")

    async def list_volumes(self) -> list[str]:
        return list_volumes(self.volume_root)

    async def fingerprint(self) -> dict[str, Any]:
        """Return the common settings and the volume's root, but no limits, because limits do not change results."""
        settings = await super().fingerprint()
        if self.volume_name is not None:  # A volume of this name below another root is a different volume.
            settings["volume"] += [str(find_volumes_root(self.volume_root))]
        return settings

    async def open_volume(self, name: str) -> LocalVolume:
        return find_volume(self.volume_root, name)
