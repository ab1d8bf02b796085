"""The interface of a provider's sandbox: an open sandbox, and a channel to the driver in it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from .driver_settings import DriverSettings
from .errors import RlmBatchError
from .outcomes.text_escape import SecretFilter

LARGE_FILE_REMEDY = "save larger data to a volume, or split it"


class Channel(Protocol):
    """A duplex stream of bytes to the driver."""

    async def send(self, data: bytes) -> None:
        """Send all the bytes, after the bytes of earlier calls. Raise SandboxLost."""


class Sandbox(ABC):
    """An open sandbox.

    Attributes:
        id: The provider's id of the sandbox.
        isolation: Isolation level.
        layers: Mechanisms that the isolation consists of.
        has_network: True if code can open connections to other machines.
        limits: The provider's options that limit code, with the values that are enforced.
        memory_option: The provider's option to raise after a MemoryError; "" if there is no such option.
        kill_memory_option: The provider's option to raise after the kernel killed code that used too much memory; "" if
            there is no such option.
        mounts: Paths of the host's files and directories in the sandbox.
        hide: The filter of the secrets in the code's environment; None without secrets.
    """

    id: str
    provider: str
    isolation: str
    layers: tuple[str, ...]
    settings: DriverSettings
    has_network: bool = True
    limits: Mapping[str, int] = {}
    memory_option: str = ""
    kill_memory_option: str = ""
    mounts: tuple[str, ...] = ()
    hide: SecretFilter | None = None

    @property
    def disk_mib(self) -> int | None:
        """Return the limit of the sandbox's files together, in MiB; None if there is no such limit."""
        return self.limits.get("disk_mib")

    @abstractmethod
    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> Channel:
        """Start the driver.

        Args:
            receive: Called on the caller's event loop with the driver's bytes.
            closed: Called on the caller's event loop with the reason for the end of the connection.

        Raises:
            SandboxStartError: The driver could not be started.
        """

    async def attach(self) -> tuple[int, int] | None:
        """Start the driver of a sandbox on this machine. Return descriptors to read from and to write to.

        The descriptors are non-blocking. Return None, and start nothing, if the provider supports only `connect`. Raise
        SandboxStartError.
        """
        return None

    def read_stderr_tail(self) -> str:
        """Return the end of the driver's standard error, or "" if it is unknown."""
        return ""

    def may_run_unheard(self) -> bool:
        """Return True if a driver that never answered may have run the code that was sent to it."""
        return False

    def expect_execution(self) -> None:
        """Note that code is about to run: an execution, or the `prepare` code."""
        return

    def find_exceeded_limit(self) -> str:
        """Return the option whose sandbox-wide limit killed a process since the last call; "" if there was none."""
        return ""

    async def refresh_volume(self) -> None:
        """Make files visible that others saved to the volume, for volumes that need a refresh.

        The interpreter calls this before it sends an execution, while no other execution is running. Raise SandboxLost.
        """
        return

    @abstractmethod
    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, and the directories above it. A relative path is below the code's working directory.

        Raises:
            VolumeError: The file cannot be written, or the path is something else than a file.
            SandboxLost: The sandbox is gone.
        """

    @abstractmethod
    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return a file's bytes.

        Raises:
            VolumeError: The path is not a readable file, or the file is larger than `max_bytes`.
            SandboxLost: The sandbox is gone.
        """

    async def keep(self, until: float, execution: int | None = None) -> None:
        """End the driver, and leave the sandbox with its files open. `remove` still works after an error.

        The sandbox is marked as kept first, so that `list_sandboxes` shows it even if this process is killed.

        Args:
            until: Time at which the sandbox ends, in epoch seconds.
            execution: Number of the sandbox's failed execution, for `list_sandboxes`.

        Raises:
            RlmBatchError: The provider cannot keep the sandbox.
        """
        raise RlmBatchError(f"the provider {self.provider} keeps no sandboxes")

    @abstractmethod
    async def remove(self) -> None:
        """Remove the sandbox and everything in it. Removing a missing sandbox is not an error."""


def describe_large_file(path: str, size: int, max_bytes: int) -> str:
    """Return the message for a file of `size` bytes or more that is too large to download."""
    return (
        f"{path!r} could not be read: it has {size:,} bytes or more, and at most {max_bytes:,} are allowed; "
        f"{LARGE_FILE_REMEDY}"
    )


def describe_special_file(path: str, action: str = "read", *, is_link: bool = False) -> str:
    """Return the message for a path that is not a regular file, so it was not "read" or "written"."""
    if is_link:
        return f"{path!r} is a symbolic link, which is not followed"
    if action == "read":
        return f"{path!r} is not a readable file"
    return f"{path!r} could not be written: it is not a file"
