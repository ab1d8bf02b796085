"""What can be asked of the stand-in, at its start or while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Settings:
    """What it does on demand. Seconds are real; `minute` is how many of them the intervals in minutes count.

    What waits for some of the seconds (`boot_s`, `destroy_s`, `volume_ready_s`, `fault_delay_s`) obeys a change at
    once: a test sets an hour, and 0 when it has seen what it waits for.
    """

    key: str = "standin"
    boot_s: float = 0.09
    destroy_s: float = 0.0  # between the acceptance of a removal and its end
    keeps_pending: bool = True  # removes no sandbox whose state is just changing: 409
    unknown_fields: list[str] = field(default_factory=list)  # of a creation: an older one drops them
    minute: float = 60.0
    page: int = 100  # sandboxes in one answer to a listing
    snapshots: list[str] = field(default_factory=lambda: ["daytona-small", "daytona-medium"])
    broken_snapshots: list[str] = field(default_factory=list)  # whose sandboxes end in an error
    max_sandboxes: int | None = None
    creates_per_minute: int | None = None
    git_cli: bool = False  # whether the daemon clones with git itself, as DAYTONA_EXPERIMENTAL_USE_GIT_CLI has it
    retry_after_s: float = 1.0  # what a 429 asks for
    volume_ready_s: float = 0.3
    broken_volumes: list[str] = field(default_factory=list)  # which end in an error
    log_bytes_per_s: float = 2.5e6  # what the real daemon's shell loop takes
    fault_rate: float = 0.0  # of all calls, those that match `fault_where`
    # Also any status, "lost" and "repeat".
    faults: list[str] = field(default_factory=lambda: ["429", "502", "503", "drop", "delay"])
    fault_message: str = ""  # of a fault that is a status
    fault_where: str = ""  # a regular expression, searched in "METHOD /path"
    fault_times: int | None = None  # after so many faults there are no more
    fault_delay_s: float = 5.0
    seed: int = 1
