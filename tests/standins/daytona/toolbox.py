"""The calls to a sandbox's daemon: files, blocking commands, and sessions with their commands, input and logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
import time
from typing import Any

from .account import Account
from .answers import Refused, daemon, refuse
from .box import STDERR, STDOUT, Box
from .sessions import CHUNK, Command, Session

TOOLBOX = "/toolbox/{box}"
SESSION = f"{TOOLBOX}/process/session"
LOGS = SESSION + "/{session}/command/{command}/logs"
CLOSE_DELAY = 1.0  # seconds between a command's end and the end of its followed log


class ToolboxCalls:
    """Files, commands, sessions, and the logs of their commands."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.routes: list[tuple[str, str, Any]] = [
            ("POST", f"{TOOLBOX}/files/bulk-upload", self.upload),
            ("POST", f"{TOOLBOX}/files/bulk-download", self.download),
            ("GET", f"{TOOLBOX}/files/info", self.info),
            ("DELETE", f"{TOOLBOX}/files", self.delete_file),
            ("POST", f"{TOOLBOX}/process/execute", self.execute),
            ("POST", SESSION, self.create_session),
            ("GET", SESSION + "/{session}", self.get_session),
            ("POST", SESSION + "/{session}/exec", self.session_execute),
            ("GET", SESSION + "/{session}/command/{command}", self.get_command),
            ("GET", SESSION + "/{session}/command/{command}/logs", self.get_logs),
            ("POST", SESSION + "/{session}/command/{command}/input", self.send_input),
        ]

    async def upload(self, request: Any) -> Any:
        box = self.account.box(request, started=True)
        async with request.form() as form:
            for name, value in form.multi_items():
                if name.endswith(".file"):
                    place = box.place(str(form[name.removesuffix("file") + "path"]))
                    try:
                        place.parent.mkdir(parents=True, exist_ok=True)
                        place.write_bytes(await value.read())
                    except OSError as error:
                        raise daemon(400, f"{place.name}: {error.strerror}", "INVALID_FILE_PATH") from error
        return {}

    async def download(self, request: Any) -> Any:
        from starlette.responses import Response

        box = self.account.box(request, started=True)
        parts: list[bytes] = []
        for path in (await request.json())["paths"]:
            place = box.place(path)
            kind, mime = "file", "application/octet-stream"
            try:
                data = place.read_bytes()
            except OSError:
                kind, mime = "error", "application/json"
                data = json.dumps(daemon(404, f"file not found: {path}", "FILE_NOT_FOUND").body).encode()
            head = f'Content-Disposition: form-data; name="{kind}"; filename="{path}"\r\nContent-Type: {mime}\r\n\r\n'
            parts.append(b"--standin\r\n" + head.encode() + data + b"\r\n")
        return Response(b"".join([*parts, b"--standin--\r\n"]), media_type="multipart/form-data; boundary=standin")

    async def info(self, request: Any) -> Any:
        path = request.query_params["path"]
        try:
            status = self.account.box(request, started=True).place(path).stat()
        except OSError as error:
            raise daemon(404, f"file not found: {path}", "FILE_NOT_FOUND") from error
        mode, words = status.st_mode, {"group": "0", "owner": "0", "modTime": ""}
        permissions = {"mode": stat.filemode(mode), "permissions": f"{stat.S_IMODE(mode):04o}"}
        size = {"isDir": stat.S_ISDIR(mode), "name": os.path.basename(path), "size": status.st_size}
        return {**words, **permissions, **size}

    async def delete_file(self, request: Any) -> Any:
        place = self.account.box(request, started=True).place(request.query_params["path"])
        if not place.exists():
            raise daemon(404, "file not found", "FILE_NOT_FOUND")
        place.unlink()

    async def execute(self, request: Any) -> Any:
        box, body = self.account.box(request, started=True), await request.json()
        code, out = await box.run(body["command"], body.get("cwd"), body.get("envs"), body.get("timeout") or 10)
        return {"exitCode": code, "result": out}

    async def create_session(self, request: Any) -> Any:
        from starlette.responses import Response

        box, name = self.account.box(request, started=True), (await request.json())["sessionId"]
        if name in box.sessions:
            raise daemon(409, "session already exists")
        box.sessions[name] = Session()
        return Response(status_code=201)

    def session(self, request: Any) -> tuple[Box, Session]:
        box = self.account.box(request, started=True)
        session = box.sessions.get(request.path_params["session"])
        if session is None:
            raise daemon(404, "session not found")
        return box, session

    def command(self, request: Any) -> Command:
        command = self.session(request)[1].commands.get(request.path_params["command"])
        if command is None:
            raise daemon(404, "command not found")
        return command

    async def get_session(self, request: Any) -> Any:
        commands = [describe(command) for command in self.session(request)[1].commands.values()]
        return {"sessionId": request.path_params["session"], "commands": commands}

    async def session_execute(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        (box, session), body = self.session(request), await request.json()
        if re.match(r"\s*(exec|exit)\b", body["command"]):
            raise daemon(400, "exec and exit would end the session's shell")
        command = Command(body["command"])
        session.commands[command.id] = command
        session.queue.put_nowait(command)
        if session.runner is None:
            session.runner = asyncio.create_task(box.run_in_session(session))
        return JSONResponse({"cmdId": command.id}, 202)

    async def get_command(self, request: Any) -> Any:
        return describe(self.command(request))

    async def get_logs(self, request: Any) -> Any:
        texts: dict[bytes, list[bytes]] = {STDOUT: [], STDERR: []}
        for line in bytes(self.command(request).log).splitlines(keepends=True):
            texts[line[:3]].append(line[3:])
        out, err = (b"".join(texts[label]).decode("utf-8", "replace") for label in (STDOUT, STDERR))
        return {"output": out + err, "stdout": out, "stderr": err}

    async def send_input(self, request: Any) -> Any:
        command, data = self.command(request), (await request.json())["data"]
        if command.exit_code is not None:
            raise daemon(410, f"command has already completed with exit code {command.exit_code}")
        while command.input is None:
            await command.change(0.01)
        data = data if data.endswith("\n") else data + "\n"
        try:
            command.input.write(data.encode())
            await command.input.drain()
        except OSError as error:
            raise daemon(500, f"failed to write to input pipe: {error}") from error

    async def follow(self, socket: Any) -> None:
        try:
            if socket.headers.get("authorization") != f"Bearer {self.account.settings.key}":
                raise Refused(401, "Invalid credentials")
            command = self.command(socket)
        except Refused as error:
            await refuse(socket.scope, socket.receive, socket.send, error.status, 0.0)
            return
        await socket.accept()
        sending = asyncio.ensure_future(self.send_log(socket, command))
        closing = asyncio.ensure_future(socket.receive())  # the client sends nothing but its disconnect
        client = tuple(socket.scope["client"])
        self.account.followed.add(client)
        await asyncio.wait((sending, closing), return_when=asyncio.FIRST_COMPLETED)
        self.account.followed.discard(client)
        has_ended = sending.done()
        for task in (sending, closing):
            task.cancel()
        if has_ended:
            with contextlib.suppress(Exception):
                await socket.close(1000)

    async def send_log(self, socket: Any, command: Command) -> None:
        sent = 0
        while True:
            if sent < len(command.log):
                data = bytes(command.log[sent : sent + CHUNK])
                await socket.send_bytes(data)
                sent += len(data)
            elif command.gone:
                self.account.drop(socket.scope)
                return
            elif command.exit_code is not None and time.monotonic() >= command.ended_at + CLOSE_DELAY:
                return
            else:
                await command.change(CLOSE_DELAY)


def describe(command: Command) -> dict[str, Any]:
    """Return the daemon's description of a command."""
    record: dict[str, Any] = {"id": command.id, "command": command.text}
    return record if command.exit_code is None else {**record, "exitCode": command.exit_code}
