"""The Prefect server of a run: the configured one, the shared one, or an embedded one; and checks of a server."""

import asyncio
import atexit
import contextvars
import secrets
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import httpx

from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..sandbox.outcomes.server_message import describe_server_error
from .child_process import describe_exit_status
from .listener import FlowListener
from .proxies import check_proxies

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.settings import Settings

    from .server.process import ServerProcess
    from .server.shared import SharedServer

T = TypeVar("T")

POLL_INTERVAL_SECONDS = 0.5  # seconds between two looks at a server's process
# Attempts to connect again for each of Prefect's events. Prefect makes ten, and waits a second before the third one and
# each later one. At the end of a program whose server has ended, that would take seven seconds for each event.
RECONNECTION_ATTEMPTS = 2


@asynccontextmanager
async def provide_server(
    find_results_path: Callable[[], str | None] = lambda: None, listener: FlowListener | None = None
) -> AsyncIterator[str | None]:
    """Run the code in the context with a Prefect server: the configured one, the shared one, or an embedded one.

    Args:
        find_results_path: Returns the path of the results so far, for the message if the server fails.
        listener: Receives `on_prefect_start` before a wait for the server.

    Yields:
        The address of the UI of the shared server, otherwise None.

    Raises:
        ConfigurationError: The configured server does not answer or refuses. Or the shared or embedded server does not
            start, or fails. When its process ends, the code in the context is cancelled.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED

    check_proxies()
    listener = FlowListener() if listener is None else listener
    url = PREFECT_API_URL.value()
    if url:
        listener.on_prefect_start()
        async with get_client() as client:
            await check_server(client, url)
        yield None
    elif not PREFECT_SERVER_EPHEMERAL_ENABLED.value() or _has_prefect_started_a_server():
        yield None
    else:
        ui_url: str | None = None
        server: ServerProcess | SharedServer | None = await _get_shared_server(listener)
        if server is not None:
            ui_url = server.ui_url
        else:
            server = await _get_embedded_server(listener)
        async with _use_server(server, find_results_path):
            yield ui_url


def _has_prefect_started_a_server() -> bool:
    """Return whether Prefect's own embedded server runs, as for a user's own flow. Our flows in that flow use it."""
    module = sys.modules.get("prefect.server.api.server")
    process = None if module is None else module.SubprocessASGIServer().server_process
    return process is not None and process.poll() is None


async def _get_shared_server(listener: FlowListener) -> "SharedServer | None":
    """Return the shared server, and start it if necessary; None if this run uses an embedded server."""
    from .server.shared import find_shared_server, start_shared_server, wants_shared_server

    if not wants_shared_server():
        return None
    try:
        server = await _run_in_thread(find_shared_server)
        if server is None:
            listener.on_prefect_start()
            server = await _run_in_thread(start_shared_server)
    except OSError:  # The file system of PREFECT_HOME has no locks.
        return None
    return server


_start_lock = threading.Lock()  # Two flows that begin at the same time start one server.
_embedded: "ServerProcess | None" = None  # the embedded server of this process


async def _get_embedded_server(listener: FlowListener) -> "ServerProcess":
    """Return the embedded server of this process, and start it unless it runs. Raises ConfigurationError."""
    from prefect.settings import PREFECT_HOME

    from .server.process import NO_SCHEDULES, ServerProcess

    home = PREFECT_HOME.value()

    def start() -> ServerProcess:
        global _embedded
        with _start_lock:
            if _embedded is None or _embedded.poll() is not None:
                log, auth = home / "embedded-server.log", f"rlm-batch:{secrets.token_urlsafe(32)}"
                _embedded = ServerProcess.start(home, log=log, auth=auth, settings=NO_SCHEDULES).wait()
                atexit.register(_embedded.stop)
            return _embedded

    listener.on_prefect_start()
    return await _run_in_thread(start)


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Return the result of a function that waits for a server.

    If the caller is cancelled, the thread continues. The end of the program does not wait for the thread, as it would
    for a thread of an executor.
    """
    result = Future[T]()
    result.set_running_or_notify_cancel()  # From now on, the future cannot be cancelled.

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return await asyncio.wrap_future(result)


@asynccontextmanager
async def _use_server(
    server: "ServerProcess | SharedServer", find_results_path: Callable[[], str | None]
) -> AsyncIterator[None]:
    """Use a server in the context. When the server's process ends, the code in the context is cancelled.

    Raises:
        ConfigurationError: The server fails, or its process ends.
    """
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker

    EventsWorker.set_client_override(
        PrefectEventsClient, api_url=server.url, reconnection_attempts=RECONNECTION_ATTEMPTS
    )
    watching: asyncio.Task[None] | None = None
    try:
        # Prefect's log has no links, because pages of the shared server need a password.
        with use_settings(server.url, server.auth, ui_url="") as settings:
            async with _open_clients(), asyncio.timeout(None) as timeout:
                watching = asyncio.create_task(_cancel_at_end(server, settings, timeout))
                yield
    except RlmBatchError:
        raise
    except Exception as error:
        status = server.poll()
        if status is None and not is_server_failure(error):
            raise
        raise ConfigurationError(_describe_failure(server, status, error, find_results_path())) from error
    finally:
        if watching is not None:
            watching.cancel()
        EventsWorker.set_client_override(None)


async def _cancel_at_end(
    server: "ServerProcess | SharedServer", settings: "Settings", timeout: asyncio.Timeout
) -> None:
    """Wait until the server's process ends, and then let the code in the context of `timeout` time out."""
    while server.poll() is None:  # noqa: ASYNC110 - nothing wakes this at a process's end
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    settings.client.max_retries = 0  # Prefect's clients would retry for a minute.
    timeout.reschedule(asyncio.get_running_loop().time())


def is_server_failure(error: Exception) -> bool:
    """Return whether an error of Prefect's client says that the server failed."""
    # Prefect's client raises a plain RuntimeError if a server does not report its version.
    return isinstance(error, httpx.HTTPError) or "Failed to reach API" in str(error)


@asynccontextmanager
async def _open_clients() -> AsyncIterator[None]:
    """Give Prefect clients without TLS certificates in the context. Reading certificates takes 50 ms of CPU a run."""
    from prefect.client.orchestration import get_client
    from prefect.context import AsyncClientContext, SyncClientContext

    settings = {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    async with AsyncClientContext.model_construct(client=get_client(httpx_settings=settings)):
        with SyncClientContext.model_construct(client=get_client(sync_client=True, httpx_settings=settings)):
            yield


@contextmanager
def use_settings(url: str, auth: str | None, ui_url: str | None = None) -> Iterator["Settings"]:
    """Change Prefect's settings in the context so that its clients use a server which rlm-batch has started.

    Args:
        url: The address of the API.
        auth: The name and password, as NAME:PASSWORD.
        ui_url: The address of the UI, for links in logs; by default the server's. With an empty text logs have no
            links.
    """
    from prefect.context import SettingsContext, get_settings_context
    from pydantic import SecretStr

    # Prefect's `temporary_settings` would read all settings again, also files in the working directory, which takes
    # 50 ms of CPU.
    context = get_settings_context()
    settings = context.settings
    changes = {
        "api": settings.api.model_copy(update={"url": url, "auth_string": None if auth is None else SecretStr(auth)}),
        "client": settings.client.model_copy(),
        "ui_url": ui_url,
    }
    with SettingsContext(profile=context.profile, settings=settings.model_copy(update=changes)) as changed:
        yield changed.settings


def _describe_failure(
    server: "ServerProcess | SharedServer", status: int | str | None, error: Exception, results_path: str | None
) -> str:
    """Return what happened to the server, with the paths of its log and of the results so far."""
    from .server.process import read_last_error

    if status is None:
        event, reason = "has failed", describe_server_error(error)
    else:
        how = f", with {describe_exit_status(status)}," if isinstance(status, int) else ""
        event, reason = f"has ended by itself{how}", ""
    with suppress(OSError):  # The log may be missing.
        reason = read_last_error(server.log, server.log_offset) or reason
    why = f" ({reason})" if reason else ""
    kind = "embedded" if server is _embedded else "shared"
    start, end = f"Prefect's {kind} server {event}", f"{why}; its log is {server.log}"
    if results_path is None:
        return f"{start} before anything ran{end}. Run it again"
    return (
        f"{start} while the flow ran{end}; the results so far are in {results_path}: run again with this "
        "`results_path`, or with `cache_results`, to run only the rest"
    )


async def check_server(client: "PrefectClient", url: str) -> None:
    """Check that the server at `url` answers and accepts the client's password.

    Args:
        client: A client of that server.
        url: The server's address.

    Raises:
        ConfigurationError: The server does not answer, or refuses.
    """
    try:
        await client.api_version()  # Unlike the health check, this request needs the password.
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        response = getattr(error, "response", None)
        is_missing = response is not None and response.status_code == httpx.codes.NOT_FOUND
        if is_missing and await client.api_healthcheck() is None:
            return  # Prefect Cloud has no such address.
        # A ValueError means that the answer is not JSON, as from the address of the UI.
        reason = "it is no Prefect API" if isinstance(error, ValueError) else describe_server_error(error)
        raise ConfigurationError(
            f"the Prefect server at {url} does not answer or refuses ({reason}): start it; or correct PREFECT_API_URL, "
            "which ends in /api, or unset it; or set PREFECT_API_AUTH_STRING=NAME:PASSWORD if it has a password"
        ) from None
