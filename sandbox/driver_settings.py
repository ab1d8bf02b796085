"""The settings that a driver receives when it starts, and the preparation of a sandbox."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigurationError

PREPARE_TIMEOUT_SECONDS: float = 300  # seconds; imports and loading models take long
OUTPUT_CAP_CHARACTERS = 100_000  # characters kept of each stream: some 2,000 lines, small enough for a log or a ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The settings that the driver in a sandbox receives when it starts.

    Attributes:
        cwd: Working directory of the code. A relative one is below the driver's working directory.
        volume: Directory where the volume is mounted; None without a volume.
        environment: Environment variables for the code only.
        temporary: The sandbox's own directories, emptied of what an execution leaves there.
        path: Directories appended to `sys.path`.
        python_path: Directories placed at the front of `sys.path`.
        executable: Python of a directory (`wire/python_directory.py`) that the code's processes start. The driver
            creates it if it is missing. None means the driver's own Python.
        heartbeat: Seconds without a frame after which a side sends a heartbeat. None if the end of the connection is
            always noticed.
        silence: Seconds without a frame after which a side takes the other for dead.
        lifetime: Seconds after which the driver ends on its own.
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
    confinement: dict[str, Any] = field(default_factory=dict[str, Any])
    commit: list[str] = field(default_factory=list[str])
    output_cap: int = OUTPUT_CAP_CHARACTERS
    files: str | None = None


@dataclass(frozen=True, slots=True)
class Preparation:
    """Code that runs once in a sandbox, for at most `timeout` seconds. Each execution is a fork of its process.

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
        try:
            prepare.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"prepare is not UTF-8 text: {error}") from None
        seconds = None if prepare_timeout == math.inf else prepare_timeout
        if seconds is not None and not seconds > 0:
            raise ConfigurationError(f"prepare_timeout is {seconds!r}: use a number of seconds above 0")
        return cls(prepare, seconds, prepare_seed)

    def derive_seed(self, *numbers: int) -> int | None:
        """Derive the seed of the execution with that number, or of a query's code with the numbers from `Queries`."""
        if self.seed is None:
            return None
        return int.from_bytes(hashlib.sha256(" ".join(map(str, (self.seed, *numbers))).encode()).digest(), "big")
