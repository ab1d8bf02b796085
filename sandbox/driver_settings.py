"""The settings that a driver receives when it starts, and the preparation of a sandbox."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigurationError

PREPARE_TIMEOUT_SECONDS: float = 300  # seconds; imports and loading models take long
KEEP_SECONDS = 3600.0  # seconds for which `keep_failed` keeps a sandbox
STAY_SIGNAL = "USR1"  # tells a driver with `stay_seconds` to run without a host
OUTPUT_CAP_CHARACTERS = 100_000  # characters kept of each stream: some 2,000 lines, small enough for a log or a ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The settings that the driver in a sandbox receives when it starts.

    Attributes:
        cwd: Working directory of the code. A relative path is below the driver's working directory.
        volume: Directory where the volume is mounted; None without a volume.
        environment: Environment variables for the code only.
        temporary: Directories for temporary files. The driver deletes the files that executions leave there.
        path: Directories appended to `sys.path`.
        python_path: Directories placed at the front of `sys.path`.
        executable: Path of the Python that the code's processes start, in a directory like a virtual environment
            (`wire/python_directory.py`). A missing directory is created. None means the driver's own Python.
        heartbeat: Seconds without a frame after which the host or the driver sends a heartbeat. None if both always
            notice the end of the connection.
        silence: Seconds without a frame after which the host or the driver considers the other one dead.
        lifetime: Seconds after which the driver ends on its own.
        stay_seconds: Seconds for which the driver runs without a host after `STAY_SIGNAL`, whatever its lifetime. None
            to ignore the signal.
        confinement: Restrictions that each child applies to itself.
        commit: Command that makes a volume keep saved files. It runs after each execution, before the result is sent.
            Empty if the volume needs none.
        output_cap: Characters kept of each output stream.
        files: Directory for bodies that are too large for the connection; None sends everything over the connection.
    """

    cwd: str
    volume: str | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    temporary: list[str] = field(default_factory=list[str])
    path: list[str] = field(default_factory=list[str])
    python_path: list[str] = field(default_factory=list[str])
    executable: str | None = None
    heartbeat: float | None = 15.0
    silence: float = 90.0
    lifetime: float | None = None
    stay_seconds: float | None = None
    confinement: dict[str, Any] = field(default_factory=dict[str, Any])
    commit: list[str] = field(default_factory=list[str])
    output_cap: int = OUTPUT_CAP_CHARACTERS
    files: str | None = None


@dataclass(frozen=True, slots=True)
class Preparation:
    """Code that runs once in a sandbox, for at most `timeout` seconds. Executions run in forks of its process.

    The seeds of the executions are derived from `seed`; with None the operating system provides them.
    """

    code: str
    timeout: float | None = PREPARE_TIMEOUT_SECONDS
    seed: int | None = None

    @classmethod
    def from_parameters(
        cls, prepare: str | None, prepare_timeout: float | None, prepare_seed: int | None
    ) -> "Preparation | None":
        """Build the preparation from parameters of flows and interpreters. Raise ConfigurationError."""
        if prepare is None:
            if prepare_seed is not None:
                raise ConfigurationError("prepare_seed needs prepare: pass both, or leave prepare_seed out")
            return None
        if type(prepare) is not str or not prepare.strip():
            raise ConfigurationError("prepare is empty or not text: pass a Python program")
        return cls(prepare, resolve_timeout("prepare_timeout", prepare_timeout), prepare_seed)

    def derive_seed(self, *numbers: int) -> int | None:
        """Return the seed for an execution's number or for the numbers of `Queries`. Return None without a seed."""
        if self.seed is None:
            return None
        text = " ".join(str(number) for number in (self.seed, *numbers))
        return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def resolve_timeout(name: str, seconds: float | None) -> float | None:
    """Return the seconds of the parameter `name`; None means no limit. Raises ConfigurationError."""
    if seconds is not None and not seconds > 0:  # `not >` also refuses NaN.
        raise ConfigurationError(f"{name} is {seconds!r}: use a number of seconds above 0, or None for no limit")
    return None if seconds == math.inf else seconds
