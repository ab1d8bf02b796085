"""The interface of a provider's sandbox: an open sandbox, and a channel to the driver in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Channel(Protocol):
    """A duplex stream of bytes to the driver."""

    async def send(self, data: bytes) -> None:
        """Hands over the bytes, all of them, after those of earlier sends. Raises SandboxLost."""


class Sandbox(ABC):
    """One open sandbox. `id` is the provider's; `isolation` and `layers` are what keeps the code in."""

    id: str
    provider: str
    isolation: str
    layers: tuple[str, ...]
    settings: DriverSettings

    @abstractmethod
    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> Channel:
        """Starts the driver. `receive` gets its bytes as they come, `closed` the reason when there are no more.

        Both are called on the event loop that called this. Raises SandboxStartError.
        """

    async def attach(self) -> tuple[int, int] | None:
        """Starts the driver of a sandbox on this machine; returns descriptors to read its wire from and to write it to.

        They do not block. None, and nothing started, where there is only `connect`. Raises SandboxStartError.
        """
        return None

    def read_stderr_tail(self) -> str:
        """The end of what the driver's process wrote on its standard error; empty where that is not known."""
        return ""

    async def refresh_volume(self) -> None:
        """Lets code see what others have saved to the volume since; for volumes that have to be asked.

        Called before an execution is sent, when no other is under way. Raises SandboxLost.
        """
        return

    @abstractmethod
    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file, with the directories above it; a relative path is below the directory that code runs in.

        Raises VolumeError where it cannot be written, SandboxLost where the sandbox is gone.
        """

    @abstractmethod
    async def download(self, path: str) -> bytes:
        """A file's bytes. Raises as `upload` does."""

    @abstractmethod
    async def remove(self) -> None:
        """Ends the sandbox and everything in it. A second time, or after it has gone, is no error."""
