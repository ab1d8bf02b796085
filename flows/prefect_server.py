"""Prefect servers that rlm-batch starts or uses: their settings, the server of a run, and checks of a server.

Measured on two cores, with 500 task runs:

- With batches, the recorder takes 9 ms of the server's CPU for a task run, instead of 25 ms. It has recorded all task
  runs 2 s after the last one ends, instead of 11 s.
- The first start on an empty PREFECT_HOME migrates a database for 16 to 28 s. Prefect waits 20 s by default.
- A restarted server would lose leases that it keeps in memory, and the slots of their holders would stay taken.
- A task that waits for a slot of its tag's limit asks again after up to 10 s by default. 50 tasks of 0.1 s under a
  limit of 4 took 47 to 67 s. With 0.5 s instead, they took 22 s.

CSRF tokens keep web pages from changing anything. `server/app.py` has further protections.
"""

import asyncio
import atexit
import contextvars
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..sandbox.outcomes.server_message import describe_server_error
from .child_process import build_safe_environment, describe_exit_status, read_last_error
from .listener import FlowListener
from .proxies import check_proxies

if TYPE_CHECKING:
    import subprocess

    from prefect.client.orchestration import PrefectClient

    from .server.launch import ServerProcess
    from .server.shared import SharedServer

T = TypeVar("T")

POLL_INTERVAL_SECONDS = 0.5  # seconds between two looks at a server's process

LEASE_STORAGE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
MEMORY_LEASES = "prefect.server.concurrency.lease_storage.memory"  # Prefect's default
SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    LEASE_STORAGE: "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_TASKS_TAG_CONCURRENCY_SLOT_WAIT_SECONDS": "0.5",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


def server_environment() -> dict[str, str]:
    """Return the environment for a server's process: our settings, unless this process or its profile has others."""
    return build_safe_environment({**_list_server_settings(), **os.environ})


def _list_server_settings() -> dict[str, str]:
    """Return our settings for a server, with the values that Prefect's profile has for them."""
    from prefect.settings import get_current_settings

    own = get_current_settings().to_environment_variables(exclude_unset=True)
    return {name: own.get(name, value) for name, value in SERVER_SETTINGS.items()}


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
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED
    from pydantic import SecretStr

    from .prefect_client import change_settings, open_clients
    from .server.launch import check_open_files

    check_proxies()
    check_open_files()
    on_prefect_start = FlowListener().on_prefect_start if listener is None else listener.on_prefect_start
    url = PREFECT_API_URL.value()
    if url:
        on_prefect_start()
        async with open_clients(lambda: _check_configured_server(url)):
            yield None
        return
    if not PREFECT_SERVER_EPHEMERAL_ENABLED.value():
        yield None
        return
    shared = await _get_shared_server(listener)
    if shared is not None:
        used = _UsedServer("shared", shared.poll, shared.log, shared.log_offset)
        # `_end_with_server` changes the client's settings.
        api = {"url": shared.url, "auth_string": SecretStr(shared.auth)}
        with change_settings(shared.ui_url, api=api, client={}):
            async with _end_with_server(used, find_results_path):
                yield shared.ui_url
        return
    on_prefect_start()
    with _apply_server_settings(), change_settings(client={}):
        async with _end_with_server(await _run_in_thread(_start_embedded_server), find_results_path):
            yield None


async def _get_shared_server(listener: FlowListener | None) -> "SharedServer | None":
    """Return the shared server, and start it if necessary. Return None if this run uses an embedded server instead."""
    from prefect.context import FlowRunContext
    from prefect.logging import get_logger

    from .server.shared import SharedServerUnusable, find_shared_server, start_shared_server, wants_shared_server

    # A run within another one uses that one's server.
    if FlowRunContext.get() is not None or not wants_shared_server():
        return None
    try:
        server = await _run_in_thread(find_shared_server)
        if server is None:
            if listener is not None:
                listener.on_prefect_start()
            server = await _run_in_thread(start_shared_server)
    except SharedServerUnusable as error:
        warn = get_logger("rlm_batch").warning if listener is None else listener.on_warning
        warn(str(error))
        return None
    return server


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


@dataclass
class _UsedServer:
    """A server that a run depends on. `poll` returns the status of its process, or None while it runs."""

    kind: str
    poll: Callable[[], int | str | None]
    log: Path
    log_offset: int


@asynccontextmanager
async def _end_with_server(server: _UsedServer, find_results_path: Callable[[], str | None]) -> AsyncIterator[None]:
    """Cancel the code in the context when the server's process ends. Raises ConfigurationError if the server fails."""
    from prefect.settings import get_current_settings

    async def watch() -> None:
        while server.poll() is None:  # noqa: ASYNC110 - nothing wakes this at a process's end
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        # Prefect's clients would retry for a minute. This changes a copy of the settings, made for this run.
        get_current_settings().client.max_retries = 0
        ending.reschedule(asyncio.get_running_loop().time())

    watching: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(None) as ending:
            watching = asyncio.create_task(watch())
            yield
    except RlmBatchError:
        raise
    except Exception as error:
        status = server.poll()
        # Prefect's client raises a plain RuntimeError if a server does not report its version.
        if status is None and not (isinstance(error, httpx.HTTPError) or "Failed to reach API" in str(error)):
            raise
        raise ConfigurationError(_describe_failure(server, status, error, find_results_path())) from error
    finally:
        if watching is not None:
            watching.cancel()
        if server.poll() is not None:
            _give_up_events()


def _give_up_events() -> None:
    """Stop the workers that send Prefect's events, because the server has ended. A later run starts new ones.

    They would try to send each event for seven seconds, also at the end of the program and those of later runs.
    """
    from prefect.events.worker import EventsWorker

    for worker in list(EventsWorker._instances.values()):
        if isinstance(worker, EventsWorker) and hasattr(worker, "_client"):
            vars(worker._client)["_reconnection_attempts"] = 0
            worker._stop()


def _describe_failure(server: _UsedServer, status: int | str | None, error: Exception, results_path: str | None) -> str:
    """Return what happened to the server, with the paths of its log and of the results so far."""
    event, reason = "has failed", describe_server_error(error)
    if status is not None:
        how = f", with {describe_exit_status(status)}," if isinstance(status, int) else ""
        event, reason = f"has ended by itself{how}", ""
    with suppress(OSError):  # The log may be missing.
        reason = read_last_error(server.log, server.log_offset) or reason
    log = f"; its log is {server.log}"
    if results_path is None:
        return (
            f"Prefect's {server.kind} server {event} before anything ran{reason and f' ({reason})'}{log}. Run it again"
        )
    return (
        f"Prefect's {server.kind} server {event} while the flow ran{reason and f' ({reason})'}{log}; the results so "
        f"far are in {results_path}: run again with the same results_path (--results-path, or --resume) to run only "
        "the rest"
    )


async def _check_configured_server(url: str) -> None:
    from .prefect_client import make_client

    async with make_client() as client:
        await check_server(client, url, "unset PREFECT_API_URL to run without")


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


_start_lock = threading.Lock()  # Two flows that begin at one time share one server.
_launched: "ServerProcess | None" = None  # the embedded server of this process, unless Prefect started its own before


def _start_embedded_server() -> _UsedServer:
    """Return the embedded server of this process, and start it unless it runs. Raises ConfigurationError."""
    from .server.launch import get_log_path

    try:
        with _start_lock:
            process = _get_running_process()
    except ConfigurationError:
        raise
    except Exception as error:
        sentence = (
            f"Prefect's embedded server did not start: {error} (its log is {get_log_path()}). Nothing "
            "ran: check PREFECT_HOME, or start a server and set PREFECT_API_URL"
        )
        raise ConfigurationError(sentence) from error
    return _UsedServer("embedded", process.poll, get_log_path(), _launched.log_offset if _launched else 0)


def _get_running_process() -> "subprocess.Popen[Any]":
    """Return the process of the server that Prefect's clients in this process use, and start it unless it runs.

    If the process cannot open its database, Prefect would start it again and again. If the process ends for another
    reason, Prefect would wait for two minutes.
    """
    global _launched
    from .server.launch import ServerProcess, build_embedded_environment, get_log_path

    def launch() -> ServerProcess:
        return ServerProcess.launch(get_log_path(), build_embedded_environment())

    # The import of Prefect's server takes a second. If this process has not imported it yet, start the server's process
    # first, so that both import at the same time.
    ahead = launch() if "prefect.server.api.server" not in sys.modules else None
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()
    if server.server_process is not None and server.server_process.poll() is None:
        return server.server_process
    server.stop()  # Prefect does not restart a server that has ended.
    server = SubprocessASGIServer()
    server.running = True  # Prefect's clients start a server that does not run.
    try:
        _launched = ahead or launch()
        server.port, server.server_process = _launched.port, _launched.process
        _launched.wait_until_ready(_get_startup_timeout())
    except BaseException:
        server.stop()
        raise
    atexit.register(server.stop)
    # At the end of the process Prefect logs that it stops the server. If the log's stream is closed by then, as in
    # pytest, logging prints an error on the terminal.
    atexit.register(logging.getLogger("prefect").setLevel, logging.WARNING)
    return _launched.process


def _get_startup_timeout() -> float:
    """Return the seconds to wait for the server. Prefect read its settings before ours were in the environment."""
    from prefect.settings import get_current_settings

    ephemeral = get_current_settings().server.ephemeral
    if "startup_timeout_seconds" in ephemeral.model_fields_set:
        return ephemeral.startup_timeout_seconds
    return float(os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])


@contextmanager
def _apply_server_settings() -> Iterator[None]:
    """Put our settings into the environment, which the server's process inherits, until the context ends."""
    missing = {name: value for name, value in _list_server_settings().items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
