"""The commands `server` and `server stop`: the shared Prefect server of the command line."""

import time

from cyclopts import App
from prefect.settings import PREFECT_HOME

from ..flows.server.shared import list_shared_servers
from ..sandbox.errors import ConfigurationError
from .output import Flag

server = App(name="server")


@server.default
def show_servers() -> int:
    """Show the shared Prefect server of the command line, and the address that signs in to its UI.

    Commands start it when they need it. It ends after 15 minutes without a request. The status is 1 if none runs.
    """
    servers = 0
    for found in list_shared_servers():
        servers += 1
        seconds = time.time() - found.started
        age = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        use = "in use" if found.is_used() else "not in use"
        print(f"running    process {found.pid}, {age}, {use}")
        print(f"UI         {found.ui_url}/login")
        print(f"password   {found.auth}")
        print(f"log        {found.log}")
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
    for found in list_shared_servers():
        if not force and found.is_used():
            raise ConfigurationError(
                f"a command uses the shared Prefect server (process {found.pid}): end that command first, or stop the "
                "server with --force"
            )
        servers += 1
        found.stop()
        print(f"stopped process {found.pid}")
    if not servers:
        print(f"no shared Prefect server is running in {PREFECT_HOME.value()}")
    return 0
