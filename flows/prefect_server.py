"""The settings of every Prefect server that rlm-batch starts: its own, and the one that Prefect embeds in a program.

Measured on two cores, 500 task runs: the recorder in batches takes a task run from 25 to 9 ms of the server's CPU, and
all of them are recorded 2 s after the last instead of 11 s. An empty PREFECT_HOME makes the first start migrate a
database for 16 to 28 s, for which Prefect's own 20 s are too few. Leases in memory would be forgotten by a server that
starts again, and the slots of whoever held them never come back. A task that waits for a slot of its tag's limit asks
again after up to 10 s by default: 50 tasks of 0.1 s under a limit of 4 took 47 to 67 s, and 22 s at 0.5 s. What changes
something has to come with a token that the server gave: a web page cannot read it (the rest of that is in
server/origin_guard.py).
"""

import asyncio
import atexit
import contextvars
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx

from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..tasks.server_errors import describe_server_error
from .child_process import build_safe_environment, describe_exit_status, read_last_error
from .proxies import check_proxies

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.server.api.server import SubprocessASGIServer

POLL_INTERVAL_SECONDS = 0.5  # between two looks at the embedded server's process

SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_TASKS_TAG_CONCURRENCY_SLOT_WAIT_SECONDS": "0.5",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


def server_environment() -> dict[str, str]:
    """Return the environment for a server's process: this one's, and our settings where it has none of that name."""
    return build_safe_environment({**SERVER_SETTINGS, **os.environ})


@asynccontextmanager
async def embedded_server(find_results_path: Callable[[], str | None] = lambda: None) -> AsyncIterator[None]:
    """Where no server is configured, the one that Prefect embeds runs within this, with our settings.

    Raises ConfigurationError where there is neither, where the configured one wants a password, and where the embedded
    one fails: what runs within this is cancelled when its process ends, and told where the results so far are, as
    `find_results_path` knows then. The embedded one outlives a Ctrl-C in the terminal, which goes to every process
    there: the flow run that it ends has to be told to the server. So the server starts in a thread that does not take
    the signal, and inherits that.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED

    check_proxies()
    url = PREFECT_API_URL.value()
    if url:
        async with get_client() as client:
            await check_server(client, url, "unset PREFECT_API_URL to run without")
    if url or not PREFECT_SERVER_EPHEMERAL_ENABLED.value():
        yield
        return
    with _apply_server_settings():
        started = Future["SubprocessASGIServer"]()
        started.set_running_or_notify_cancel()  # whoever waits for it may be cancelled: the thread goes on
        # A daemon: what is cancelled meanwhile does not wait for the server.
        threading.Thread(target=contextvars.copy_context().run, args=(_start_server, started), daemon=True).start()
        async with _end_with_server(await asyncio.wrap_future(started), find_results_path):
            yield


@asynccontextmanager
async def _end_with_server(
    server: "SubprocessASGIServer", find_results_path: Callable[[], str | None]
) -> AsyncIterator[None]:
    """What runs within this is cancelled when the server's process ends. Raises ConfigurationError where it failed."""
    from .server.app import answer_for_ended_server

    process = server.server_process
    assert process is not None

    async def watch() -> None:
        while process.poll() is None:  # noqa: ASYNC110 - a process, which tells nobody
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        answer_for_ended_server(server)
        ending.reschedule(asyncio.get_running_loop().time())

    watching: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(None) as ending:
            watching = asyncio.create_task(watch())
            yield
    except RlmBatchError:
        raise
    except Exception as error:
        status = process.poll()
        # Prefect's client has no type of its own for a server that does not tell its version.
        if status is None and not (isinstance(error, httpx.HTTPError) or "Failed to reach API" in str(error)):
            raise
        raise ConfigurationError(_describe_failure(server, status, error, find_results_path())) from error
    finally:
        if watching is not None:
            watching.cancel()


def _describe_failure(
    server: "SubprocessASGIServer", status: int | None, error: Exception, results_path: str | None
) -> str:
    """What became of an embedded server, where its log is, and what is left of the run."""
    from .server.app import GuardedSubprocessServer
    from .server.launch import get_log_path

    what, reason, log = "has failed", describe_server_error(error), ""
    if status is not None:
        what, reason = f"has ended by itself, with {describe_exit_status(status)},", ""
    if isinstance(server, GuardedSubprocessServer):  # one of Prefect's own has no log
        reason = read_last_error(get_log_path(), server.log_offset) or reason
        log = f"; its log is {get_log_path()}"
    if results_path is None:
        return f"Prefect's embedded server {what} before anything ran{reason and f' ({reason})'}{log}. Run it again"
    return (
        f"Prefect's embedded server {what} while the flow ran{reason and f' ({reason})'}{log}; the results so far are "
        f"in {results_path}: run again with the same results_path (--results-path, or --resume) to run only the rest"
    )


async def check_server(client: "PrefectClient", url: str, alternative: str) -> None:
    """Returns if the server at `url` answers and takes the client's password.

    Raises ConfigurationError if it does not; `alternative` is what else there is to do.
    """
    error = await client.api_healthcheck()
    if error is not None:
        silence = (
            f"the Prefect server at {url} does not answer ({describe_server_error(error)}): start it, or {alternative}"
        )
        raise ConfigurationError(_describe_refusal(url, error, alternative) or silence)
    # Health is told to everybody. Other statuses are no answer to this: Prefect Cloud has no such address.
    with suppress(httpx.HTTPError):
        try:
            await client.api_version()
        except ValueError:
            raise ConfigurationError(_describe_other_server(url, alternative)) from None
        except httpx.HTTPStatusError as error:
            refusal = _describe_refusal(url, error, alternative)
            if refusal is not None and error.response.status_code != httpx.codes.NOT_FOUND:
                raise ConfigurationError(refusal) from None


def _describe_refusal(url: str, error: Exception, alternative: str) -> str | None:
    """What the server at `url` wants of who asks it, None where it says nothing of that."""
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
    if status == httpx.codes.UNAUTHORIZED:
        return (
            f"the Prefect server at {url} asks for a password: set PREFECT_API_AUTH_STRING=NAME:PASSWORD, or "
            f"{alternative}"
        )
    if status == httpx.codes.FORBIDDEN:
        return (
            f"the Prefect server at {url} refuses to be asked by that name, or for that user "
            f"({describe_server_error(error)}): take the address that it says when it starts, set "
            f"PREFECT_API_AUTH_STRING=NAME:PASSWORD where it has users, or {alternative}"
        )
    return _describe_other_server(url, alternative) if status == httpx.codes.NOT_FOUND else None


def _describe_other_server(url: str, alternative: str) -> str:
    """That there is no API of Prefect's at `url`: without /api a server answers with its UI."""
    return f"what answers at {url} is no Prefect API: its address ends in /api, so name that, or {alternative}"


_start_lock = threading.Lock()  # two flows that begin at one time share one server


def _start_server(started: "Future[SubprocessASGIServer]") -> None:
    """Starts the embedded server, without the terminal's Ctrl-C, and says in `started` how that went."""
    from .server.launch import LaunchedServer, get_log_path, launch_server

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with _start_lock:
        launched: LaunchedServer | None = None
        try:
            if "prefect.server.api.server" not in sys.modules:  # then there is none yet, whoever would have started it
                launched = launch_server()  # it imports the same as the next line meanwhile
            from .server.app import GuardedSubprocessServer

            server = GuardedSubprocessServer()
            process = server.server_process
            if process is None or process.poll() is not None:
                # One of Prefect's own that did not start would be asked to start again, and one that has ended not.
                server.stop()
                server = GuardedSubprocessServer()
            if isinstance(server, GuardedSubprocessServer):
                server.start(launched=launched)  # rather than one of Prefect's own, which is there already
                # At the end of the process Prefect logs that it stops the server, also where the stream for that is
                # closed, as in pytest: that is an error of logging on the terminal.
                atexit.register(logging.getLogger("prefect").setLevel, logging.WARNING)
        except Exception as cause:  # noqa: BLE001 - it is raised where the server was asked for
            if launched is not None:
                launched.process.kill()
            error = ConfigurationError(
                f"Prefect's embedded server did not start: {cause} (its log is {get_log_path()}). Nothing was run: "
                "look at PREFECT_HOME, or start a server and name it in PREFECT_API_URL"
            )
            started.set_exception(cause if isinstance(cause, ConfigurationError) else error)
            return
    started.set_result(server)


@contextmanager
def _apply_server_settings() -> Iterator[None]:
    """Within this our settings are in the environment, which the server's process inherits, and in Prefect's own.

    Prefect has read the environment long before: what it waits for the server's start is set there too.
    """
    from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as TIMEOUT
    from prefect.settings import temporary_settings

    missing = {name: value for name, value in SERVER_SETTINGS.items() if name not in os.environ}
    os.environ.update(missing)
    defaults: dict[Any, Any] = {TIMEOUT: int(os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])}
    try:
        with temporary_settings(set_defaults=defaults):
            yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
