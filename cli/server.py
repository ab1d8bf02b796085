"""The commands `server` and `server stop`: the shared Prefect server of commands and programs."""

import time

from cyclopts import App
from prefect.settings import PREFECT_HOME

from ..flows.server.shared import list_shared_servers
from ..sandbox.errors import ConfigurationError
from .output import Flag

server = App(name="server")


@server.default
def show_servers() -> int:
    """Show the shared Prefect server of commands and Python programs, and the address that signs in to its UI.

    They start it when they need it. It ends after 15 minutes without a request. The status is 1 if none runs.
    """
    is_running = False
    for shared in list_shared_servers():
        is_running = True
        seconds = time.time() - shared.started
        age = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        use = "in use" if shared.is_used() else "not in use"
        print(f"running    process {shared.pid}, {age}, {use}")
        print(f"UI         {shared.ui_url}/login")
        print(f"password   {shared.auth}")
        print(f"log        {shared.log}")
    if not is_running:
        print(f"no shared Prefect server is running in {PREFECT_HOME.value()}")
    return 0 if is_running else 1


@server.command(name="stop")
def stop_servers(*, force: Flag = False) -> int:
    """End the shared Prefect server.

    Args:
        force: End the server even if a command or program uses it. That one fails, and keeps its results

    Raises:
        ConfigurationError: A command or program uses a server.
    """
    is_running = False
    for shared in list_shared_servers():
        is_running = True
        if not force and shared.is_used():
            raise ConfigurationError(
                f"a command or a Python program uses the shared Prefect server (process {shared.pid}): end it first, "
                "or stop the server with --force"
            )
        shared.stop()
        print(f"stopped process {shared.pid}")
    if not is_running:
        print(f"no shared Prefect server is running in {PREFECT_HOME.value()}")
    return 0
