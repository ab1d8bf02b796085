"""Settings of the stand-in, for its start or while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Settings:
    """Settings of the stand-in. Times are real seconds, and `minute` is the length of a minute in Daytona's intervals.

    Waits for `boot_s`, `destroy_s`, `volume_ready_s` and `fault_delay_s` obey a change at once. A test can set an hour,
    and then 0 when it has seen the wait.
    """

    key: str = "standin"
    boot_s: float = 0.09
    destroy_s: float = 0.0  # seconds from an accepted removal to its end
    keeps_pending: bool = True  # refuse to remove a sandbox during a state change: 409
    minute: float = 60.0
    page: int = 100  # sandboxes in one page of a listing
    snapshots: list[str] = field(default_factory=lambda: ["daytona-small", "daytona-medium"])
    broken_snapshots: list[str] = field(default_factory=list)  # snapshots whose sandboxes end in an error
    capture_s: float = 0.0  # seconds to make a snapshot of a sandbox
    capture_fails: bool = False  # captures fail without an error, as in daytonaio/daytona#4990
    max_snapshots: int | None = None  # snapshots of sandboxes that the organization may have
    max_sandboxes: int | None = None
    creates_per_minute: int | None = None
    retry_after_s: float = 1.0  # seconds in the Retry-After header of a 429
    volume_ready_s: float = 0.3
    broken_volumes: list[str] = field(default_factory=list)  # volumes that end in an error
    fault_rate: float = 0.0  # share of the calls that match `fault_where`
    # The other kinds are any HTTP status, "lost" and "repeat".
    faults: list[str] = field(default_factory=lambda: ["429", "502", "503", "drop", "delay"])
    fault_message: str = ""  # message of a fault that is a status
    fault_where: str = ""  # regular expression, searched in "METHOD /path"
    fault_times: int | None = None  # maximum number of faults
    fault_delay_s: float = 5.0
    seed: int = 1
