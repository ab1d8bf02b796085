"""Container engines on this machine: which of them answer, and what each says of itself."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Literal

from ...sandbox.errors import ConfigurationError
from ..subprocess_runner import run_command
from .errors import get_last_line

ENGINES = ("podman", "docker")  # in the order of auto: the first needs no daemon, and with it no one's root
ANSWER_SECONDS = 30.0
# Where clients run: conmon, which Podman starts, would leave a file `oom` in a directory that it can write.
CLIENT_DIRECTORY = "/proc" if os.path.isdir("/proc") else "/"
# By setting: the controller as Podman names it, and what Docker says of it.
CONTROLLERS = {
    "memory_mib": ("memory", "MemoryLimit"), "processes": ("pids", "PidsLimit"), "cpus": ("cpu", "CpuCfsQuota"),
}  # fmt: skip
INSTALL_HINT = "install Podman (apt install podman, brew install podman) or Docker, and start its machine or daemon"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that has answered. `name` is whose command line it speaks, `is_local` whether it is on this kernel."""

    program: str
    name: str
    version: str
    runtime: str  # its default one
    cgroup_version: str  # 1 or 2
    is_rootless: bool
    is_local: bool
    limits: tuple[str, ...]  # the settings that its control groups can hold, as it says itself

    async def run(self, *words: str, timeout: float = ANSWER_SECONDS) -> subprocess.CompletedProcess[str]:
        """One of its commands. Raises ConfigurationError where it does not end within `timeout` seconds."""
        try:
            return await run_command(self.program, *words, timeout=timeout, cwd=CLIENT_DIRECTORY)
        except TimeoutError:
            raise ConfigurationError(f"{self.name} {words[0]} did not end within {timeout:g} s: is it well?") from None

    def describe(self) -> str:
        """What it is, in a line: its version, whose rights it has, its runtime and the version of control groups."""
        rights = "rootless" if self.is_rootless else "with root's rights"
        limits = ", ".join(self.limits) or "nothing"
        return f"{self.name} {self.version} ({rights}, {self.runtime}, cgroup v{self.cgroup_version} for {limits})"


_engines: dict[tuple[str, ...], Engine] = {}  # those that have answered, for this process


async def find_engine(name: Literal["auto", "podman", "docker"]) -> Engine:
    """The engine of that name, or the first that answers. Raises ConfigurationError where none does."""
    reasons: list[str] = []
    for candidate in ENGINES if name == "auto" else (name,):
        found = await ask_engine(candidate)
        if isinstance(found, Engine):
            return found
        reasons.append(f"{candidate}: {found}")
    raise ConfigurationError(f"no container engine answers ({'; '.join(reasons)}): {INSTALL_HINT}")


async def list_engines(name: Literal["auto", "podman", "docker"]) -> list[Engine]:
    """All that answer, of those that `name` stands for. Raises ConfigurationError where none does."""
    answers = [await ask_engine(candidate) for candidate in (ENGINES if name == "auto" else (name,))]
    return [answer for answer in answers if isinstance(answer, Engine)] or [await find_engine(name)]


async def ask_engine(name: str) -> Engine | str:
    """The engine of that name, or why there is none: a client may be there with nobody who answers it."""
    program = shutil.which(name)
    if program is None:
        return "it is not on the PATH"
    key = (program, *(os.environ.get(variable, "") for variable in ("DOCKER_HOST", "CONTAINER_HOST", "DOCKER_CONTEXT")))
    if key not in _engines:
        try:
            done = await run_command(program, "info", "--format", "{{json .}}", timeout=ANSWER_SECONDS)
        except TimeoutError:
            return f"it has not answered within {ANSWER_SECONDS:g} s"
        except OSError as error:
            return f"{program} could not be started ({error.strerror})"
        try:
            _engines[key] = _read_info(program, json.loads(done.stdout))
        except (ValueError, KeyError, TypeError) as error:
            no_server = str(error) if isinstance(error, NoServerError) else ""
            return no_server or get_last_line(done.stderr) or f"no server answers it (status {done.returncode})"
    return _engines[key]


class NoServerError(ValueError):
    """A client has told of itself, and of no server: the message is what it complained of."""


def _read_info(program: str, info: dict[str, Any]) -> Engine:
    """The engine that says this of itself. Raises KeyError, TypeError or ValueError where it is no such answer."""
    if "host" in info:  # Podman, whatever it is called here
        host = info["host"]
        return Engine(
            program,
            "podman",
            str(info["version"]["Version"]),
            str(host["ociRuntime"]["name"]),
            str(host["cgroupVersion"]).removeprefix("v"),
            bool(host["security"]["rootless"]),
            not host.get("serviceIsRemote"),
            tuple(setting for setting, (name, _) in CONTROLLERS.items() if name in host["cgroupControllers"]),
        )
    if not info.get("ServerVersion"):
        raise NoServerError("; ".join(map(str, info.get("ServerErrors") or ())))
    return Engine(
        program,
        "docker",
        str(info["ServerVersion"]),
        str(info.get("DefaultRuntime") or "runc"),
        str(info.get("CgroupVersion") or "1").removeprefix("v"),
        any("rootless" in str(option) for option in info.get("SecurityOptions") or ()),
        os.uname().release == info.get("KernelVersion"),
        tuple(setting for setting, (_, name) in CONTROLLERS.items() if info.get(name)),
    )
