"""What a driver is told when it starts: where code runs, what is run before it, when a silence is an end."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigurationError

PREPARE_TIMEOUT_SECONDS: float = 300  # for imports and models that are loaded
OUTPUT_CAP_CHARACTERS = 100_000  # of each stream that are kept: some 2,000 lines, and harmless in a log or a ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """What the driver in a sandbox is told when it starts.

    `cwd` is the directory that code runs in (a relative one is below that in which the driver starts); `environment`
    reaches the code and nothing else; `temporary` are directories of the sandbox's own that are emptied of what an
    execution leaves there. `path` is appended to `sys.path`, and `python_path` stands before all that is there.
    `executable` is the Python of a directory (`wire/python_directory.py`) that the code's processes start, which
    the driver makes where it is missing; None leaves them the driver's own. `heartbeat` is the number of seconds after
    which a side that has said nothing sends a beat, and after `silence` seconds without any frame each side takes the
    other for dead; None where the wire's end is enough.
    `lifetime` is the number of seconds after which the driver ends whatever the host says. `confinement` is what each
    child does to itself. `volume` is the directory where the volume is mounted, None without one. `files` is a
    directory in which the driver leaves large bodies, for a wire that they are too much for; None where all goes over
    the wire. `commit` is a command that runs when an execution has ended and before its result is handed back, empty
    for none: where a volume has to be told to keep what was saved.
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
    """Code that runs once in a sandbox, for `timeout` seconds at most; each execution is a fork of its process.

    `seed` is what the executions' own seeds are made of; with None they are the operating system's.
    """

    code: str
    timeout: float | None = PREPARE_TIMEOUT_SECONDS
    seed: int | None = None

    @classmethod
    def from_parameters(
        cls, prepare: str | None, prepare_timeout: float | None, prepare_seed: int | None
    ) -> "Preparation | None":
        """What these parameters of flows and interpreters stand for. Raises ConfigurationError."""
        if prepare is None:
            if prepare_seed is not None:
                raise ConfigurationError("prepare_seed goes with prepare: it seeds the forks of what that has prepared")
            return None
        if type(prepare) is not str or not prepare.strip():
            raise ConfigurationError("prepare is empty, or no text: it is a Python program")
        try:
            prepare.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"prepare is no UTF-8 text: {error}") from None
        seconds = None if prepare_timeout == math.inf else prepare_timeout
        if seconds is not None and not seconds > 0:
            raise ConfigurationError(f"prepare_timeout is {seconds!r}: it is a number of seconds above zero")
        return cls(prepare, seconds, prepare_seed)

    def derive_seed(self, *numbers: int) -> int | None:
        """The seed of the execution with that number, or of a query's code with those of `Queries`."""
        if self.seed is None:
            return None
        return int.from_bytes(hashlib.sha256(" ".join(map(str, (self.seed, *numbers))).encode()).digest(), "big")
