"""The container engines on this machine, and the reasons for their failures."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Literal

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from ..subprocess_runner import run_command

ENGINES = ("podman", "docker")  # Order of `auto`: Podman needs no daemon, which would run as root.
ANSWER_SECONDS = 30.0
# Working directory of clients. In a writable directory Podman's conmon would leave a file `oom`.
CLIENT_DIRECTORY = "/proc" if os.path.isdir("/proc") else "/"
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

    async def run(self, *words: str, timeout: float = ANSWER_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine. Raise ConfigurationError if the command lasts longer than `timeout` seconds."""
        try:
            return await run_command(self.program, *words, timeout=timeout, cwd=CLIENT_DIRECTORY)
        except TimeoutError:
            raise ConfigurationError(
                f"`{self.name} {words[0]}` did not end within {timeout:g} s: check the engine with `{self.name} info`"
            ) from None


_engines: dict[str, Engine] = {}  # engines that have answered this process, by their programs


async def find_engine(name: Literal["auto", "podman", "docker"]) -> Engine:
    """Return the engine of that name, or the first that answers. Raise ConfigurationError if none answers."""
    return (await list_engines(name, most=1))[0]


async def list_engines(name: Literal["auto", "podman", "docker"], most: int = len(ENGINES)) -> list[Engine]:
    """Return at most `most` engines that `name` selects and that answer. Raise ConfigurationError if none answers."""
    engines: list[Engine] = []
    reasons: list[str] = []
    for candidate in ENGINES if name == "auto" else (name,):
        try:
            engines.append(await _ask_engine(candidate))
        except (OSError, ValueError, LookupError, TypeError) as error:
            reasons.append(f"{candidate}: {error}")
        if len(engines) == most:
            break
    if not engines:
        raise ConfigurationError(f"no container engine answers ({'; '.join(reasons)}): {INSTALL_HINT}")
    return engines


async def _ask_engine(name: str) -> Engine:
    """Return the engine of that name, after asking it once per process.

    Raise OSError if the client is missing, and ValueError, LookupError or TypeError if its server does not answer.
    """
    program = shutil.which(name)
    if program is None:
        raise FileNotFoundError("it is not on the PATH")
    if program not in _engines:
        try:
            done = await run_command(program, "info", "--format", "{{json .}}", timeout=ANSWER_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"it did not answer within {ANSWER_SECONDS:g} s") from None
        if not done.stdout.strip().startswith("{"):
            raise ValueError(get_last_line(done.stderr) or f"its server does not answer (status {done.returncode})")
        _engines[program] = _read_info(program, json.loads(done.stdout))
    return _engines[program]


def _read_info(program: str, info: dict[str, Any]) -> Engine:
    """Build the engine from its description. Raise KeyError, TypeError or ValueError if the description is invalid."""
    if "host" in info:  # Podman, even under another name
        host = info["host"]
        return Engine(
            program,
            name="podman",
            version=str(info["version"]["Version"]),
            runtime=str(host["ociRuntime"]["name"]),
            cgroup_version=str(host["cgroupVersion"]).removeprefix("v"),
            is_rootless=bool(host["security"]["rootless"]),
            is_local=not host.get("serviceIsRemote"),
        )
    if not info.get("ServerVersion"):
        errors = info.get("ServerErrors") or ["its server does not answer"]
        raise ValueError("; ".join(str(error) for error in errors))
    return Engine(
        program,
        name="docker",
        version=str(info["ServerVersion"]),
        runtime=str(info.get("DefaultRuntime") or "runc"),
        cgroup_version=str(info.get("CgroupVersion") or "1").removeprefix("v"),
        is_rootless=any("rootless" in str(option) for option in info.get("SecurityOptions") or ()),
        is_local=info.get("KernelVersion") == os.uname().release,
    )


def get_last_line(text: str) -> str:
    """Return the last line of a program's standard error, which is the reason for its failure."""
    lines = text.strip().splitlines()
    return escape_text(lines[-1].strip()[-1000:]).removeprefix("Error: ") if lines else ""


def describe_end(status: int, stderr: str) -> str:
    """Describe how the engine's client for a container ended, with its error message."""
    if status < 0:
        return f"the engine's client was killed by signal {-status}"
    reason = get_last_line(stderr)
    end = f"its container has ended with status {status}" if status else "its container has ended"
    return f"{end}: {reason}" if reason else end
