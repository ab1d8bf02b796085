"""The container engines on this machine, their properties, and the reasons for their failures."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Literal

from ...sandbox.errors import ConfigurationError, SandboxStartError
from ...sandbox.outcomes.text_escape import escape_text
from ..subprocess_runner import run_command

ENGINES = ("podman", "docker")  # Order of `auto`: Podman needs no daemon, which would run as root.
ANSWER_SECONDS = 30.0
# Working directory of clients. In a writable directory Podman's conmon would leave a file `oom`.
CLIENT_DIRECTORY = "/proc" if os.path.isdir("/proc") else "/"
# Each setting maps to Podman's name of the controller and Docker's name of the property.
CONTROLLERS = {
    "memory_mib": ("memory", "MemoryLimit"), "processes": ("pids", "PidsLimit"), "cpus": ("cpu", "CpuCfsQuota"),
}  # fmt: skip
# Exit statuses of the engine: it failed, it cannot run the program, or the program is missing. Other exit statuses
# come from the program.
ENGINE_STATUSES = (125, 126, 127)
INSTALL_HINT = "install Podman (apt install podman, brew install podman) or Docker, and start its machine or daemon"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answers. `name` is the kind of its command line. `is_local` is True if it uses this kernel."""

    program: str
    name: str
    version: str
    runtime: str  # the default runtime
    cgroup_version: str  # "1" or "2"
    is_rootless: bool
    is_local: bool
    limits: tuple[str, ...]  # the settings that its cgroups can enforce, as the engine reports

    async def run(self, *words: str, timeout: float = ANSWER_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run one of its commands. Raise ConfigurationError if it does not end within `timeout` seconds."""
        try:
            return await run_command(self.program, *words, timeout=timeout, cwd=CLIENT_DIRECTORY)
        except TimeoutError:
            raise ConfigurationError(
                f"`{self.name} {words[0]}` did not end within {timeout:g} s: check the engine with `{self.name} info`"
            ) from None

    def describe(self) -> str:
        """Describe the engine in a line: version, privileges, runtime and cgroups."""
        rights = "rootless" if self.is_rootless else "with root's rights"
        limits = ", ".join(self.limits) or "nothing"
        return f"{self.name} {self.version} ({rights}, {self.runtime}, cgroup v{self.cgroup_version} for {limits})"


_engines: dict[tuple[str, ...], Engine] = {}  # engines that have answered this process


async def find_engine(name: Literal["auto", "podman", "docker"]) -> Engine:
    """Return the engine of that name, or the first that answers. Raise ConfigurationError if none answers."""
    reasons: list[str] = []
    for candidate in ENGINES if name == "auto" else (name,):
        found = await ask_engine(candidate)
        if isinstance(found, Engine):
            return found
        reasons.append(f"{candidate}: {found}")
    raise ConfigurationError(f"no container engine answers ({'; '.join(reasons)}): {INSTALL_HINT}")


async def list_engines(name: Literal["auto", "podman", "docker"]) -> list[Engine]:
    """Return all engines that answer among those that `name` selects. Raise ConfigurationError if none answers."""
    answers = [await ask_engine(candidate) for candidate in (ENGINES if name == "auto" else (name,))]
    return [answer for answer in answers if isinstance(answer, Engine)] or [await find_engine(name)]


async def ask_engine(name: str) -> Engine | str:
    """Return the engine of that name, or the reason why it is unavailable, such as a client without a server."""
    program = shutil.which(name)
    if program is None:
        return "it is not on the PATH"
    key = (program, *(os.environ.get(variable, "") for variable in ("DOCKER_HOST", "CONTAINER_HOST", "DOCKER_CONTEXT")))
    if key not in _engines:
        try:
            done = await run_command(program, "info", "--format", "{{json .}}", timeout=ANSWER_SECONDS)
        except TimeoutError:
            return f"it did not answer within {ANSWER_SECONDS:g} s"
        except OSError as error:
            return f"{program} could not be started ({error.strerror})"
        try:
            _engines[key] = _read_info(program, json.loads(done.stdout))
        except (ValueError, KeyError, TypeError) as error:
            no_server = str(error) if isinstance(error, NoServerError) else ""
            return no_server or get_last_line(done.stderr) or f"its server does not answer (status {done.returncode})"
    return _engines[key]


class NoServerError(ValueError):
    """An answer of a client that has no server. The message is the client's complaint."""


def _read_info(program: str, info: dict[str, Any]) -> Engine:
    """Build the engine from its description. Raise KeyError, TypeError or ValueError if the description is invalid."""
    if "host" in info:  # Podman, even under another name
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


def get_last_line(text: str) -> str:
    """Return the last line of a program's standard error, which is the reason for its failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return escape_text(lines[-1][-1000:]).removeprefix("Error: ") if lines else ""


def describe_end(status: int | None, stderr: str) -> str:
    """Describe how the engine's client for a container ended, with its error message."""
    words = get_last_line(stderr)
    if status is not None and status < 0:
        return f"the engine's client was killed by signal {-status}"
    end = "its container has ended" + (f" with status {status}" if status else "")
    return f"{end}: {words}" if words else end


def make_start_error(sandbox_id: str, status: int | None, stderr: str) -> SandboxStartError:
    """Make the error for a container whose driver did not start."""
    return SandboxStartError(f"the driver did not start in container {sandbox_id}: {describe_end(status, stderr)}")
