"""Everything that runs of deployments need, in one command: a Prefect server, the deployments and a worker."""

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_API_PORT,
    get_current_settings,
    temporary_settings,
)
from prefect.states import Crashed

from ..blocks.worker_consent import ALLOWED_PATHS
from ..flows.child_process import describe_exit_status
from ..flows.server.launch import create_prefect_home
from ..sandbox.errors import ConfigurationError
from .deploy import deploy
from .server import WORK_POOL, PrefectServer
from .worker import PrefectWorker

DEFAULT_PORT = 4200  # Prefect's own
POLL_INTERVAL_SECONDS = 0.5  # between two looks at the children
STATE_TIMEOUT_SECONDS = 10.0  # for the server to take in how flow runs ended
PR_SET_CHILD_SUBREAPER = 36


def up(port: int | None = None, database: str | None = None, auth: str | None = None) -> None:
    """Runs a server and a worker until SIGINT, SIGTERM or SIGHUP, and then ends both, the flow runs first.

    `port` is Prefect's own by default, 4200. The database is SQLite's `prefect.db` in PREFECT_HOME (`~/.prefect` by
    default), or the one at the URL `database`, with all that was done before. `auth` is the name and password that the
    server asks everybody for, as NAME:PASSWORD; by default those of PREFECT_SERVER_API_AUTH_STRING, or none. Raises
    ConfigurationError where it is up already, where the port is taken, and where the server or the worker does not
    start or ends by itself.
    """
    home = PREFECT_HOME.value()
    port = int(PREFECT_SERVER_API_PORT.value() or DEFAULT_PORT) if port is None else port
    if not 0 < port < 65536:
        raise ConfigurationError(f"there is no port {port}: it is a number from 1 to 65535")
    url = None if database is None else _add_async_driver(database)
    auth = _find_password(auth)
    server = PrefectServer(home, port, url, auth)
    client: dict[Any, Any] = {PREFECT_API_URL: server.url, **({} if auth is None else {PREFECT_API_AUTH_STRING: auth})}
    worker = PrefectWorker(home, server.url, WORK_POOL, auth, find_allowed_paths())
    with _hold_home_lock(home, server.url), temporary_settings(client):
        asyncio.run(_run(server, worker, home, _describe_database(url, home)))


async def _run(server: PrefectServer, worker: PrefectWorker, home: Path, database: str) -> None:
    work = asyncio.ensure_future(_start_and_watch(server, worker, home, database))
    _install_signal_handlers(work)
    if sys.platform == "linux":
        # The flow runs of a worker that was killed become our children, whom we can end.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server.launch()
    try:
        print(f"Starting a Prefect server (half a minute the first time); its log is {server.log}", flush=True)
        print(_describe_access(server), flush=True)
        with suppress(asyncio.CancelledError):
            await work
    finally:
        has_worker = worker.pid is not None
        if has_worker:
            print("Ending the flow runs, the worker and the server.", flush=True)
        await worker.end(but=(server.pid,))
        if worker.ended_flow_runs and server.poll_exit_status() is None:
            await _mark_crashed(worker.ended_flow_runs)
        server.end()
        if has_worker or work.cancelled():
            print("Ended. What was done is there again next time.", flush=True)


async def _start_and_watch(server: PrefectServer, worker: PrefectWorker, home: Path, database: str) -> None:
    """Starts what is missing, and watches it. Raises ConfigurationError if the server or the worker ends by itself."""
    await asyncio.to_thread(server.wait_until_ready)
    report = await deploy()
    since = await _read_last_heartbeat(worker.name)
    worker.launch()
    await _wait_for_worker(worker, since)
    count = len(report.created) + len(report.updated)
    _print_addresses(server, worker, home, database, f"{count} deployments in the work pool {WORK_POOL}")
    while True:
        for what, process in (("server", server), ("worker", worker)):
            status = process.poll_exit_status()
            if status is not None:
                raise ConfigurationError(
                    f"the Prefect {what} has ended by itself, with {describe_exit_status(status)}: see {process.log}"
                )
        _reap_adopted_children(but=(server.pid, worker.pid))
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


def _install_signal_handlers(work: asyncio.Future[None]) -> None:
    """Cancels `work` at each of them, to the end of the process: one more must not end what follows it half-way."""
    loop = work.get_loop()

    def request_end(*_: object) -> None:
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(work.cancel)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, request_end)


def _reap_adopted_children(but: tuple[int | None, ...]) -> None:
    """Reaps the adopted children that have ended: until somebody does, each keeps its id."""
    with suppress(ChildProcessError):
        # A look first: how our own two have ended is for them to tell.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in but:
            os.waitpid(ended.si_pid, 0)


async def _read_last_heartbeat(name: str) -> Any:
    """When the server last heard of a worker of that name, None if never."""
    async with get_client() as client:
        workers = await client.read_workers_for_work_pool(WORK_POOL)
    return next((worker.last_heartbeat_time for worker in workers if worker.name == name), None)


async def _wait_for_worker(worker: PrefectWorker, since: Any) -> None:
    """Returns when the server has heard of the worker. Raises ConfigurationError if it ends instead."""
    while await _read_last_heartbeat(worker.name) == since:
        status = worker.poll_exit_status()
        if status is not None:
            raise ConfigurationError(
                f"the Prefect worker did not start, but ended with {describe_exit_status(status)}: see {worker.log}"
            )
        await asyncio.sleep(0.2)


async def _mark_crashed(flow_runs: set[str]) -> None:
    """Sets the state of flow runs that were ended with the worker to Crashed."""
    message = "rlm-batch up was ended while this ran: retry the flow run to run only what has no result yet"
    with suppress(httpx.HTTPError, ObjectNotFound, TimeoutError):
        async with asyncio.timeout(STATE_TIMEOUT_SECONDS), get_client() as client:
            for flow_run in map(UUID, flow_runs):
                state = (await client.read_flow_run(flow_run)).state
                if state is None or state.is_crashed() or not state.is_final():
                    await client.set_flow_run_state(flow_run, Crashed(message=message), force=True)


@contextmanager
def _hold_home_lock(home: Path, url: str) -> Iterator[None]:
    """Holds this home's lock. Raises ConfigurationError where another `up`, on the same database, has it."""
    create_prefect_home(home)
    with (home / "rlm-batch-up.json").open("a+") as lock:
        lock.seek(0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = {"pid": "?", "url": "another port"}
            with suppress(ValueError):  # it is being written
                holder = json.load(lock)
            raise ConfigurationError(
                f"rlm-batch is up already, as process {holder['pid']}: use it with PREFECT_API_URL={holder['url']}, or "
                f"end it with Ctrl-C where it runs (its home is {home}; another PREFECT_HOME has a server of its own)"
            ) from None
        lock.truncate(0)
        json.dump({"pid": os.getpid(), "url": url}, lock)
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def _add_async_driver(database: str) -> str:
    """The URL with the driver that Prefect's server wants. Raises ConfigurationError for one that it cannot use."""
    scheme, colon, rest = database.partition("://")
    drivers = {"postgres": "postgresql+asyncpg", "postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    scheme = drivers.get(scheme, scheme)
    if not colon or scheme not in drivers.values():
        raise ConfigurationError(
            "the database's URL is not one that a Prefect server can use: it is postgresql://USER:PASSWORD@HOST/NAME, "
            "or sqlite:////PATH"
        )
    return f"{scheme}://{rest}"


def _find_password(auth: str | None) -> str | None:
    """What the server asks for, as NAME:PASSWORD, or None. Raises ConfigurationError for another form, without it."""
    auth = (PREFECT_SERVER_API_AUTH_STRING.value() or None) if auth is None else auth
    if auth is not None:
        name, _, password = auth.partition(":")
        # Prefect compares them as ASCII, and fails on anything else.
        if not name.strip() or not password.strip() or not auth.isascii():
            raise ConfigurationError(
                "what the server is to ask for (--auth, or PREFECT_SERVER_API_AUTH_STRING) is not a name, a colon and "
                "a password in ASCII: give it as NAME:PASSWORD"
            )
    return auth


def find_allowed_paths() -> str:
    """What runs may name of this machine: below the user's home and the directory here, or as the user has set it."""
    directories = dict.fromkeys(path for path in (str(Path.home()), os.getcwd()) if os.pathsep not in path)
    return os.environ.get(ALLOWED_PATHS, os.pathsep.join(directories))


def _describe_access(server: PrefectServer) -> str:
    """Who can do what with the server."""
    address = urlsplit(server.url).netloc
    if server.has_password:
        return f"Whoever can reach {address} on this machine and has the password can run code as this user."
    return (
        f"Whoever can reach {address} on this machine can run code as this user, and so can every other user of "
        "the machine: with PREFECT_SERVER_API_AUTH_STRING=NAME:PASSWORD in its environment the server asks for that."
    )


def _describe_database(database: str | None, home: Path) -> str:
    """The database of the server for people, without its password."""
    from sqlalchemy.engine import make_url

    setting = get_current_settings().server.database.connection_url
    url = database or (None if setting is None else setting.get_secret_value())
    if url is None:
        return str(home / "prefect.db")
    parts = make_url(url)
    return str(parts.database) if parts.drivername.startswith("sqlite") else parts.render_as_string(hide_password=True)


def _print_addresses(server: PrefectServer, worker: PrefectWorker, home: Path, database: str, deployments: str) -> None:
    prefect = Path(sys.executable).with_name("prefect")
    command = "prefect" if shutil.which("prefect") == str(prefect) else str(prefect)
    password = "  export PREFECT_API_AUTH_STRING=NAME:PASSWORD\n" if server.has_password else ""
    print(
        f"""
Up, with {deployments}. Ctrl-C ends it.

  UI        {server.url.removesuffix("/api")}
  database  {database}
  logs      {home}/server.log, {home}/worker.log
  files     runs may use those below {worker.allowed_paths or "no directory"}

In another terminal:

{password}  export PREFECT_API_URL={server.url}
  {command} deployment run sweep/local --watch
""",
        flush=True,
    )
