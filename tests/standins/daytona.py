"""A local Daytona: a server on loopback that the unmodified SDK, async or sync, takes for the real one.

    python tests/standins/daytona.py [--port 0] [--boot-s 0.09] ...

prints the environment to export, and serves until it is interrupted. Each sandbox is a directory and real processes on
this machine. With bubblewrap each process sees that directory as /home/daytona and /tmp, and a mounted volume where it
was asked for; without it code runs in the directory itself (its home), and volumes are refused. It is not isolation:
code can read what this user can read, and use the network.

What it does as the real one does (the daemon's published source, and what was seen of the service): the life of a
sandbox with its events, session commands one after the other with logs that are followed and replayed from their
beginning, input through a pipe, names that are taken once, volumes that are not ready at once, list pages, lifetimes,
rate limits and quotas. Files of a volume refuse what the real ones refuse (rename, chmod, append, random writes, locks)
to Python programs. What it does not: snapshots, PTYs, previews, archives, builds of images.

`Settings` are what can be asked of it, at its start or while it runs (`POST /standin`); `GET /standin` says what it has
and how often each call came. `Running` is the same for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

HOME, PYTHON = "/home/daytona", "/home/python"
STDOUT, STDERR = b"\1\1\1", b"\2\2\2"  # before each line of a session command's log
LANGUAGE_LABEL = "code-toolbox-language"
CHUNK = 64 * 1024  # bytes
CLOSE_DELAY = 1.0  # seconds between a command's end and the end of its followed log


@dataclass
class Settings:
    """What it does on demand. Seconds are real; `minute` is how many of them the intervals in minutes count."""

    key: str = "standin"
    boot_s: float = 0.09
    minute: float = 60.0
    page: int = 100  # sandboxes in one answer to a listing
    snapshots: list[str] = field(default_factory=lambda: ["daytona-small", "daytona-medium"])
    broken_snapshots: list[str] = field(default_factory=list)  # whose sandboxes end in an error
    max_sandboxes: int | None = None
    max_cpu: int | None = None
    creates_per_minute: int | None = None
    retry_after_s: float = 1.0  # what a 429 asks for
    volume_ready_s: float = 0.3
    broken_volumes: list[str] = field(default_factory=list)  # which end in an error
    log_bytes_per_s: float = 2.5e6  # what the real daemon's shell loop takes
    log_delay_s: float = 0.0  # the real daemon looks for more to send every 50 ms or so
    fault_rate: float = 0.0  # of all calls, those that match `fault_where`
    faults: list[str] = field(default_factory=lambda: ["429", "502", "503", "drop", "delay"])  # also any status, "lost"
    fault_where: str = ""  # a regular expression, searched in "METHOD /path"
    fault_times: int | None = None  # after so many faults there are no more
    fault_delay_s: float = 5.0
    seed: int = 1
    cut_s: float | None = None  # after which each websocket of a log is cut


@dataclass
class Volume:
    id: str
    name: str
    state: str
    folder: Path
    reason: str | None = None

    def dto(self) -> dict[str, Any]:
        return {
            "id": self.id, "name": self.name, "organizationId": "standin", "state": self.state,
            "createdAt": now(), "updatedAt": now(), "lastUsedAt": None, "errorReason": self.reason,
        }  # fmt: skip


class Refused(Exception):
    """An answer that is an error, in the envelope that the SDK reads."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        source: str = "DAYTONA_API",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"statusCode": status, "message": message, "code": code, "source": source}
        self.headers = headers or {}


def daemon(status: int, message: str, code: str = "") -> Refused:
    return Refused(status, message, code, "DAYTONA_DAEMON")


def now(after: float = 0.0) -> str:
    return datetime.datetime.fromtimestamp(time.time() + after, datetime.UTC).isoformat()


# ------------------------------------------------------------------------------------------------------------ processes


def python_home() -> Path:
    """This Python's own installation, not a virtual environment's."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)).parents[1]


def make_python(folder: Path) -> None:
    """A Python for one sandbox: this one, with pip and nothing else that is installed on this machine."""
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    own = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    (folder / "bin" / "python3").symlink_to(own)
    (folder / "pyvenv.cfg").write_text(f"home = {own.parent}\ninclude-system-site-packages = false\n")
    pip = Path(sysconfig.get_path("purelib", vars={"base": str(python_home())})) / "pip"
    if pip.is_dir():
        (packages / "pip").symlink_to(pip)


REFUSALS = '''
"""Refuses on mounted volumes what an object store behind a file system refuses."""
import os, sys

MOUNTS = tuple(os.environ["STANDIN_VOLUMES"].split(":"))


def _on_volume(path):
    if isinstance(path, int) or path is None:
        try:
            path = os.readlink("/proc/self/fd/%d" % path)
        except (OSError, TypeError):
            return False
    path = os.path.abspath(os.fsdecode(path))
    return any(path == mount or path.startswith(mount + "/") for mount in MOUNTS)


def _refuse(event, args):
    if event == "open":
        path, mode, flags = args
        if not flags & (os.O_WRONLY | os.O_RDWR) or not isinstance(path, (str, bytes)) or not _on_volume(path):
            return
        if os.path.isdir(path):
            return  # an opener opens something in it, and that is seen on its own
        exists = os.path.exists(path)
        if flags & os.O_APPEND or (flags & os.O_RDWR and exists) or (exists and not flags & os.O_TRUNC):
            raise OSError(22, "Invalid argument (the volume takes new files that are written once, in order)", path)
    elif event in ("os.rename", "os.link", "os.symlink"):
        if _on_volume(args[0]) or _on_volume(args[1]):
            raise OSError(38, "Function not implemented", args[0])
    elif event in ("os.chmod", "os.chown", "os.truncate", "os.setxattr"):
        if _on_volume(args[0]):
            raise OSError(1, "Operation not permitted", args[0])
    elif event in ("fcntl.flock", "fcntl.lockf"):
        if _on_volume(args[0]):
            raise OSError(38, "Function not implemented")


sys.addaudithook(_refuse)
'''


class Command:
    """A command of a session: a process, and the log of what it has written, which is kept from its beginning."""

    def __init__(self, text: str, echo: bool) -> None:
        self.id = str(uuid.uuid4())
        self.text = text
        self.echo = echo
        self.log = bytearray()
        self.exit_code: int | None = None
        self.gone = False  # with its sandbox
        self.ended_at = 0.0
        self.input: asyncio.StreamWriter | None = None
        self._changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        self.log += data
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self, code: int) -> None:
        self.exit_code, self.ended_at = code, time.monotonic()
        self.add(b"")

    async def change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def read(self, stream: asyncio.StreamReader, label: bytes, rate: float) -> None:
        """Copies a stream into the log, line by line; without NULs, as a shell would read it."""
        rest: list[bytes] = []
        while data := await stream.read(CHUNK):
            head, newline, tail = data.replace(b"\0", b"").rpartition(b"\n")
            if newline:
                lines = b"".join((*rest, head)).split(b"\n")
                self.add(b"".join(label + line + b"\n" for line in lines))
                rest = [tail] if tail else []
            else:
                rest.append(tail)
            if len(data) > 4096:
                await asyncio.sleep(len(data) / rate)
        if rest:
            self.add(label + b"".join(rest) + b"\n")


class Session:
    """A shell that runs one command after the other."""

    def __init__(self) -> None:
        self.commands: dict[str, Command] = {}
        self.queue: asyncio.Queue[Command] = asyncio.Queue()
        self.runner: asyncio.Task[None] | None = None


class Box:
    """A sandbox: its directory, its processes, and what a listing says of it."""

    def __init__(self, body: dict[str, Any], folder: Path, mounts: dict[str, Path], base: str) -> None:
        self.id = str(uuid.uuid4())
        self.body = body
        self.name: str = body.get("name") or self.id
        self.labels: dict[str, str] = body.get("labels") or {}
        self.state = "creating"
        self.reason: str | None = None
        self.base = base
        self.folder = folder / self.id
        self.mounts = mounts
        self.sessions: dict[str, Session] = {}
        self.processes: set[asyncio.subprocess.Process] = set()
        self.outside: set[Path] = set()  # files that were put elsewhere, where there is no bubblewrap
        self.created = self.active = time.monotonic()
        self.memory_kib = body["memory"] * 1024 * 1024 if body.get("memory") else None

    @property
    def cpu(self) -> int:
        return int(self.body.get("cpu") or 1)

    def dto(self) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id, "organizationId": "standin", "name": self.name, "user": "daytona", "labels": self.labels,
            "snapshot": body.get("snapshot") or "daytona-small", "env": body.get("env") or {}, "public": False,
            "networkBlockAll": bool(body.get("networkBlockAll")), "kvm": False, "target": body.get("target") or "local",
            "cpu": self.cpu, "gpu": 0, "memory": body.get("memory") or 1, "disk": body.get("disk") or 3,
            "state": self.state, "errorReason": self.reason, "volumes": body.get("volumes") or [],
            "autoStopInterval": body.get("autoStopInterval"), "autoDeleteInterval": body.get("autoDeleteInterval"),
            "toolboxProxyUrl": f"{self.base}/toolbox", "createdAt": now(), "updatedAt": now(),
        }  # fmt: skip

    def make(self) -> None:
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(parents=True)
        make_python(self.folder / "python")
        if self.mounts:
            (self.folder / "refusals").mkdir()
            (self.folder / "refusals" / "sitecustomize.py").write_text(REFUSALS)

    # -- paths

    @property
    def home(self) -> str:
        return HOME if BWRAP else str(self.folder / "home")

    def place(self, path: str) -> Path:
        """Where a path of the sandbox's is on this machine."""
        path = os.path.normpath(os.path.join(self.home, path))
        inside = {**self.mounts, HOME: self.folder / "home", "/tmp": self.folder / "tmp"} if BWRAP else {}
        for mount in sorted(inside, key=len, reverse=True):
            if path == mount or path.startswith(mount + "/"):
                return inside[mount] / path[len(mount) :].lstrip("/")
        if BWRAP:
            raise daemon(400, f"this stand-in writes below {HOME} and /tmp only, not {path}", "INVALID_FILE_PATH")
        self.outside.add(Path(path))
        return Path(path)

    # -- processes

    def argv(self, command: str, cwd: str | None) -> tuple[list[str], dict[str, str], str | None]:
        """How a shell command is started: arguments, environment, directory."""
        python, own = python_home(), PYTHON if BWRAP else self.folder / "python"
        environment = {
            "PATH": f"{own}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1", **(self.body.get("env") or {}),
        }  # fmt: skip
        shell = ["sh", "-c", command]
        if self.memory_kib:
            shell = ["sh", "-c", f'ulimit -v {self.memory_kib}; exec "$@"', "sh", *shell]
        if not BWRAP:
            environment["TMPDIR"] = str(self.folder / "tmp")
            return shell, environment, os.path.normpath(os.path.join(self.home, cwd or ""))
        binds = [
            "--ro-bind", "/", "/", "--tmpfs", "/home", "--bind", str(self.folder / "home"), HOME,
            "--bind", str(self.folder / "tmp"), "/tmp", "--bind", str(self.folder / "python"), PYTHON,
        ]  # fmt: skip
        if str(python).startswith(("/home/", "/tmp/")):
            binds += ["--ro-bind", str(python), str(python)]
        for mount, folder in self.mounts.items():
            binds += ["--bind", str(folder), mount]
        if self.mounts:
            binds += ["--ro-bind", str(self.folder / "refusals"), "/tmp/.refusals"]
            environment |= {"STANDIN_VOLUMES": ":".join(self.mounts), "PYTHONPATH": "/tmp/.refusals"}
        return (
            [
                BWRAP, "--unshare-pid", "--die-with-parent", "--new-session", *binds,
                "--proc", "/proc", "--dev", "/dev", "--chdir", os.path.normpath(os.path.join(HOME, cwd or "")), *shell,
            ],
            environment,
            None,
        )  # fmt: skip

    async def start(
        self, command: str, cwd: str | None = None, envs: dict[str, str] | None = None, **pipes: Any
    ) -> Any:
        arguments, environment, directory = self.argv(command, cwd)
        process = await asyncio.create_subprocess_exec(
            *arguments,
            cwd=directory,
            env={**environment, **(envs or {})},
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=None if BWRAP else die_with_parent,
            **pipes,
        )
        self.processes.add(process)
        if self.state in ("destroying", "destroyed"):
            self.kill()
        return process

    async def run(self, command: str, cwd: str | None, envs: dict[str, str] | None, seconds: float) -> tuple[int, str]:
        """Runs a command to its end; returns its status and output."""
        process = await self.start(command, cwd, envs, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            async with asyncio.timeout(seconds):
                out, _ = await process.communicate()
        except TimeoutError:
            raise daemon(408, "command execution timeout", "PROCESS_EXECUTION_TIMEOUT") from None
        finally:
            self.end(process)
        return process.returncode, out.decode("utf-8", "replace")

    async def run_in_session(self, session: Session, rate: float) -> None:
        while True:
            command = await session.queue.get()
            process = await self.start(command.text, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            command.input = process.stdin
            try:
                await asyncio.gather(
                    command.read(process.stdout, STDOUT, rate), command.read(process.stderr, STDERR, rate)
                )
                command.end(await process.wait())
            finally:
                self.end(process)

    def end(self, process: asyncio.subprocess.Process) -> None:
        self.processes.discard(process)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        for session in self.sessions.values():
            if session.runner is not None:
                session.runner.cancel()
            for command in session.commands.values():
                command.gone = True
                command.add(b"")
        for process in list(self.processes):
            self.end(process)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in self.outside:
            path.unlink(missing_ok=True)


BWRAP = shutil.which("bwrap") or ""


def die_with_parent() -> None:
    """Asks for SIGKILL when the server ends: what bubblewrap does where it is there."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


# --------------------------------------------------------------------------------------------------------------- server


class Server:
    """What it has, and the calls."""

    def __init__(self, settings: Settings, root: Path) -> None:
        import socketio
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        self.settings = self.first_settings = settings
        self.root = root
        self.base = ""
        self.boxes: dict[str, Box] = {}
        self.volumes: dict[str, Volume] = {}
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.created = self.destroyed = self.peak = 0
        self.creates: deque[float] = deque()
        self.history: list[tuple[float, int]] = []  # when a sandbox came or went, and how many there were then
        self.random = random.Random(settings.seed)
        self.transports: dict[Any, asyncio.Transport] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.events = socketio.AsyncServer(async_mode="asgi", cors_allowed_origins="*")
        self.events.on("connect", self.on_connect)
        box, session = "/toolbox/{box}", "/toolbox/{box}/process/session"
        routes: list[tuple[str, str, Any]] = [
            ("POST", "/api/sandbox", self.create),
            ("GET", "/api/sandbox", self.list),
            ("GET", "/api/sandbox/{box}", self.get),
            ("DELETE", "/api/sandbox/{box}", self.delete),
            ("POST", "/api/sandbox/{box}/stop", self.stop),
            ("POST", "/api/sandbox/{box}/last-activity", self.refresh),
            ("GET", "/api/volumes", self.list_volumes),
            ("POST", "/api/volumes", self.create_volume),
            ("GET", "/api/volumes/by-name/{name}", self.get_volume),
            ("DELETE", "/api/volumes/{id}", self.delete_volume),
            ("GET", f"{box}/work-dir", self.directory),
            ("GET", f"{box}/user-home-dir", self.directory),
            ("POST", f"{box}/files/bulk-upload", self.upload),
            ("POST", f"{box}/files/bulk-download", self.download),
            ("DELETE", f"{box}/files", self.delete_file),
            ("POST", f"{box}/process/execute", self.execute),
            ("POST", f"{box}/process/code-run", self.code_run),
            ("POST", session, self.create_session),
            ("DELETE", session + "/{session}", self.delete_session),
            ("POST", session + "/{session}/exec", self.session_execute),
            ("GET", session + "/{session}/command/{command}", self.get_command),
            ("GET", session + "/{session}/command/{command}/logs", self.get_logs),
            ("POST", session + "/{session}/command/{command}/input", self.send_input),
            ("POST", f"{box}/git/clone", self.clone),
        ]
        table: list[Any] = [Route(path, self.answering(handler), methods=[method]) for method, path, handler in routes]
        table += [
            Route("/standin", self.standin, methods=["GET", "POST"]),
            WebSocketRoute(session + "/{session}/command/{command}/logs", self.follow),
        ]
        self.app = socketio.ASGIApp(self.events, Starlette(routes=table), socketio_path="api/socket.io")

    # -- every call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Counts the call, and makes it fail where that was asked for."""
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
            await asyncio.sleep(self.settings.fault_delay_s)
        elif fault.isdigit():
            await refuse(scope, receive, send, int(fault), self.settings.retry_after_s)
            return
        elif fault in ("drop", "lost"):
            if fault == "lost" or self.random.random() < 0.5:  # lost on its way back: the call was done

                async def nowhere(_message: Any) -> None:
                    pass

                if scope["type"] == "http":
                    await self.app(scope, receive, nowhere)
            self.drop(scope)
            return
        await self.app(scope, receive, send)

    def fault(self, label: str) -> str:
        settings = self.settings
        if settings.fault_rate <= 0 or not re.search(settings.fault_where, label):
            return ""
        if settings.fault_times is not None and self.faults.total() >= settings.fault_times:
            return ""
        if self.random.random() >= settings.fault_rate:
            return ""
        kind = self.random.choice(settings.faults)
        self.faults[kind] += 1
        return kind

    def drop(self, scope: Any) -> None:
        transport = self.transports.get(tuple(scope["client"]))
        if transport is not None:
            transport.abort()

    def answering(self, handler: Any) -> Any:
        from starlette.responses import JSONResponse, Response

        async def endpoint(request: Any) -> Any:
            try:
                if request.headers.get("authorization") != f"Bearer {self.settings.key}":
                    raise Refused(401, "Invalid credentials")
                result = await handler(request)
            except Refused as error:
                return JSONResponse(error.body, error.status, error.headers)
            if isinstance(result, Response):
                return result
            return Response(status_code=204) if result is None else JSONResponse(result)

        return endpoint

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # -- sandboxes

    def box(self, request: Any, *, started: bool = False) -> Box:
        name = request.path_params["box"]
        box = self.boxes.get(name) or next((box for box in self.boxes.values() if box.name == name), None)
        if box is None:
            raise Refused(404, f"Sandbox with ID or name {name} not found")
        if started:
            if box.state != "started":
                raise Refused(400, f"Sandbox {box.id} is not started", source="DAYTONA_PROXY")
            box.active = time.monotonic()
        return box

    async def create(self, request: Any) -> Any:
        body, settings = await request.json(), self.settings
        moment = time.monotonic()
        while self.creates and self.creates[0] < moment - settings.minute:
            self.creates.popleft()
        if settings.creates_per_minute is not None and len(self.creates) >= settings.creates_per_minute:
            wait = f"{settings.minute - (moment - self.creates[0]):.1f}"
            raise Refused(429, "ThrottlerException: Too Many Requests", headers={"Retry-After-sandbox-create": wait})
        snapshot = body.get("snapshot")
        if snapshot and snapshot not in settings.snapshots + settings.broken_snapshots:
            raise Refused(404, f"Snapshot {snapshot} not found. Did you add it through the Daytona Dashboard?")
        if settings.max_sandboxes is not None and len(self.boxes) >= settings.max_sandboxes:
            raise Refused(400, f"Total disk limit exceeded. Maximum allowed: {3 * settings.max_sandboxes}GiB.")
        cpu = int(body.get("cpu") or 1)
        if settings.max_cpu is not None and sum(box.cpu for box in self.boxes.values()) + cpu > settings.max_cpu:
            raise Refused(400, f"Total CPU limit exceeded. Maximum allowed: {settings.max_cpu}.")
        if any(box.name == body.get("name") for box in self.boxes.values()):
            raise Refused(409, f"Sandbox with name {body['name']} already exists")
        mounts: dict[str, Path] = {}
        for mount in body.get("volumes") or []:
            volume = self.volumes.get(mount["volumeId"])
            if volume is None:
                raise Refused(404, f"Volume {mount['volumeId']} not found")
            if volume.state != "ready":
                raise Refused(400, f"Volume '{volume.name}' is not in a ready state. Current state: {volume.state}")
            if not BWRAP:
                raise Refused(400, "this stand-in mounts volumes with bubblewrap, which is not on the PATH")
            mounts[mount["mountPath"]] = volume.folder
        self.creates.append(moment)
        box = Box(body, self.root, mounts, self.base)
        self.boxes[box.id] = box
        self.created += 1
        self.peak = max(self.peak, len(self.boxes))
        self.history.append((moment, len(self.boxes)))
        if settings.boot_s > 0 or snapshot in settings.broken_snapshots:
            self.later(self.boot(box))
        else:
            box.make()
            box.state = "started"
        return box.dto()

    async def boot(self, box: Box) -> None:
        await asyncio.sleep(self.settings.boot_s)
        if box.state == "creating":
            box.make()
            broken = box.body.get("snapshot") in self.settings.broken_snapshots
            box.reason = "the runner could not start it" if broken else None
            await self.move(box, "error" if broken else "started")

    async def move(self, box: Box, state: str) -> None:
        before, box.state = box.state, state
        await self.events.emit("sandbox.state.updated", {"sandbox": box.dto(), "oldState": before, "newState": state})

    async def destroy(self, box: Box) -> None:
        if box.state in ("destroying", "destroyed"):
            return
        await self.move(box, "destroying")
        box.kill()
        await asyncio.sleep(0)
        box.remove()
        if self.boxes.pop(box.id, None) is not None:
            self.destroyed += 1
            self.history.append((time.monotonic(), len(self.boxes)))
        await self.move(box, "destroyed")

    async def list(self, request: Any) -> Any:
        query = request.query_params
        wanted = json.loads(query.get("labels") or "{}")
        found = [box for box in self.boxes.values() if wanted.items() <= box.labels.items()]
        size = min(int(query.get("limit") or self.settings.page), self.settings.page)
        begin = int(query.get("cursor") or 0)
        cursor = str(begin + size) if begin + size < len(found) else None
        return {"items": [box.dto() for box in found[begin : begin + size]], "nextCursor": cursor}

    async def get(self, request: Any) -> Any:
        return self.box(request).dto()

    async def delete(self, request: Any) -> Any:
        box = self.box(request)
        self.later(self.destroy(box))
        return {**box.dto(), "state": "destroying"}

    async def stop(self, request: Any) -> Any:
        box = self.box(request)
        await self.stopped(box)
        return box.dto()

    async def stopped(self, box: Box) -> None:
        if box.body.get("autoDeleteInterval") == 0:
            await self.destroy(box)
        elif box.state == "started":
            box.kill()
            await self.move(box, "stopped")

    async def refresh(self, request: Any) -> Any:
        self.box(request).active = time.monotonic()
        return {}

    async def reap(self) -> None:
        """Ends what has been idle for too long or has outlived its time."""
        while True:
            await asyncio.sleep(min(self.settings.minute / 20, 1.0))
            moment, minute = time.monotonic(), self.settings.minute
            for box in list(self.boxes.values()):
                ttl, idle = box.body.get("ttlMinutes"), box.body.get("autoStopInterval", 15)
                if ttl and moment >= box.created + ttl * minute:
                    await self.destroy(box)
                elif idle and box.state == "started" and moment >= box.active + idle * minute:
                    await self.stopped(box)

    # -- volumes

    async def list_volumes(self, _request: Any) -> Any:
        return [volume.dto() for volume in self.volumes.values()]

    async def create_volume(self, request: Any) -> Any:
        name = (await request.json())["name"]
        if any(volume.name == name for volume in self.volumes.values()):
            raise Refused(409, f"Volume with name {name} already exists")
        volume = Volume(str(uuid.uuid4()), name, "pending_create", self.root / "volumes" / uuid.uuid4().hex)
        self.volumes[volume.id] = volume
        self.later(self.make_volume(volume))
        return volume.dto()

    async def make_volume(self, volume: Volume) -> None:
        await asyncio.sleep(self.settings.volume_ready_s)
        volume.folder.mkdir(parents=True)
        broken = volume.name in self.settings.broken_volumes
        volume.state, volume.reason = ("error", "the bucket could not be made") if broken else ("ready", None)

    async def get_volume(self, request: Any) -> Any:
        name = request.path_params["name"]
        for volume in self.volumes.values():
            if volume.name == name:
                return volume.dto()
        raise Refused(404, f"Volume with name {name} not found")

    async def delete_volume(self, request: Any) -> Any:
        volume = self.volumes.pop(request.path_params["id"], None)
        if volume is None:
            raise Refused(404, "Volume not found")
        shutil.rmtree(volume.folder, ignore_errors=True)

    # -- files

    async def directory(self, request: Any) -> Any:
        return {"dir": self.box(request, started=True).home}

    async def upload(self, request: Any) -> Any:
        box = self.box(request, started=True)
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

        box = self.box(request, started=True)
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

    async def delete_file(self, request: Any) -> Any:
        place = self.box(request, started=True).place(request.query_params["path"])
        if not place.exists():
            raise daemon(404, "file not found", "FILE_NOT_FOUND")
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()

    # -- processes

    async def execute(self, request: Any) -> Any:
        box, body = self.box(request, started=True), await request.json()
        code, out = await box.run(body["command"], body.get("cwd"), body.get("envs"), body.get("timeout") or 10)
        return {"exitCode": code, "result": out}

    async def code_run(self, request: Any) -> Any:
        box, body = self.box(request, started=True), await request.json()
        command = f"python3 -u -c {shlex.quote(body['code'])}"
        code, out = await box.run(command, None, body.get("envs"), body.get("timeout") or 10)
        return {"exitCode": code, "result": out}

    async def create_session(self, request: Any) -> Any:
        from starlette.responses import Response

        box, name = self.box(request, started=True), (await request.json())["sessionId"]
        if name in box.sessions:
            raise daemon(409, "session already exists")
        box.sessions[name] = Session()
        return Response(status_code=201)

    def session(self, request: Any) -> tuple[Box, Session]:
        box = self.box(request, started=True)
        session = box.sessions.get(request.path_params["session"])
        if session is None:
            raise daemon(404, "session not found")
        return box, session

    def command(self, request: Any) -> Command:
        command = self.session(request)[1].commands.get(request.path_params["command"])
        if command is None:
            raise daemon(404, "command not found")
        return command

    async def delete_session(self, request: Any) -> Any:
        box, session = self.session(request)
        if session.runner is not None:
            session.runner.cancel()
        del box.sessions[request.path_params["session"]]

    async def session_execute(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        (box, session), body = self.session(request), await request.json()
        if not body.get("runAsync"):
            raise daemon(400, "this stand-in runs session commands with runAsync only")
        if re.match(r"\s*(exec|exit)\b", body["command"]):
            raise daemon(400, "exec and exit would end the session's shell")
        command = Command(body["command"], not body.get("suppressInputEcho"))
        session.commands[command.id] = command
        session.queue.put_nowait(command)
        if session.runner is None:
            session.runner = asyncio.create_task(box.run_in_session(session, self.settings.log_bytes_per_s))
        return JSONResponse({"cmdId": command.id}, 202)

    async def get_command(self, request: Any) -> Any:
        command = self.command(request)
        found: dict[str, Any] = {"id": command.id, "command": command.text}
        return found if command.exit_code is None else {**found, "exitCode": command.exit_code}

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
        if command.echo:
            command.add(STDOUT + data.encode())

    async def follow(self, socket: Any) -> None:
        try:
            if socket.headers.get("authorization") != f"Bearer {self.settings.key}":
                raise Refused(401, "Invalid credentials")
            command = self.command(socket)
        except Refused as error:
            await refuse(socket.scope, socket.receive, socket.send, error.status, 0.0)
            return
        await socket.accept()
        sending = asyncio.ensure_future(self.send_log(socket, command))
        closing = asyncio.ensure_future(socket.receive())  # the client says nothing but that it goes
        await asyncio.wait((sending, closing), timeout=self.settings.cut_s, return_when=asyncio.FIRST_COMPLETED)
        ended = sending.done()
        for task in (sending, closing):
            task.cancel()
        with contextlib.suppress(Exception):
            if ended:
                await socket.close(1000)
            elif not closing.done() or closing.cancelled():
                self.drop(socket.scope)

    async def send_log(self, socket: Any, command: Command) -> None:
        sent = 0
        while True:
            if sent < len(command.log):
                if self.settings.log_delay_s:
                    await asyncio.sleep(self.settings.log_delay_s)
                data = bytes(command.log[sent : sent + CHUNK])
                await socket.send_bytes(data)
                sent += len(data)
            elif command.gone:
                self.drop(socket.scope)
                return
            elif command.exit_code is not None and time.monotonic() >= command.ended_at + CLOSE_DELAY:
                return
            else:
                await command.change(CLOSE_DELAY)

    # -- git

    async def clone(self, request: Any) -> Any:
        box, body = self.box(request, started=True), await request.json()
        envs = {"GIT_TERMINAL_PROMPT": "0"}
        if body.get("username"):
            import base64

            pair = base64.b64encode(f"{body['username']}:{body.get('password') or ''}".encode()).decode()
            envs |= {
                "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "http.extraHeader",
                "GIT_CONFIG_VALUE_0": f"Authorization: Basic {pair}",
            }  # fmt: skip
        path = shlex.quote(os.path.join(box.home, body["path"]))
        url, branch, options = shlex.quote(body["url"]), shlex.quote(body.get("branch") or ""), ""
        command = ""
        if body.get("branch"):  # what it clones is a branch: git would take a tag, too
            command = f"git ls-remote --exit-code --heads -- {url} {branch} >/dev/null || exit 42; "
            options = f"--branch {branch} "
        command += f"git clone --quiet --single-branch --no-tags {options}-- {url} {path}"
        code, out = await box.run(command, None, envs, 300)
        if code == 42 and "fatal" not in out:
            raise daemon(404, f"reference not found: {body['branch']}", "GIT_BRANCH_NOT_FOUND")
        if code:
            auth = "Authentication failed" in out or "could not read Username" in out
            raise daemon(401, out, "GIT_AUTH_FAILED") if auth else daemon(400, out)
        if body.get("commit_id") or body.get("commitId"):
            commit = shlex.quote(body.get("commit_id") or body["commitId"])
            code, out = await box.run(f"git -C {path} checkout --quiet {commit}", None, envs, 60)
            if code:
                raise daemon(400, f"object not found: {out}")

    # -- events, and its own calls

    async def on_connect(self, _sid: str, _environ: Any, auth: Any = None) -> bool:
        return bool(auth) and auth.get("token") == self.settings.key

    async def standin(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if request.method == "POST":
            body = await request.json()
            if body.pop("reset", False):
                self.settings = self.first_settings
                for box in list(self.boxes.values()):
                    await self.destroy(box)
                for volume in self.volumes.values():
                    shutil.rmtree(volume.folder, ignore_errors=True)
                self.volumes.clear()
                self.counts.clear()
                self.creates.clear()
                self.history.clear()
                self.created = self.destroyed = self.peak = 0
            self.settings = dataclasses.replace(self.settings, **body)
            self.random = random.Random(self.settings.seed)
            self.faults.clear()
        return JSONResponse(
            {
                "settings": dataclasses.asdict(self.settings),
                "sandboxes": [
                    {**box.dto(), "processes": len(box.processes), "body": box.body} for box in self.boxes.values()
                ],
                "volumes": [{**volume.dto(), "folder": str(volume.folder)} for volume in self.volumes.values()],
                "counts": dict(self.counts),
                "faults": dict(self.faults),
                "created": self.created,
                "destroyed": self.destroyed,
                "peak": self.peak,
                "history": self.history,
                "cpu_s": dict(zip(("own", "own_system", "processes", "processes_system"), os.times(), strict=False)),
            }
        )


def generic(path: str) -> str:
    """A path without the names in it, so that calls can be counted."""
    path = re.sub(r"/(sandbox|toolbox|session|command|by-name)/[^/]+", r"/\1/*", path)
    return re.sub(r"^(/api/volumes)/(?!by-name)[^/]+", r"\1/*", path)


async def refuse(scope: Any, receive: Any, send: Any, status: int, retry_after: float) -> None:
    """An error in place of an answer, or of a websocket."""
    from starlette.responses import JSONResponse
    from starlette.websockets import WebSocket

    error = Refused(status, "ThrottlerException: Too Many Requests" if status == 429 else "upstream error")
    headers = {"Retry-After": f"{retry_after:g}"} if status == 429 else {}
    response = JSONResponse(error.body, status, headers)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        while (await receive()).get("more_body"):
            pass
        await response(scope, receive, send)


async def serve(settings: Settings, port: int, until_eof: bool, announce: Any) -> None:
    """Serves on loopback until SIGINT, SIGTERM or, if asked, the end of standard input; leaves nothing behind."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    if sys.version_info < (3, 12):
        watcher = asyncio.PidfdChildWatcher()  # the default of that version takes a thread for each process
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.get_event_loop_policy().set_child_watcher(watcher)
    root = Path(tempfile.mkdtemp(prefix="daytona-standin-"))
    server = Server(settings, root)

    class Protocol(H11Protocol):
        """Remembers each connection, so that it can be dropped."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if self.client is not None:
                server.transports[self.client] = transport

        def connection_lost(self, exc: Exception | None) -> None:
            server.transports.pop(self.client, None)
            super().connection_lost(exc)

    listening = socket.create_server(("127.0.0.1", port), backlog=1024)
    server.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(
        server, http=Protocol, ws="websockets-sansio", log_level="error", lifespan="off", access_log=False,
        timeout_graceful_shutdown=1, ws_ping_interval=None,
    )  # fmt: skip
    running = uvicorn.Server(config)
    if until_eof:
        asyncio.get_running_loop().add_reader(0, lambda: os.read(0, CHUNK) or setattr(running, "should_exit", True))
    reaper = asyncio.create_task(server.reap())
    announce(server.base)
    try:
        await running.serve(sockets=[listening])
    finally:
        reaper.cancel()
        processes = [process for box in server.boxes.values() for process in box.processes]
        for box in server.boxes.values():
            box.kill()
        for process in processes:
            await process.wait()
        shutil.rmtree(root, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------ for tests


class Running:
    """A stand-in in a process of its own, which ends with this one."""

    def __init__(self, **settings: Any) -> None:
        options = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--until-eof", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().decode() for _ in range(2)]
        self.environment = dict(line.strip().removeprefix("export ").split("=", 1) for line in lines if line)
        if len(self.environment) < 2:
            raise RuntimeError(f"the stand-in did not start (status {self.process.wait()})")
        self.url = self.environment["DAYTONA_API_URL"]
        self.key = self.environment["DAYTONA_API_KEY"]

    def _call(self, data: bytes | None) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.removesuffix("/api") + "/standin", data, timeout=30) as answer:
            return json.load(answer)

    def set(self, **settings: Any) -> None:
        """Changes settings while it runs."""
        self._call(json.dumps(settings).encode())

    def state(self) -> dict[str, Any]:
        """What it has, and how often each call came."""
        return self._call(None)

    def reset(self) -> None:
        """Removes everything that it has, forgets its counts and takes the settings that it was started with."""
        self._call(json.dumps({"reset": True}).encode())

    def stop(self) -> None:
        """Ends it, and everything that it started."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="by default one that is free")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    for item in dataclasses.fields(Settings):
        text = item.type == "str"
        parser.add_argument(
            f"--{item.name.replace('_', '-')}", type=str if text else json.loads, metavar=str(item.type)
        )
    arguments = vars(parser.parse_args())
    port, until_eof = arguments.pop("port"), arguments.pop("until_eof")
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    # A text may come as it is, or as JSON from `Running`.
    given = {name: json.loads(v) if isinstance(v, str) and v.startswith('"') else v for name, v in given.items()}
    settings = Settings(**given)

    def announce(base: str) -> None:
        print(f"export DAYTONA_API_KEY={settings.key}\nexport DAYTONA_API_URL={base}/api", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, port, until_eof, announce))


if __name__ == "__main__":
    main()
