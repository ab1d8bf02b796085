"""The start of commands in a sandbox."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any

from ..mount_namespace import Mount, find_python, make_command
from ..process import die_with_parent
from .programs import SYNC, TOOLS
from .sandboxes import Box, Command

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt")


def link_system(root: Path) -> None:
    """Put links into a root like those of this machine, such as /bin to /usr/bin."""
    for path in SYSTEM:
        link = root / path[1:]
        if os.path.islink(path) and not link.is_symlink():
            link.symlink_to(os.readlink(path))


class Launcher:
    """A launcher of commands in sandboxes; each sandbox has its own file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_tools(self, box: Box, interpreter: str) -> None:
        """Put the programs of a sandbox into its folder."""
        folder = box.folder / "bin"
        folder.mkdir()
        programs = {
            "sync": SYNC.format(python=find_python(), socket=str(self.root / "commits"), box=box.id),
            "modal-sandbox-fs-tools": TOOLS.format(python=find_python()),
        }
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        if interpreter:
            for name in ("python", "python3"):
                (folder / name).symlink_to(interpreter)

    async def build(self, root: Path, command: str, environment: dict[str, str]) -> str:
        """Run a command of an image's build in its root; return the error's text, empty after a success."""
        root.mkdir(parents=True, exist_ok=True)
        link_system(root)
        mounts: list[Mount] = [("bind", str(root), "/"), *self._list_system_mounts()]
        mounts += [("proc", "/proc"), ("dev", "/dev"), ("dir", "/tmp"), ("dir", "/root")]
        process = await asyncio.create_subprocess_exec(
            *make_command(["/bin/sh", "-c", command], mounts, "/", has_network=True),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"HOME": "/root", "PATH": "/usr/local/bin:/usr/bin:/bin", **environment},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        said, _ = await process.communicate()
        return said.decode("utf-8", "replace") or f"status {process.returncode}" if process.returncode else ""

    async def start(self, box: Box, packages: str, request: Any) -> None:
        """Start a command unless it has already been started."""
        if request.exec_id in box.commands:
            return
        environment = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", **request.env}
        environment["PATH"] = f"/__modal/.bin:{environment['PATH']}"
        for source in getattr(request, "secret_sources", ()):  # missing in client 1.6.0
            environment.update(source.env.contents)
        if packages:
            environment["PYTHONPATH"] = packages
        where = request.workdir or box.workdir or "/root"
        words = make_command(
            list(request.command_args), self._list_mounts(box, packages, where), where, has_network=not box.offline
        )
        options: dict[str, Any] = {"env": environment, "cwd": "/", "start_new_session": True}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        command = Command(await asyncio.create_subprocess_exec(*words, **pipes, preexec_fn=die_with_parent, **options))
        box.commands[request.exec_id] = command
        command.tasks.append(asyncio.create_task(self._wait(box, command, request.timeout_secs)))
        if box.ending:
            command.kill()

    def _list_mounts(self, box: Box, packages: str, where: str) -> list[Mount]:
        """Return the sandbox's mounts: its root, the system's directories, this Python, its volumes."""
        mounts: list[Mount] = [("bind", str(box.folder / "root"), "/"), *self._list_system_mounts()]
        mounts.append(("read", str(box.folder / "bin"), "/__modal/.bin"))
        if packages:
            mounts.append(("read", packages, packages))
        mounts.append(("bind", str(self.root / "commits"), str(self.root / "commits")))
        mounts += [("proc", "/proc"), ("dev", "/dev"), ("dir", "/tmp"), ("dir", "/root")]
        mounts += [("bind", str(mount.folder), mount.path) for mount in box.mounts]
        return mounts

    @staticmethod
    def _list_system_mounts() -> list[Mount]:
        """Return the mounts of the system's directories and of this Python."""
        own = [path for path in SYSTEM if os.path.exists(path) and not os.path.islink(path)]
        pythons = dict.fromkeys((sys.base_prefix, os.path.dirname(os.path.dirname(find_python()))))
        own += [path for path in pythons if not PurePosixPath(path).is_relative_to("/usr")]
        return [("read", path, path) for path in own]

    @staticmethod
    async def _wait(box: Box, command: Command, seconds: int) -> None:
        try:
            async with asyncio.timeout(seconds or None):
                await command.process.wait()
        except TimeoutError:
            command.kill()
        command.status = await command.process.wait()
        command.kill()  # kills the remaining processes of its group
        await asyncio.wait(command.tasks[:2], timeout=1.0)
        box.idle_since = time.monotonic()
        command.ended.set()
