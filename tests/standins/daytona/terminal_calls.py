"""The calls to a sandbox's daemon for pseudo-terminals, as apps/daemon/pkg/toolbox/process/pty has them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
from typing import Any

from .account import Account
from .answers import Refused, daemon, now, refuse
from .box import Box, die_with_parent
from .toolbox import TOOLBOX

PTY = f"{TOOLBOX}/process/pty"
CONNECT = f"{PTY}/create-connect"
EXIT_CONTROL, ENVS = "X-Daytona-Pty-Exit-Control", "X-Daytona-Pty-Envs~"


class TerminalCalls:
    """Pseudo-terminals, each with a shell."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.terminals: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}  # keys: box and session
        self.processes: dict[tuple[str, str], asyncio.subprocess.Process] = {}  # keys: box and session
        self.tasks = set[asyncio.Task[None]]()
        self.routes: list[tuple[str, str, Any]] = [
            ("POST", f"{PTY}/{{session}}/resize", self.resize),
            ("DELETE", f"{PTY}/{{session}}", self.delete),
        ]

    async def resize(self, request: Any) -> Any:
        key = self.account.box(request, started=True).id, request.path_params["session"]
        if key not in self.terminals:
            raise daemon(404, "PTY session not found")
        (fd, info), size = self.terminals[key], await request.json()
        info |= {"rows": size["rows"], "cols": size["cols"]}
        set_size(fd, info)
        return info

    async def delete(self, request: Any) -> Any:
        box = self.account.box(request, started=True)
        process = self.processes.get((box.id, request.path_params["session"]))
        if process is None:
            raise daemon(404, "PTY session not found")
        box.end(process)
        return {"message": "PTY session deleted"}

    async def connect(self, socket: Any) -> None:
        """Start a shell and serve its terminal until it ends, or the client leaves, which does not end it."""
        query, envs = socket.query_params, dict[str, str]()
        try:
            if socket.headers.get("authorization") != f"Bearer {self.account.settings.key}":
                raise Refused(401, "Invalid credentials")
            box = self.account.box(socket, started=True)
            key = box.id, query["id"]
            if key in self.terminals:
                raise daemon(409, "PTY session already exists")
        except Refused as error:
            await refuse(socket.scope, socket.receive, socket.send, error.status, 0.0)
            return
        for protocol in socket.scope["subprotocols"]:
            if protocol.startswith(ENVS):
                text = protocol.removeprefix(ENVS)
                envs = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        size = {"rows": int(query["rows"]), "cols": int(query["cols"])}
        info = {"id": query["id"], "active": True, "cwd": box.home, "createdAt": now(), "lazyStart": False, "envs": {}}
        ours, process = await start_shell(box, query.get("cwd"), envs, size)
        self.terminals[key], self.processes[key] = (ours, {**info, **size}), process
        await socket.accept(EXIT_CONTROL)
        await socket.send_text(json.dumps({"type": "control", "status": "connected"}))
        output = asyncio.ensure_future(pass_output(ours, socket))
        typing = asyncio.ensure_future(self.pass_input(ours, socket, box))
        ending = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((ending, typing), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await output
                code = {"exitCode": max(-1, ending.result())}  # Go's ExitCode returns -1 for a killed process.
                await socket.send_text(json.dumps({"type": "control", "status": "exited", **code}))
                await socket.close(1000, json.dumps(code))
        finally:
            output.cancel()
            typing.cancel()
            self.tasks.add(task := asyncio.create_task(self.forget(key, box)))
            task.add_done_callback(self.tasks.discard)

    async def forget(self, key: tuple[str, str], box: Box) -> None:
        """Close a session's terminal when its shell has ended."""
        process, (ours, _) = self.processes[key], self.terminals[key]
        await process.wait()
        box.end(process)
        del self.terminals[key], self.processes[key]
        os.close(ours)

    async def pass_input(self, fd: int, socket: Any, box: Box) -> None:
        while (message := await socket.receive())["type"] == "websocket.receive":
            os.write(fd, message.get("bytes") or (message.get("text") or "").encode())


async def start_shell(box: Box, cwd: str | None, envs: dict[str, str], size: dict[str, int]) -> tuple[int, Any]:
    """Start a shell on a new pseudo-terminal; return our end and the process."""
    ours, its = pty.openpty()
    os.set_blocking(ours, False)
    set_size(ours, size)
    arguments, environment, directory = box.argv("command -v bash >/dev/null && exec bash -i; exec sh -i", cwd)

    def enter() -> None:
        die_with_parent()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            cwd=directory,
            env={**environment, **envs},
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=enter,
        )
    finally:
        os.close(its)
    box.processes.add(process)
    return ours, process


async def pass_output(fd: int, socket: Any) -> None:
    """Send what the shell writes, until no process has the terminal open."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        while True:
            await ready.wait()
            ready.clear()
            with contextlib.suppress(BlockingIOError):
                data = os.read(fd, 65536)
                await socket.send_bytes(data)
    except OSError:
        pass
    finally:
        loop.remove_reader(fd)


def set_size(fd: int, size: dict[str, Any]) -> None:
    """Set the size of a pseudo-terminal."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))
