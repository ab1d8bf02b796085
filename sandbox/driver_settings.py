"""What a driver is told when it starts: where code runs, how much of its output is kept, when a silence is an end."""

from dataclasses import dataclass, field
from typing import Any

OUTPUT_CAP_CHARACTERS = 100_000  # of each stream that are kept: some 2,000 lines, and harmless in a log or a ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """What the driver in a sandbox is told when it starts.

    `cwd` is the directory that code runs in (a relative one is below that in which the driver starts); `environment`
    reaches the code and nothing else; `path` is appended to `sys.path`. `heartbeat` is the number of seconds after
    which a side that has said nothing sends a beat, and after `silence` seconds without any frame each side takes the
    other for dead; None where the wire's end is enough. `lifetime` is the number of seconds after which the driver ends
    whatever the host says. `confinement` is what each child does to itself. `volume` is the
    directory where the volume is mounted, None without one. `files` is a directory in which the driver leaves large
    bodies, for a wire that they are too much for; None where all goes over the wire. `commit` is a command that runs
    when an execution has ended and before its result is handed back, empty for none: where a volume has to be told to
    keep what was saved.
    """

    cwd: str
    volume: str | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    path: list[str] = field(default_factory=list[str])
    heartbeat: float | None = 15.0
    silence: float = 90.0
    lifetime: float | None = None
    confinement: dict[str, Any] = field(default_factory=dict[str, Any])
    commit: list[str] = field(default_factory=list[str])
    output_cap: int = OUTPUT_CAP_CHARACTERS
    files: str | None = None
