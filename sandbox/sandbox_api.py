"""The interface of a provider's sandbox: an open sandbox, and a channel to the driver in it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from .driver_settings import DriverSettings


class Channel(Protocol):
    """A duplex stream of bytes to the driver."""

    async def send(self, data: bytes) -> None:
        """Hands over the bytes, all of them, after those of earlier sends. Raises SandboxLost."""


class Sandbox(ABC):
    """One open sandbox. `id` is the provider's; `isolation` and `layers` are what keeps the code in.

    `disk_mib` is the most MiB that its files may take together; None where the provider has no such option.
    `limits` are the provider's options that limit code, with their values, as far as they hold.
    `memory_option` is the provider's option that gives more memory to code that ran into a MemoryError, and
    `kill_memory_option` the one for code that the kernel has killed; empty where no option does.
    """

    id: str
    provider: str
    isolation: str
    layers: tuple[str, ...]
    settings: DriverSettings
    disk_mib: int | None = None
    limits: Mapping[str, int] = {}
    memory_option: str = ""
    kill_memory_option: str = ""

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

    async def may_start_again(self) -> bool:
        """Whether the driver did not start for a reason that is over, so that `connect` may be called once more."""
        return False

    def read_stderr_tail(self) -> str:
        """The end of what the driver's process wrote on its standard error; empty where that is not known."""
        return ""

    def may_run_unheard(self) -> bool:
        """Whether a driver of which nothing was heard may have begun with what it was sent, or may still do so."""
        return False

    def expect_execution(self, *, is_preparation: bool = False) -> None:
        """Hears that code is about to run in it; `is_preparation`: in the process that executions will be forks of."""
        return

    def find_exceeded_limit(self) -> str:
        """The option that limits the sandbox as a whole for which something in it was killed since this was last asked.

        Empty where there was none.
        """
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
    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """A file's bytes. Raises as `upload` does, also for what is no file, and for one of more than `max_bytes`."""

    @abstractmethod
    async def remove(self) -> None:
        """Ends the sandbox and everything in it. A second time, or after it has gone, is no error."""
