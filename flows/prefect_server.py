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
MEMORY_LEASES = "prefect.server.concurrency.lease_storage.memory"  # Prefect's default
# Attempts to connect again for each of Prefect's events. From the third one on, Prefect waits a second before each, and
# makes ten: at the end of a program whose server has ended, seven seconds for each event.
RECONNECTION_ATTEMPTS = 2


@asynccontextmanager
async def provide_server(
    find_results_path: Callable[[], str | None] = lambda: None, listener: FlowListener | None = None
) -> AsyncIterator[str | None]:
    """Run the code in the context with a Prefect server: the configured one, the shared one, or an embedded one.

    Args:
        find_results_path: Returns the path of the results so far, for the error if the server fails.
        listener: Is told of a wait for the server, and of a shared server that cannot be used.

    Yields:
        The address of the UI of the shared server, otherwise None.

    Raises:
        ConfigurationError: The configured server does not answer or refuses, or another server failed. If the process
            of a shared or embedded server ends, the code in the context is cancelled.
    """
    from prefect.client.orchestration import get_client
    from prefect.logging import get_logger
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED

    from .server.process import check_open_files

    check_proxies()
    check_open_files()
    warn = get_logger("rlm_batch").warning if listener is None else listener.on_warning
    listener = FlowListener() if listener is None else listener
    url = PREFECT_API_URL.value()
    if url:
        listener.on_prefect_start()
        async with get_client() as client:
            await check_server(client, url, "unset PREFECT_API_URL to run without")
        yield None
    elif not PREFECT_SERVER_EPHEMERAL_ENABLED.value() or _has_prefect_started_a_server():
        yield None
    else:
        server = await _get_shared_server(listener, warn) or await _get_embedded_server(listener)
        kind, ui_url = ("embedded", None) if server is _embedded else ("shared", server.ui_url)
        async with _use_server(server, kind, ui_url, find_results_path):
            yield ui_url


def _has_prefect_started_a_server() -> bool:
    """Return whether Prefect's own embedded server runs, as in a user's own flow. Our flows within it use it."""
    module = sys.modules.get("prefect.server.api.server")
    process = None if module is None else module.SubprocessASGIServer().server_process
    return process is not None and process.poll() is None


async def _get_shared_server(listener: FlowListener, warn: Callable[[str], None]) -> "SharedServer | None":
    """Return the shared server, and start it if necessary. Return None if this run uses an embedded server instead."""
    from .server.shared import SharedServerUnusable, find_shared_server, start_shared_server, wants_shared_server

    if not wants_shared_server():
        return None
    try:
        server = await _run_in_thread(find_shared_server)
        if server is None:
            listener.on_prefect_start()
            server = await _run_in_thread(start_shared_server)
    except SharedServerUnusable as error:
        warn(str(error))
        return None
    return server


_start_lock = threading.Lock()  # Two flows that begin at one time share one server.
_embedded: "ServerProcess | None" = None  # the embedded server of this process


async def _get_embedded_server(listener: FlowListener) -> "ServerProcess":
    """Return the embedded server of this process, and start it unless it runs. Raises ConfigurationError."""
    from prefect.settings import PREFECT_HOME

    from .server.process import NO_SCHEDULES, ServerProcess

    home, auth = PREFECT_HOME.value(), f"rlm-batch:{secrets.token_urlsafe(32)}"

    def start() -> ServerProcess:
        global _embedded
        with _start_lock:
            if _embedded is None or _embedded.poll() is not None:
                log = home / "embedded-server.log"
                _embedded = ServerProcess.start(home, log=log, auth=auth, settings=NO_SCHEDULES).wait()
                atexit.register(_embedded.stop)
            return _embedded

    listener.on_prefect_start()
    return await _run_in_thread(start)


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Return the result of a function that waits for a server. A cancelled program does not wait for it."""
    result = Future[T]()
    result.set_running_or_notify_cancel()  # The thread continues if its caller is cancelled.

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return await asyncio.wrap_future(result)


@asynccontextmanager
async def _use_server(
    server: "ServerProcess | SharedServer", kind: str, ui_url: str | None, find_results_path: Callable[[], str | None]
) -> AsyncIterator[None]:
    """Use a server in the context, whose code is cancelled when the server's process ends.

    Raises:
        ConfigurationError: The server fails, or its process ends.
    """
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker

    async def watch() -> None:
        while server.poll() is None:  # noqa: ASYNC110 - nothing wakes this at a process's end
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        settings.client.max_retries = 0  # Prefect's clients would retry for a minute.
        ending.reschedule(asyncio.get_running_loop().time())

    EventsWorker.set_client_override(
        PrefectEventsClient, api_url=server.url, reconnection_attempts=RECONNECTION_ATTEMPTS
    )
    watching: asyncio.Task[None] | None = None
    try:
        with use_settings(server.url, server.auth, ui_url or "") as settings:
            async with _open_clients(), asyncio.timeout(None) as ending:
                watching = asyncio.create_task(watch())
                yield
    except RlmBatchError:
        raise
    except Exception as error:
        status = server.poll()
        # Prefect's client raises a plain RuntimeError if a server does not report its version.
        if status is None and not (isinstance(error, httpx.HTTPError) or "Failed to reach API" in str(error)):
            raise
        raise ConfigurationError(_describe_failure(server, kind, status, error, find_results_path())) from error
    finally:
        if watching is not None:
            watching.cancel()
        EventsWorker.set_client_override(None)


@asynccontextmanager
async def _open_clients() -> AsyncIterator[None]:
    """Let Prefect use clients that read no certificates: our servers have no TLS. It saves 50 ms of CPU a run."""
    from prefect.client.orchestration import get_client
    from prefect.context import AsyncClientContext, SyncClientContext

    settings = {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    async with AsyncClientContext.model_construct(client=get_client(httpx_settings=settings)):
        with SyncClientContext.model_construct(client=get_client(sync_client=True, httpx_settings=settings)):
            yield


@contextmanager
def use_settings(url: str, auth: str | None, ui_url: str | None = None) -> Iterator["Settings"]:
    """Use a server that rlm-batch started in the context, which has its own copy of Prefect's settings.

    Prefect's `temporary_settings` reads all settings again, also those of the working directory, for 50 ms of CPU.

    Args:
        url: The address of the API.
        auth: The name and password, as NAME:PASSWORD.
        ui_url: The address of the UI, for links in logs; by default the server's. An empty one means no links.
    """
    from prefect.context import SettingsContext, get_settings_context
    from pydantic import SecretStr

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
    server: "ServerProcess | SharedServer", kind: str, status: int | str | None, error: Exception, results: str | None
) -> str:
    """Return what happened to the server, with the paths of its log and of the results so far."""
    from .server.process import read_last_error

    event, reason = "has failed", describe_server_error(error)
    if status is not None:
        how = f", with {describe_exit_status(status)}," if isinstance(status, int) else ""
        event, reason = f"has ended by itself{how}", ""
    with suppress(OSError):  # The log may be missing.
        reason = read_last_error(server.log, server.log_offset) or reason
    log = f"; its log is {server.log}"
    if results is None:
        return f"Prefect's {kind} server {event} before anything ran{reason and f' ({reason})'}{log}. Run it again"
    return (
        f"Prefect's {kind} server {event} while the flow ran{reason and f' ({reason})'}{log}; the results so far are "
        f"in {results}: run again with the same results_path (--results-path, or --resume) to run only the rest"
    )


async def check_server(client: "PrefectClient", url: str, alternative: str) -> None:
    """Check that the server at `url` answers and accepts the client's password.

    Args:
        client: A client of that server.
        url: The server's address.
        alternative: Another remedy for the user, for the error.

    Raises:
        ConfigurationError: The server does not answer, or refuses.
    """
    error = await client.api_healthcheck()
    if error is not None:
        silence = (
            f"the Prefect server at {url} does not answer ({describe_server_error(error)}): start it, or {alternative}"
        )
        raise ConfigurationError(_describe_refusal(url, error, alternative) or silence)
    # The health check needs no password, so ask for the version too. Prefect Cloud has no such address, so ignore 404.
    with suppress(httpx.HTTPError):
        try:
            await client.api_version()
        except ValueError:
            raise ConfigurationError(_describe_other_server(url, alternative)) from None
        except httpx.HTTPStatusError as error:
            refusal = _describe_refusal(url, error, alternative)
            if refusal is not None and error.response.status_code != httpx.codes.NOT_FOUND:
                raise ConfigurationError(refusal) from None


async def describe_lost_leases(client: "PrefectClient") -> str | None:
    """Return a warning if the client's server keeps leases in memory, and so loses them when it restarts.

    Returns:
        The warning; None for another server, or one that does not show its settings, such as Prefect Cloud.
    """
    from .server.process import LEASE_STORAGE, SERVER_SETTINGS

    try:
        settings = (await client.request("GET", "/admin/settings")).json()
        storage = settings["server"]["concurrency"]["lease_storage"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None
    if storage != MEMORY_LEASES:
        return None
    return (
        "this Prefect server keeps leases in memory, so a restart loses them: slots of limits stay in use until the "
        f"next run or `rlm-batch reap`. Start the server with {LEASE_STORAGE}={SERVER_SETTINGS[LEASE_STORAGE]}"
    )


def _describe_refusal(url: str, error: Exception, alternative: str) -> str | None:
    """Return why the server at `url` refuses this client, or None for any other error."""
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
    if status == httpx.codes.UNAUTHORIZED:
        return (
            f"the Prefect server at {url} asks for a password: set PREFECT_API_AUTH_STRING=NAME:PASSWORD, or "
            f"{alternative}"
        )
    if status == httpx.codes.FORBIDDEN:
        return (
            f"the Prefect server at {url} refuses that user ({describe_server_error(error)}): set "
            f"PREFECT_API_AUTH_STRING=NAME:PASSWORD where it has users, or {alternative}"
        )
    if status == httpx.codes.BAD_REQUEST:
        return (
            f"the Prefect server at {url} refuses this host name ({describe_server_error(error)}): use "
            f"the address that it prints when it starts, or {alternative}"
        )
    return _describe_other_server(url, alternative) if status == httpx.codes.NOT_FOUND else None


def _describe_other_server(url: str, alternative: str) -> str:
    """Return the sentence for an address without Prefect's API. Without /api a server answers with its UI."""
    return f"{url} is not a Prefect API, whose address ends in /api: correct PREFECT_API_URL, or {alternative}"
