"""The command `rlm-batch up`: a Prefect server, our deployments and a worker, until Ctrl-C."""

import asyncio
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter
from prefect.settings import (
    PREFECT_HOME,
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_API_PORT,
    get_current_settings,
)

from ..blocks.worker_policy import list_policy_files, read_policy
from ..flows.child_process import STOP_GRACE_SECONDS, describe_exit_status, end_process, list_children, start_module
from ..flows.prefect_server import use_settings
from ..flows.server.process import ServerProcess, build_environment, create_prefect_home
from ..sandbox.errors import ConfigurationError
from ..sandbox.file_lock import try_lock
from .deploy import WORK_POOL, deploy
from .worker import HOOK_GRACE_SECONDS, RUN_GRACE_SECONDS, signal_flow_runs

QUERY_SECONDS = "2"  # seconds between a worker's queries for due runs; Prefect's 10 s suit many workers
POLL_SECONDS = 0.5  # seconds between two checks of the server and the worker
MAX_RUNS = 1000  # flow runs at a time; the deployments have lower limits
KILL_GRACE_SECONDS = 5.0  # seconds in which the kernel ends killed processes
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36


def up(
    *,
    port: Annotated[int | None, Parameter(metavar="PORT")] = None,
    database: Annotated[str | None, Parameter(metavar="URL")] = None,
    auth: Annotated[str | None, Parameter(metavar="NAME:PASSWORD")] = None,
) -> None:
    """Run a server and a worker until SIGINT, SIGTERM or SIGHUP, then end the flow runs, worker and server.

    Args:
        port: Port of the server and its UI on this machine; by default 4200
        database: Postgres database instead of SQLite, for several people or machines:
            postgresql://USER:PASSWORD@HOST/NAME
        auth: Name and password for the server. Clients set them in PREFECT_API_AUTH_STRING. Every user of the machine
            can see this option in the list of processes, but not the variable PREFECT_SERVER_API_AUTH_STRING, which has
            the same effect.

    Raises:
        ConfigurationError: An option is wrong, `up` is already running, or the server or the worker fails or ends.
    """
    home = PREFECT_HOME.value()
    if port is None:
        port = int(PREFECT_SERVER_API_PORT.value() or 4200)
    if not 0 < port < 65536:
        raise ConfigurationError(f"there is no port {port}: it is a number from 1 to 65535")
    if database is not None:
        if not database.startswith("postgresql://"):
            raise ConfigurationError("--database is not a Postgres URL: give postgresql://USER:PASSWORD@HOST/NAME")
        database = database.replace("postgresql://", "postgresql+asyncpg://", 1)
    if auth is None:
        auth = PREFECT_SERVER_API_AUTH_STRING.value() or None
    if auth is not None:
        name, _, password = auth.partition(":")
        is_valid = auth.isascii() and name.strip() and password.strip()
        if not is_valid:
            raise ConfigurationError(
                "--auth, or PREFECT_SERVER_API_AUTH_STRING, is not a name, a colon and a password in ASCII: give it as "
                "NAME:PASSWORD"
            )
    create_prefect_home(home)
    with (home / "rlm-batch-up.lock").open("w") as lock:
        if not try_lock(lock):
            raise ConfigurationError(
                f"rlm-batch is up already in {home}: end it with Ctrl-C where it runs, or set another PREFECT_HOME"
            )
        for number in SIGNALS:
            signal.signal(number, _interrupt)
        try:
            _run(home, port, database, auth)
        except KeyboardInterrupt:
            print("Ended. What was done is there again next time.", flush=True)


def _interrupt(*_: object) -> NoReturn:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # A second signal must not interrupt the shutdown.
    raise KeyboardInterrupt


def _run(home: Path, port: int, database: str | None, auth: str | None) -> NoReturn:
    """Run the server and the worker until they are interrupted.

    Raises:
        ConfigurationError: The server or the worker does not start, or ends.
        KeyboardInterrupt: A signal arrived. The flow runs, the worker and the server have ended.
    """
    if sys.platform == "linux":
        # Linux makes this process the parent of a killed worker's flow runs, so that it can end them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(f"Starting a Prefect server (half a minute the first time); its log is {home / 'server.log'}", flush=True)
    settings = {} if database is None else {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database}
    with (
        ServerProcess.start(home, port=port, auth=auth, settings=settings) as server,
        use_settings(server.url, auth),
    ):
        deployments = asyncio.run(deploy())
        worker = _start_worker(home, server.url, auth)
        try:
            _print_addresses(server, home, auth, len(deployments))
            _watch(server, worker, home)
        finally:
            print("Ending the flow runs, the worker and the server.", flush=True)
            # The worker ends its flow runs first.
            end_process(worker, RUN_GRACE_SECONDS + HOOK_GRACE_SECONDS + STOP_GRACE_SECONDS)
            _end_adopted_flow_runs(server)


def _start_worker(home: Path, api_url: str, auth: str | None) -> subprocess.Popen[bytes]:
    """Start a worker of our work pool, whose log is `worker.log` in `home`."""
    environment = build_environment(home)
    if "query_seconds" not in get_current_settings().worker.model_fields_set:
        environment["PREFECT_WORKER_QUERY_SECONDS"] = QUERY_SECONDS
    environment["PREFECT_API_URL"] = api_url
    if auth is not None:
        environment["PREFECT_API_AUTH_STRING"] = auth
    words = ("rlm_batch.cli.main", "worker", "--name", f"rlm-batch@{platform.node()}", "--limit", MAX_RUNS)
    return start_module(*words, log=home / "worker.log", environment=environment)


def _watch(server: ServerProcess, worker: subprocess.Popen[bytes], home: Path) -> NoReturn:
    """Wait until the server or the worker ends, and then raise ConfigurationError.

    The adopted flow runs are children too, and stay as zombies unless this process waits for them.
    """
    names = {server.process.pid: "server", worker.pid: "worker"}
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in names:
            reason = describe_exit_status(os.waitstatus_to_exitcode(status))
            raise ConfigurationError(
                f"the Prefect {names[pid]} has ended by itself, with {reason}: see {home}/{names[pid]}.log"
            )
        if pid == 0:
            time.sleep(POLL_SECONDS)


def _end_adopted_flow_runs(server: ServerProcess) -> None:
    """End the flow runs of a worker that was killed. They get SIGTERM, and SIGKILL after `RUN_GRACE_SECONDS`."""
    signalled: set[int] = set()
    deadline = time.monotonic() + RUN_GRACE_SECONDS
    while time.monotonic() < deadline + KILL_GRACE_SECONDS:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # `list_children` lists ended children, too.
                pass
        pids = set(list_children(os.getpid())) - {server.process.pid}
        if not pids:
            return
        signal_flow_runs(pids, signalled, is_late=time.monotonic() > deadline)
        time.sleep(0.1)


def _print_addresses(server: ServerProcess, home: Path, auth: str | None, count: int) -> None:
    """Print where the server, its logs and files are, who can use it, and a command that runs a deployment."""
    prefect = Path(sys.executable).with_name("prefect")
    command = "prefect" if shutil.which("prefect") == str(prefect) else str(prefect)
    files = ", ".join(read_policy().allowed_paths) or f"none: name directories in {list_policy_files()[-1]}"
    users, export_password = "everyone on this machine; --auth NAME:PASSWORD asks them for a password", ""
    if auth is not None:
        users, export_password = "those with the password", "  export PREFECT_API_AUTH_STRING=NAME:PASSWORD\n"
    print(
        f"""
Up, with {count} deployments in the work pool {WORK_POOL}. Ctrl-C ends it.

  UI        {server.ui_url}
  logs      {home}/server.log, {home}/worker.log
  files     runs may use those below {files}
  users     who can run code here as you: {users}

In another terminal:

{export_password}  export PREFECT_API_URL={server.url}
  {command} deployment run rlm-sweep/local --watch
""",
        flush=True,
    )
