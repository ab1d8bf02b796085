"""The server of the stand-in, which counts every call and injects faults."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from ..process import answer_requests, say_hello
from .account import Account
from .answers import Refused, refuse
from .api import ApiCalls
from .settings import Settings
from .toolbox import LOGS, ToolboxCalls


class Server:
    """All calls as an ASGI application."""

    def __init__(self, account: Account) -> None:
        import socketio
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        self.account = account
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.random = random.Random(account.settings.seed)
        toolbox = ToolboxCalls(account)
        table: list[Any] = [
            Route(path, self.answering(handler), methods=[method])
            for group in (ApiCalls(account), toolbox)
            for method, path, handler in group.routes
        ]
        table.append(WebSocketRoute(LOGS, toolbox.follow))
        self.app = socketio.ASGIApp(account.events, Starlette(routes=table), socketio_path="api/socket.io")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Count the call, and inject a fault if the settings say so."""
        path = scope.get("path", "")
        if (
            scope["type"] not in ("http", "websocket")
            or not path.startswith(("/api/", "/toolbox/"))
            or "socket.io" in path
        ):
            await self.app(scope, receive, send)
            return
        label = f"{scope.get('method', 'WS')} {generic(path)}"
        self.counts[label] += 1
        fault = self.fault(label)
        if fault == "delay":
            resets = self.account.resets
            if scope["type"] == "http":  # the call is executed even if its client stops waiting
                receive = play(await read_message(receive))
            await self.account.pass_seconds("fault_delay_s")
            if resets != self.account.resets:
                self.account.drop(scope)
                return
        elif fault.isdigit():
            settings = self.account.settings
            await refuse(scope, receive, send, int(fault), settings.retry_after_s, settings.fault_message)
            return
        elif fault in ("drop", "lost"):
            # A lost answer: the call was executed.
            if (fault == "lost" or self.random.random() < 0.5) and scope["type"] == "http":
                await self.app(scope, receive, nowhere)
            self.account.drop(scope)
            return
        elif fault == "repeat":  # the real proxy repeats calls: libs/common-go/pkg/proxy/retry_transport.go
            message = await read_message(receive)
            await self.app(scope, play(message), nowhere)
            receive = play(message)
        await self.app(scope, receive, send)

    def fault(self, label: str) -> str:
        settings = self.account.settings
        if settings.fault_rate <= 0 or not re.search(settings.fault_where, label):
            return ""
        if settings.fault_times is not None and self.faults.total() >= settings.fault_times:
            return ""
        if self.random.random() >= settings.fault_rate:
            return ""
        kind = self.random.choice(settings.faults)
        self.faults[kind] += 1
        return kind

    def answering(self, handler: Any) -> Any:
        from starlette.responses import JSONResponse, Response

        async def endpoint(request: Any) -> Any:
            try:
                if request.headers.get("authorization") != f"Bearer {self.account.settings.key}":
                    raise Refused(401, "Invalid credentials")
                result = await handler(request)
            except Refused as error:
                return JSONResponse(error.body, error.status, error.headers)
            if isinstance(result, Response):
                return result
            return Response(status_code=204) if result is None else JSONResponse(result)

        return endpoint

    def ask_state(self) -> dict[str, Any]:
        """Return the state, and the count of each call and fault."""
        account = self.account
        return {
            "sandboxes": [
                {**box.dto(), "body": box.body, "exit_codes": box.list_exit_codes()} for box in account.boxes.values()
            ],
            "volumes": [{**volume.dto(), "folder": str(volume.folder)} for volume in account.volumes.values()],
            "snapshots": [snapshot.dto() for snapshot in account.snapshots.values()],
            "counts": dict(self.counts),
            "faults": dict(self.faults),
            "created": account.created,
            "destroyed": account.destroyed,
            "peak": account.peak,
        }

    def ask_set(self, snapshot_changes: dict[str, dict[str, Any]] | None = None, **settings: Any) -> None:
        """Change settings, and fields of snapshots by their names."""
        for snapshot in self.account.snapshots.values():
            vars(snapshot).update((snapshot_changes or {}).get(snapshot.name, {}))
        self.account.configure(dataclasses.replace(self.account.settings, **settings))
        self.random = random.Random(self.account.settings.seed)
        self.faults.clear()

    def ask_cut(self) -> None:
        """Break every connection that follows a log."""
        self.account.cut()

    async def ask_reset(self) -> None:
        """Remove everything, and restore the first settings."""
        await self.account.reset()
        self.counts.clear()
        self.ask_set()


async def nowhere(_message: Any) -> None:
    """Discard a message of an answer."""


async def read_message(receive: Any) -> dict[str, Any]:
    """Read a call's whole body into one message."""
    body, is_complete = b"", False
    while not is_complete:
        message = await receive()
        body, is_complete = body + message.get("body", b""), not message.get("more_body")
    return {"type": "http.request", "body": body}


def play(message: dict[str, Any]) -> Any:
    """Return a `receive` function that returns the message, and then a disconnect."""
    messages = iter((message,))

    async def receive() -> dict[str, Any]:
        return next(messages, {"type": "http.disconnect"})

    return receive


def generic(path: str) -> str:
    """Return a path with its names replaced by *, so that calls can be counted."""
    path = re.sub(r"/(sandbox|toolbox|session|command|by-name)/[^/]+", r"/\1/*", path)
    return re.sub(r"^(/api/(?:volumes|snapshots))/(?!by-name)[^/]+", r"\1/*", path)


async def serve(is_piped: bool) -> None:
    """Serve on loopback until SIGINT, SIGTERM or, if it is piped, the end of standard input; then clean up."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    if sys.version_info < (3, 12):
        watcher = asyncio.PidfdChildWatcher()  # the default in 3.11 takes a thread per process
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.get_event_loop_policy().set_child_watcher(watcher)
    root = Path(tempfile.mkdtemp(prefix="daytona-standin-"))
    account = Account(Settings(), root)

    class Protocol(H11Protocol):
        """A protocol that records each connection, so that the server can drop it."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if self.client is not None:
                account.transports[self.client] = transport

        def connection_lost(self, exc: Exception | None) -> None:
            account.transports.pop(self.client, None)
            super().connection_lost(exc)

    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    # asyncio does not set TCP_NODELAY for a given socket; without it an answer's body would arrive 40 ms after its
    # head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    account.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = Server(account)
    config = uvicorn.Config(
        server, http=Protocol, ws="websockets-sansio", log_level="error", lifespan="off", access_log=False,
        timeout_graceful_shutdown=1, ws_ping_interval=None,
    )  # fmt: skip
    running = uvicorn.Server(config)
    url, key = f"{account.base}/api", account.settings.key
    say_hello({"url": url, "key": key}, is_piped=is_piped, DAYTONA_API_KEY=key, DAYTONA_API_URL=url)
    tasks = [asyncio.create_task(account.reap())]
    if is_piped:
        tasks.append(asyncio.create_task(answer_requests(server, lambda: setattr(running, "should_exit", True))))
    try:
        await running.serve(sockets=[listening])
    finally:
        for task in tasks:
            task.cancel()
        processes = [process for box in account.boxes.values() for process in box.processes]
        for box in account.boxes.values():
            box.kill()
        for process in processes:
            await process.wait()
        shutil.rmtree(root, ignore_errors=True)
