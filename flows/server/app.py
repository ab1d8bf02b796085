"""The program of a Prefect server that rlm-batch starts: Prefect's application, which refuses other web pages.

    python -m rlm_batch.flows.server.app SOCKET [STATE_FILE IDLE_SECONDS]

SOCKET is the number of an inherited socket on loopback. With a state file, the server is shared (`shared.py`).

A client of the API can run code, and any web page in a browser on this machine can send requests to the server. It
refuses them like this:

- The browser names the page's origin in the `Origin` header of each web socket, and of each request that can change
  something. The server refuses other origins than its own.
- A page can have a host name that points to this machine (DNS rebinding), and then has the server's own origin. The
  server refuses other names in the `Host` header than its own.
- A page could show the UI in a frame and make a person click in it. The server forbids frames.
"""

import asyncio
import fcntl
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import PREFECT_HOME, PREFECT_SERVER_API_AUTH_STRING, get_current_settings
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from ...sandbox.file_lock import try_lock
from ...sandbox.process_identity import read_own_identity
from ..prefect_patches import serialize_sqlite_transactions

END_GRACE_SECONDS = 5  # seconds in which a server answers its last requests; web sockets stay open for longer
TICKS_PER_CHECK = 10  # one check a second, because uvicorn has ten ticks a second
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def create_closed_app() -> ASGIApp:
    """Return Prefect's application. It refuses web pages whose origins are not in Prefect's setting for CORS.

    The server's automations call Prefect's application in the same process, without these checks.
    """
    serialize_sqlite_transactions()
    app = create_app(final=True)
    app.router.lifespan_context = _start_one_at_a_time(app.router.lifespan_context)
    origins = get_current_settings().server.api.cors_allowed_origins.split(",")
    if "*" in origins:
        return app
    hosts = [re.sub(r":\d+$", "", urlsplit(origin).netloc) for origin in origins]
    return TrustedHostMiddleware(PageMiddleware(app, origins), allowed_hosts=hosts, www_redirect=False)


class PageMiddleware:
    """A middleware that refuses pages of other origins, and forbids frames with the server's pages."""

    def __init__(self, app: ASGIApp, origins: list[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection to the application, or refuse it."""
        is_connection = scope["type"] in ("http", "websocket")
        origin = Headers(scope=scope).get("origin") if is_connection else None

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("Content-Security-Policy", "frame-ancestors 'self'")
            await send(message)

        if origin is None or origin in self._origins:  # Programs send no origin.
            await self._app(scope, receive, send_unframed)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008)(scope, receive, send)
        else:
            await PlainTextResponse("Invalid origin header", 403)(scope, receive, send)


def _start_one_at_a_time(lifespan: Lifespan) -> Lifespan:
    """Return a lifespan whose start waits while another server of the same PREFECT_HOME starts.

    A start migrates the database and registers the types of blocks. If two servers start on a new database at the same
    time, both find it empty, and the slower one fails because the tables exist (Prefect 3.8).
    """

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            with (PREFECT_HOME.value() / "server-start.lock").open("ab") as lock:
                with suppress(OSError):  # NFS may have no locks.
                    await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
                state = await stack.enter_async_context(lifespan(app))
            yield state

    return run


class SharedServerProcess(uvicorn.Server):
    """A server that ends when it is idle, or its state file is deleted. The file exists while it listens.

    A program holds a shared lock on the state file while it uses the server, because during a long execution the server
    gets no request. The kernel releases the lock of a program that dies. An idle server ends once it gets the exclusive
    lock.

    Args:
        config: The configuration of uvicorn.
        listener: The socket on which the server listens.
        path: The state file.
        idle_seconds: Seconds without a request after which the server is idle.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, path: Path, idle_seconds: float) -> None:
        super().__init__(config)
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        self._path = path
        self._idle_seconds = idle_seconds
        self._handle = -1  # the open state file
        self._counted_requests, self._active_at = 0, 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, listen, and then write the state file."""
        await super().startup(sockets)
        self._write_state()
        self._active_at = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends: no program uses it, and it is idle or its state file is deleted."""
        if await super().on_tick(counter):
            return True
        is_due = counter % TICKS_PER_CHECK == 0
        # A program may delete its temporary PREFECT_HOME when it ends.
        is_unused = is_due and (self._is_idle() or not self._path.exists())
        return is_unused and try_lock(self._handle)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Remove the state file, unless another server has replaced it, and end the application."""
        try:
            if os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._handle)):
                self._path.unlink()
        except OSError:
            pass  # The file is gone.
        await super().shutdown(sockets)

    def _write_state(self) -> None:
        """Write the state file atomically. It has the password, so only this user can read it."""
        state = {
            "url": self._url,
            "auth": PREFECT_SERVER_API_AUTH_STRING.value(),
            "process": read_own_identity(),
            "started": time.time(),
        }
        partial = self._path.with_suffix(f".{os.getpid()}")
        self._handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.write(self._handle, json.dumps(state).encode())
        partial.replace(self._path)

    def _is_idle(self) -> bool:
        requests = self.server_state.total_requests
        if self.server_state.tasks or requests != self._counted_requests:
            self._counted_requests, self._active_at = requests, time.monotonic()
        return time.monotonic() - self._active_at > self._idle_seconds


def main(socket_number: str, state_file: str | None = None, idle_seconds: str = "0") -> None:
    """Serve until a signal. With a state file, the server also ends when it is idle."""
    settings = get_current_settings().server
    config = uvicorn.Config(
        create_closed_app(),
        lifespan="on",
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        timeout_graceful_shutdown=END_GRACE_SECONDS,
    )
    listener = socket.socket(fileno=int(socket_number))
    if state_file is None:
        server = uvicorn.Server(config)
    else:
        server = SharedServerProcess(config, listener, Path(state_file), float(idle_seconds))
    server.run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
