"""The commands `server` and `server stop`: the shared Prefect server of the command line."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cyclopts import App
from prefect.settings import PREFECT_HOME

from ..flows.server.shared import SharedServerUnusable, list_shared_servers
from ..sandbox.errors import ConfigurationError
from .output import Flag

server = App(name="server")


@server.default
def show_servers() -> int:
    """Show the shared Prefect server of the command line, and the address that signs in to its UI.

    Commands start it when they need it. It ends after 15 minutes without a request. The status is 1 if none runs.
    """
    servers = 0
    with _explain():
        for server in list_shared_servers():
            servers += 1
            seconds = time.time() - server.started
            age = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            use = "in use" if server.is_used() else "not in use"
            state = "" if server.answers() else ", does not answer"
            print(f"running    process {server.pid}, {age}, {_read_memory_mib(server.pid)} MiB, {use}{state}")
            print(f"UI         {server.ui_url}/login")
            print(f"password   {server.auth}")
            print(f"log        {server.log}")
    if not servers:
        print(f"no shared Prefect server is running in {PREFECT_HOME.value()}")
    return 0 if servers else 1


@server.command(name="stop")
def stop_servers(*, force: Flag = False) -> int:
    """End the shared Prefect server.

    Args:
        force: End it even while a command uses it; that command fails, and keeps its results

    Raises:
        ConfigurationError: A command uses a server.
    """
    servers = 0
    with _explain():
        for server in list_shared_servers():
            if not force and server.is_used():
                raise ConfigurationError(
                    f"a command uses the shared Prefect server (process {server.pid}): end that command first, or stop "
                    "the server with --force"
                )
            servers += 1
            server.stop()
            print(f"stopped process {server.pid}")
    if not servers:
        print(f"no shared Prefect server is running in {PREFECT_HOME.value()}")
    return 0


@contextmanager
def _explain() -> Iterator[None]:
    try:
        yield
    except SharedServerUnusable as error:
        raise ConfigurationError(str(error)) from None


def _read_memory_mib(pid: int) -> int:
    """Return the memory of a process in MiB, or 0 if it has ended."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    return 0
