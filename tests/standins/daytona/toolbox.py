"""The calls to a sandbox's daemon for files and blocking commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
from typing import Any

from .account import Account
from .answers import daemon

TOOLBOX = "/toolbox/{box}"


class ToolboxCalls:
    """Files and commands in a sandbox."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.routes: list[tuple[str, str, Any]] = [
            ("POST", f"{TOOLBOX}/files/bulk-upload", self.upload),
            ("POST", f"{TOOLBOX}/files/bulk-download", self.download),
            ("GET", f"{TOOLBOX}/files/info", self.info),
            ("DELETE", f"{TOOLBOX}/files", self.delete_file),
            ("POST", f"{TOOLBOX}/process/execute", self.execute),
            ("POST", f"{TOOLBOX}/process/code-run", self.code_run),
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
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()

    async def execute(self, request: Any) -> Any:
        box, body = self.account.box(request, started=True), await request.json()
        code, out = await box.run(body["command"], body.get("cwd"), body.get("envs"), body.get("timeout") or 10)
        return {"exitCode": code, "result": out}

    async def code_run(self, request: Any) -> Any:
        box, body = self.account.box(request, started=True), await request.json()
        command = f"python3 -u -c {shlex.quote(body['code'])}"
        code, out = await box.run(command, None, body.get("envs"), body.get("timeout") or 10)
        return {"exitCode": code, "result": out}
