"""Prefect's server with our guard around it: what uvicorn serves in the servers that rlm-batch starts."""

import asyncio
import atexit
import fcntl
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx
from prefect.server.api.middleware import CsrfMiddleware
from prefect.server.api.server import SubprocessASGIServer, create_app
from prefect.server.database import alembic_commands
from prefect.settings import PREFECT_HOME, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, get_current_settings
from starlette.middleware import Middleware

from ..child_process import read_failure_reason
from .garbage_collector import collect_in_thread
from .launch import LaunchedServer, get_log_path, launch_server
from .origin_guard import EXTERNAL, OriginGuard, split_origins

if TYPE_CHECKING:
    from alembic.config import Config

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]

PREFECT_ALEMBIC_CONFIG = alembic_commands.alembic_config
START_ATTEMPTS = 3  # for a port that somebody takes between the look and the start


def create_guarded_app() -> OriginGuard:
    """Prefect's application, as its settings in this process want it, behind the guard of its CORS origins.

    This process is the server's from then on: its garbage is collected in a thread of its own.
    """
    alembic_commands.alembic_config = _build_alembic_config
    app = create_app(final=True)
    app.router.lifespan_context = _start_one_at_a_time(app.router.lifespan_context)
    app.user_middleware = [
        Middleware(ExternalCsrfMiddleware) if middleware.cls is CsrfMiddleware else middleware
        for middleware in app.user_middleware
    ]
    collect_in_thread()
    return OriginGuard(app, split_origins(get_current_settings().server.api.cors_allowed_origins))


def _start_one_at_a_time(lifespan: Lifespan) -> Lifespan:
    """Return the lifespan of an application that starts only while no other one starts on the same PREFECT_HOME.

    A start migrates the database and registers the types of blocks. Two servers that do so at the same time on a new
    database both find it empty, and the slower one fails on what the faster one has created (Prefect 3.8).
    """

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            with ExitStack() as lock:
                await asyncio.to_thread(_take_start_lock, lock)
                state = await stack.enter_async_context(lifespan(app))
            yield state

    return run


def _take_start_lock(stack: ExitStack) -> None:
    """Wait for the lock of this PREFECT_HOME, which is released when `stack` closes or this process ends.

    Where the lock is impossible, as in a read-only directory or on NFS without locks, the server starts without it.
    """
    with suppress(OSError):
        file = stack.enter_context((PREFECT_HOME.value() / "server-start.lock").open("ab"))
        fcntl.flock(file, fcntl.LOCK_EX)


def _build_alembic_config() -> "Config":
    """Return Prefect's settings for migrations without the working directory, which they put in front of sys.path."""
    config = PREFECT_ALEMBIC_CONFIG()
    config.set_main_option("prepend_sys_path", "")
    return config


class ExternalCsrfMiddleware(CsrfMiddleware):
    """Prefect's check of tokens, for what comes from outside: the server's own automations have none (Prefect 3.8)."""

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        if request.scope.get(EXTERNAL):
            return await super().dispatch(request, call_next)
        return await call_next(request)


class GuardedSubprocessServer(SubprocessASGIServer):
    """The server that Prefect embeds in a program, with the guard around it. Prefect's clients find it as its own.

    What it says goes to `embedded-server.log` in PREFECT_HOME, from the byte `log_offset` on.
    """

    log_offset = 0

    def start(self, timeout: int | None = None, launched: LaunchedServer | None = None) -> None:
        """Returns when it answers. Raises RuntimeError, with its own words, where it ends instead or takes too long.

        `launched` is a process of it that has been started already, which this one ends if it is not needed. Prefect's
        own starts a server that has ended with status 3, whose database cannot be opened, again and again, and waits
        two minutes for one that has ended with another.
        """
        if self.running:
            if launched is not None:
                launched.process.kill()
                launched.process.wait()
            return
        self.running = True  # Prefect's clients ask for it too, and start what does not run
        seconds = timeout or PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        deadline, reason = time.monotonic() + seconds, ""
        try:
            for _ in range(START_ATTEMPTS):
                launched = launched or launch_server()
                self.port, self.server_process, self.log_offset = launched.port, launched.process, launched.log_offset
                launched = None
                while self.server_process.poll() is None and time.monotonic() < deadline:
                    if self._answers():
                        atexit.register(self.stop)
                        return
                    time.sleep(0.1)
                if self.server_process.poll() is None:
                    raise RuntimeError(f"it did not answer within {seconds} s")
                reason = read_failure_reason(get_log_path(), self.log_offset)
                if "address already in use" not in reason:  # by somebody who was faster
                    break
            raise RuntimeError(reason)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        try:
            # It has no TLS: to read the certificates for one call takes a processor for 25 ms.
            return httpx.get(f"{self.api_url}/health", timeout=5.0, verify=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


class _GoneHandler(BaseHTTPRequestHandler):
    """Answers everything, web sockets too, with a status that no client tries again."""

    def _answer(self) -> None:
        body = json.dumps({"detail": "Prefect's embedded server has ended."}).encode()
        self.send_response(HTTPStatus.GONE)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: whoever called the flow is told."""


_ended_ports: set[int] = set()


def answer_for_ended_server(server: SubprocessASGIServer) -> None:
    """Answers at the address of an embedded server whose process has ended, for as long as this process lives.

    Prefect's clients try again for minutes where nobody answers: for the run's last state, and at the end of the
    process for each event and each line of the log that is still to be delivered.
    """
    if server.port is None or server.port in _ended_ports:
        return
    with suppress(OSError):  # somebody else has the port: then they are told nothing
        gone = ThreadingHTTPServer(("127.0.0.1", server.port), _GoneHandler)
        _ended_ports.add(server.port)
        threading.Thread(target=gone.serve_forever, daemon=True).start()
