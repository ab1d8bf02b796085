"""The Prefect servers that rlm-batch starts, as their processes run them: Prefect's application, closed to web pages.

    python -m rlm_batch.flows.server.app SOCKET LOG_LEVEL [STATE_FILE IDLE_SECONDS]

SOCKET is the number of an inherited socket on loopback. With a state file, the server is shared (`shared_process.py`).

A client of the API can run code, and a browser sends requests of any web page to a server on this machine.
Prefect's settings for CORS and CSRF keep pages of other origins from reading answers and from changing anything by a
request. This module prevents three other attacks:

- A page whose host name is made to point to this machine (DNS rebinding) has the server's own origin. That name is in
  the `Host` header, which `TrustedHostMiddleware` checks.
- Neither CORS nor CSRF tokens cover web sockets. Through a web socket, a page could read events and logs, and send
  events that start runs.
- A page could show the UI in a frame and make a person click in it.
"""

import asyncio
import fcntl
import re
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database import alembic_commands
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.settings import PREFECT_HOME, get_current_settings
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from .shared_process import SharedServerProcess

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]

PREFECT_ALEMBIC_CONFIG = alembic_commands.alembic_config
PREFECT_BEGIN_TRANSACTION = AioSqliteConfiguration.begin_transaction


def create_closed_app() -> ASGIApp:
    """Return Prefect's application, closed to web pages whose origins are not in Prefect's setting for CORS.

    The server's automations call Prefect's application in the same process, without these checks.
    """
    alembic_commands.alembic_config = _build_alembic_config
    AioSqliteConfiguration.begin_transaction = _begin_in_turn  # type: ignore[method-assign]
    app = create_app(final=True)
    app.router.lifespan_context = _start_one_at_a_time(app.router.lifespan_context)
    origins = get_current_settings().server.api.cors_allowed_origins.split(",")
    if "*" in origins:
        return app
    hosts = [re.sub(r":\d+$", "", urlsplit(origin).netloc) for origin in origins]
    return TrustedHostMiddleware(PageMiddleware(app, origins), allowed_hosts=hosts, www_redirect=False)


class PageMiddleware:
    """Refuse web sockets of pages of other origins, and forbid these pages to show the server's pages in frames."""

    def __init__(self, app: ASGIApp, origins: list[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection to the application, or close it."""
        origin = Headers(scope=scope).get("origin") if scope["type"] == "websocket" else None

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("Content-Security-Policy", "frame-ancestors 'self'")
            await send(message)

        if origin is None or origin in self._origins:  # Programs send no origin.
            await self._app(scope, receive, send_unframed)
        else:
            await WebSocketClose(code=1008)(scope, receive, send)


def _start_one_at_a_time(lifespan: Lifespan) -> Lifespan:
    """Return the lifespan of an application that starts only while no other one starts with the same PREFECT_HOME.

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

    If locks are impossible, as in a read-only directory or on NFS without locks, the server starts without it.
    """
    with suppress(OSError):
        file = stack.enter_context((PREFECT_HOME.value() / "server-start.lock").open("ab"))
        fcntl.flock(file, fcntl.LOCK_EX)


@dataclass
class Transaction:
    """A transaction on SQLite that has its turn to write until it ends."""

    is_open: bool = True


CURRENT_TRANSACTION: ContextVar[Transaction | None] = ContextVar("CURRENT_TRANSACTION", default=None)
WRITER_TURN = asyncio.Lock()


@asynccontextmanager
async def _begin_in_turn(
    configuration: AioSqliteConfiguration, session: "AsyncSession", with_for_update: bool = False
) -> AsyncGenerator["AsyncSessionTransaction", None]:
    """Begin a transaction on SQLite when all earlier transactions of this server have ended.

    SQLite has one writer at a time. Prefect 3.9.1 lets each transaction take a connection and wait within SQLite, which
    has three effects:

    - A transaction that has read before it writes is refused ("database is locked") if another one wrote meanwhile.
      The server answers 503.
    - The garbage collector closes the cursors of refused statements. SQLite lets it wait while the same connection
      waits to write. If it runs in the thread of the event loop, no transaction can end, and the server stands still
      for 60 s, until SQLite gives up.
    - The pool has 15 connections. If all of them wait, the transaction that writes gets no second one: 20 requests to
      pause a work queue, sent at the same time, were answered after 61 s, 16 of them by errors.

    A transaction that waits here has no connection. A session within a transaction does not wait for it. A task that
    a transaction has started, and that lives longer, waits like others.
    """
    outer = CURRENT_TRANSACTION.get()
    if outer is not None and outer.is_open:
        async with PREFECT_BEGIN_TRANSACTION(configuration, session, with_for_update) as transaction:
            yield transaction
        return
    async with WRITER_TURN:
        current = Transaction()
        token = CURRENT_TRANSACTION.set(current)
        try:
            async with PREFECT_BEGIN_TRANSACTION(configuration, session, True) as transaction:
                await session.connection()
                # A session within this transaction must not wait for it.
                SQLITE_BEGIN_MODE.set("DEFERRED")
                yield transaction
        finally:
            current.is_open = False
            CURRENT_TRANSACTION.reset(token)


def _build_alembic_config() -> "Config":
    """Return Prefect's settings for migrations, changed so that sys.path does not get the working directory."""
    config = PREFECT_ALEMBIC_CONFIG()
    config.set_main_option("prepend_sys_path", "")
    return config


def main(number: str, log_level: str, state_file: str | None = None, idle_seconds: str = "0") -> None:
    """Serve until a signal. A shared server also ends when it is idle."""
    api = get_current_settings().server.api
    config = uvicorn.Config(
        create_closed_app(),
        lifespan="on",
        log_level=log_level,
        timeout_keep_alive=api.keepalive_timeout,
        ws_ping_interval=api.websocket_ping_interval,
        ws_ping_timeout=api.websocket_ping_timeout,
    )
    listener = socket.socket(fileno=int(number))
    if state_file is None:
        server = uvicorn.Server(config)
    else:
        server = SharedServerProcess(config, listener, Path(state_file), float(idle_seconds))
    server.run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
