"""A sandbox: a directory and real processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path
from typing import Any

from ..mount_namespace import find_python, make_command
from ..process import die_with_parent
from .answers import daemon, now
from .sessions import Command, Session

HOME, PYTHON, DAEMON = "/home/daytona", "/home/python", "/home/daemon"
CAPTURED = ("home", "tmp", "python")  # folders of a sandbox that a snapshot has
STDOUT, STDERR = b"\1\1\1", b"\2\2\2"  # prefix of each line of a session command's log

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


class Box:
    """A sandbox: its directory, its processes, and its entry in listings."""

    def __init__(
        self, body: dict[str, Any], folder: Path, mounts: dict[str, Path], base: str, origin: Path | None = None
    ) -> None:
        self.id = str(uuid.uuid4())
        self.body = body
        self.name: str = body.get("name") or self.id
        self.labels: dict[str, str] = body.get("labels") or {}
        self.state = "creating"
        self.reason: str | None = None
        self.base = base
        self.folder = folder / self.id
        self.origin = origin  # the files of a snapshot
        self.mounts = mounts
        self.sessions: dict[str, Session] = {}
        self.processes: set[asyncio.subprocess.Process] = set()
        self.ttl_began = self.active = time.monotonic()
        self.memory_kib = body["memory"] * 1024 * 1024 if body.get("memory") else None

    def dto(self) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id, "organizationId": "standin", "name": self.name, "user": "daytona", "labels": self.labels,
            "snapshot": body.get("snapshot") or "daytona-small", "env": body.get("env") or {}, "public": False,
            "networkBlockAll": bool(body.get("networkBlockAll")), "kvm": False, "target": body.get("target") or "local",
            "cpu": body.get("cpu") or 1, "gpu": 0, "memory": body.get("memory") or 1, "disk": body.get("disk") or 3,
            "state": self.state, "errorReason": self.reason, "volumes": body.get("volumes") or [],
            "autoStopInterval": body.get("autoStopInterval"), "autoDeleteInterval": body.get("autoDeleteInterval"),
            "toolboxProxyUrl": f"{self.base}/toolbox", "createdAt": now(), "updatedAt": now(),
            "autoDestroyAt": now(60 * body["ttlMinutes"]) if body.get("ttlMinutes") else None,
        }  # fmt: skip

    def make(self) -> None:
        if self.origin is not None:
            for name in CAPTURED:
                shutil.copytree(self.origin / name, self.folder / name, symlinks=True)
            (self.folder / "daemon").mkdir()
        else:
            for name in ("home", "tmp", "daemon"):
                (self.folder / name).mkdir(parents=True)
            make_python(self.folder / "python")
        if self.mounts:
            (self.folder / "refusals").mkdir()
            (self.folder / "refusals" / "sitecustomize.py").write_text(REFUSALS)

    def capture(self, folder: Path) -> None:
        """Copy the files that a snapshot has."""
        for name in CAPTURED:
            shutil.copytree(self.folder / name, folder / name, symlinks=True)

    def list_exit_codes(self) -> list[int | None]:
        """Return the exit codes of all session commands; None for a running one."""
        return [command.exit_code for session in self.sessions.values() for command in session.commands.values()]

    # -- paths

    def place(self, path: str) -> Path:
        """Map a path in the sandbox to its path on this machine."""
        path = os.path.normpath(os.path.join(HOME, path))
        inside = {**self.mounts, HOME: self.folder / "home", "/tmp": self.folder / "tmp"}
        for mount in sorted(inside, key=len, reverse=True):
            if path == mount or path.startswith(mount + "/"):
                return inside[mount] / path[len(mount) :].lstrip("/")
        raise daemon(400, f"this stand-in writes below {HOME} and /tmp only, not {path}", "INVALID_FILE_PATH")

    # -- processes

    def argv(self, command: str, cwd: str | None) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment to start a shell command with."""
        python = Path(find_python()).parents[1]
        environment = {
            "PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1", **(self.body.get("env") or {}),
        }  # fmt: skip
        shell = ["sh", "-c", command]
        if self.memory_kib:
            shell = ["sh", "-c", f'ulimit -v {self.memory_kib}; exec "$@"', "sh", *shell]
        mounts = [
            ("read", "/", "/"), ("tmpfs", "/home"), ("bind", str(self.folder / "home"), HOME),
            ("bind", str(self.folder / "tmp"), "/tmp"), ("bind", str(self.folder / "python"), PYTHON),
            ("bind", str(self.folder / "daemon"), DAEMON),
        ]  # fmt: skip
        if str(python).startswith(("/home/", "/tmp/")):
            mounts.append(("read", str(python), str(python)))
        mounts += [("bind", str(folder), mount) for mount, folder in self.mounts.items()]
        if self.mounts:
            mounts.append(("read", str(self.folder / "refusals"), "/tmp/.refusals"))
            environment |= {"STANDIN_VOLUMES": ":".join(self.mounts), "PYTHONPATH": "/tmp/.refusals"}
        mounts += [("proc", "/proc"), ("dev", "/dev")]
        return make_command(shell, mounts, os.path.normpath(os.path.join(HOME, cwd or ""))), environment

    async def start(
        self, command: str, cwd: str | None = None, envs: dict[str, str] | None = None, **pipes: Any
    ) -> Any:
        arguments, environment = self.argv(command, cwd)
        process = await asyncio.create_subprocess_exec(
            *arguments,
            env={**environment, **(envs or {})},
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
            **pipes,
        )
        self.processes.add(process)
        if self.state in ("destroying", "destroyed"):
            self.kill()
        return process

    async def run(self, command: str, cwd: str | None, envs: dict[str, str] | None, seconds: float) -> tuple[int, str]:
        """Run a command to its end, and return its status and output."""
        process = await self.start(command, cwd, envs, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            async with asyncio.timeout(seconds):
                out, _ = await process.communicate()
        except TimeoutError:
            raise daemon(408, "command execution timeout", "PROCESS_EXECUTION_TIMEOUT") from None
        finally:
            self.end(process)
        return process.returncode, out.decode("utf-8", "replace")

    async def run_in_session(self, session: Session) -> None:
        while True:
            command = await session.queue.get()
            process = await self.start(self.write_command(command), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            command.input = process.stdin
            try:
                await asyncio.gather(command.read(process.stdout, STDOUT), command.read(process.stderr, STDERR))
                command.end(await process.wait())
            finally:
                self.end(process)

    def write_command(self, command: Command) -> str:
        """Write the command to a file and return the shell command that reads it.

        The real daemon does the same (apps/daemon/pkg/session/execute.go).
        """
        file = self.folder / "daemon" / f"{command.id}.sh"
        file.write_bytes(command.text.encode())
        return f". {DAEMON}/{file.name}"

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


def make_python(folder: Path) -> None:
    """Make a Python environment for one sandbox: the base Python with pip and no other installed packages."""
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    python = Path(find_python())
    (folder / "bin" / "python3").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    pip = Path(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})) / "pip"
    if pip.is_dir():
        (packages / "pip").symlink_to(pip)
