"""The state of both servers: sandboxes, volumes, images, and the requests of tests."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from ..mount_namespace import find_python
from .calls import Faults
from .launcher import Launcher, link_system
from .sandboxes import Box
from .volumes import Mount, Volume

Result = api_pb2.GenericResult
REGIONS = ("us", "eu", "ap", "uk", "ca", "me", "sa", "af", "mx")  # each alone, or followed by a hyphen and more


class Standin:
    """The state that both servers share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token_id, self.token_secret = f"ak-{secrets.token_hex(8)}", f"as-{secrets.token_hex(16)}"
        self.router_url = ""
        self.options: dict[str, Any] = {
            "boot_delay": 0.0,  # seconds from a sandbox's creation to its first command
            "max_sandboxes": None,
            "commit_at_end": True,
            "commit_error": "",  # error of `sync`
            "build_error": "",  # error of git in an image's build
            "python": find_python(),  # path of `python` in a sandbox, or empty
        }
        self.faults = Faults()
        self.launcher = Launcher(root)
        self.events: list[dict[str, Any]] = []
        self.peak = 0
        self.boxes: dict[str, Box] = {}
        self.tasks: dict[str, Box] = {}
        self.ended: dict[str, Box] = {}
        self.apps: dict[str, str] = {}
        self.volumes: dict[str, Volume] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.answers: dict[str, asyncio.Future[Any]] = {}
        self.streams: set[Any] = set()
        self._watches: set[asyncio.Task[None]] = set()

    def ask_state(self) -> dict[str, Any]:
        """Return what is alive, the count of each call and of its faults, and the commits."""
        return {
            "sandboxes": {
                box.id: {
                    "name": box.name,
                    "tags": box.tags,
                    "timeout": box.timeout,
                    "idle_timeout": box.idle_timeout,
                    "definition": box.definition,
                }
                for box in self.boxes.values()
            },
            "counts": dict(self.faults.counts),
            "faults": dict(self.faults.faults),
            "events": self.events,
            "peak": self.peak,
            "images": {number: image["commands"] for number, image in self.images.items()},
            "folders": sorted(path.name for path in (self.root / "sandboxes").iterdir()),
            "commands": [
                command.process.pid
                for box in self.boxes.values()
                for command in box.commands.values()
                if not command.ended.is_set()
            ],
        }

    def ask_faults(self, rules: list[dict[str, Any]], seed: int = 0) -> None:
        """Replace the rules for faults.

        The keys of a rule are `method` (a pattern), `status`, `probability` or `times`, `after` (the call is executed
        and its answer lost), `delay` (seconds, ended early by new rules), `retry_after` (seconds) and `drop` (close the
        connection).
        """
        self.faults.replace(rules, seed)

    def ask_set(self, **options: Any) -> None:
        """Change options."""
        self.options.update(options)

    def ask_reset(self) -> None:
        """Clear the counts, the events and the rules, and restore the options."""
        for collection in (self.faults.counts, self.faults.faults, self.events):
            collection.clear()
        self.faults.replace([])
        self.peak = len(self.boxes)
        fresh = Standin(self.root).options
        self.options.update(fresh)

    def ask_volume(self, name: str, version: int = 2) -> dict[str, str]:
        """Return a volume's committed files; create a missing volume."""
        volume = self.volume(name, version)
        files = (path for path in volume.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(volume.folder)): path.read_bytes().decode("latin-1") for path in files}

    def ask_drop(self) -> None:
        """Break every connection that reads output."""
        for stream in list(self.streams):
            stream._stream.connection._transport.abort()

    def ask_age(self, seconds: float) -> None:
        """Make every sandbox older by that many seconds, and idle ones idle for that much longer."""
        for box in self.boxes.values():
            box.created -= seconds
            box.idle_since -= seconds

    async def ask_end(self, sandbox: str) -> None:
        """End a sandbox as its provider would, without a request of its owner."""
        await self.end(self.boxes[sandbox], Result.GENERIC_STATUS_TERMINATED)

    def volume(self, name: str, version: int) -> Volume:
        for volume in self.volumes.values():
            if volume.name == name:
                return volume
        number = f"vo-{secrets.token_hex(11)}"
        volume = self.volumes[number] = Volume(number, name, version, self.root / "volumes" / number)
        return volume

    async def create(self, request: Any) -> Box:
        limit = self.options["max_sandboxes"]
        if limit is not None and len(self.boxes) >= limit:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"Workspace limit of {limit} concurrent sandboxes reached.")
        if request.definition.image_id not in self.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.definition.image_id} not found")
        for region in request.definition.scheduler_placement.regions:
            if region.partition("-")[0] not in REGIONS:
                raise GRPCError(Status.INVALID_ARGUMENT, f"Unknown region {region!r}")
        name = request.definition.name
        if name and any(box.name == name and box.app == request.app_id for box in self.boxes.values()):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {name} already exists")
        box = Box(request, self.root / "sandboxes" / secrets.token_hex(6))
        box.folder.mkdir(parents=True)
        if base := self.images[request.definition.image_id]["root"]:
            await asyncio.to_thread(shutil.copytree, base, box.folder / "root", symlinks=True)
        else:
            (box.folder / "root").mkdir()
        link_system(box.folder / "root")
        for number, mount in enumerate(request.definition.volume_mounts):
            volume = self.volumes[mount.volume_id]
            folder = box.folder / f"volume-{number}"
            box.mounts.append(await asyncio.to_thread(Mount, volume, mount.mount_path, folder))
        self.launcher.make_tools(box, self.options["python"])
        box.ready_at = time.monotonic() + self.options["boot_delay"]
        self.boxes[box.id] = self.tasks[box.task] = box
        self.peak = max(self.peak, len(self.boxes))
        watch = asyncio.create_task(self._watch(box))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return box

    async def _watch(self, box: Box) -> None:
        """End the sandbox when its lifetime or its idle timeout ends."""
        while not box.ending:
            now, left = time.monotonic(), box.created + box.timeout - time.time()
            if any(not command.ended.is_set() for command in box.commands.values()):
                box.idle_since = now
            idle_left = box.idle_since + box.idle_timeout - now if box.idle_timeout else left
            if min(left, idle_left) <= 0:
                await self.end(box, Result.GENERIC_STATUS_TIMEOUT)
                return
            await asyncio.sleep(min(left, idle_left, 0.1))

    async def end(self, box: Box, status: Any) -> None:
        """Kill the sandbox's commands, commit what they wrote, and delete the sandbox."""
        if box.ending:
            await box.ended.wait()
            return
        box.ending = True
        for command in box.commands.values():
            command.kill()
        for command in box.commands.values():
            await command.ended.wait()
        if self.options["commit_at_end"]:
            await self.commit(box, None, "end")
        await asyncio.to_thread(shutil.rmtree, box.folder, True)
        box.status = status
        self.boxes.pop(box.id, None)
        self.tasks.pop(box.task, None)
        self.ended[box.id] = box
        box.ended.set()

    async def commit(self, box: Box, path: str | None, cause: str) -> str:
        """Commit one mount or all, and return "ok"."""
        mounts = [mount for mount in box.mounts if path is None or path == mount.path]
        for mount in mounts:
            files = await asyncio.to_thread(mount.commit)
            if files or cause == "sync":
                self.events.append({"cause": cause, "sandbox": box.id, "volume": mount.volume.name, "files": files})
        return "ok"

    async def on_sync(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer `sync` from a sandbox."""
        number, _, path = (await reader.readline()).decode().strip().partition(" ")
        box, answer = self.boxes.get(number), self.options["commit_error"]
        self.faults.counts["sync"] += 1
        if box is None:
            answer = "no such sandbox"
        elif not answer:
            answer = await self.commit(box, path, "sync")
        with contextlib.suppress(ConnectionError):
            writer.write(answer.encode() + b"\n")
            await writer.drain()
        writer.close()

    def of_task(self, task: str) -> Box:
        box = self.tasks.get(task)
        if box is None or box.ending:
            raise GRPCError(Status.NOT_FOUND, f"Task {task} not found: it has ended")
        return box

    def of_id(self, number: str) -> Box:
        box = self.boxes.get(number) or self.ended.get(number)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {number} not found")
        return box

    async def build(self, number: str, definition: Any) -> None:
        """Build an image: run its pip installs, and shell scripts in a root of its own."""
        image = self.images[number]
        bases = [self.images[base.image_id] for base in definition.base_images]
        inherited = next((base["packages"] for base in bases if base["packages"]), "")
        folder = self.root / "images" / number
        environment = {name: value for number in definition.secret_ids for name, value in self.secrets[number].items()}
        root, complaint = self.root / "images" / f"{number}-root", ""
        for base in bases:
            if base["root"]:
                await asyncio.to_thread(shutil.copytree, base["root"], root, symlinks=True, dirs_exist_ok=True)
        for line in definition.dockerfile_commands:
            image["commands"].append(line)
            if line.startswith("FROM ") and "does-not-exist" in line:
                complaint = f"{line[5:]}: manifest unknown"
            if "pip install" in line and "--upgrade" not in line:
                if inherited and not folder.exists():
                    await asyncio.to_thread(shutil.copytree, inherited, folder)
                folder.mkdir(parents=True, exist_ok=True)
                requirements = line.partition("pip install ")[2]
                process = await asyncio.create_subprocess_shell(
                    f"exec {sys.executable} -m pip install --quiet --disable-pip-version-check --no-index --no-deps "
                    f"--target {folder} {requirements}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
                _, said = await process.communicate()
                if process.returncode:
                    complaint = said.decode("utf-8", "replace").strip() or f"pip ended with {process.returncode}"
            elif line.startswith("RUN sh -"):
                complaint = complaint or (self.options["build_error"] if "git fetch" in line else "")
                complaint = complaint or await self.launcher.build(root, line.removeprefix("RUN "), environment)
        image["root"] = str(root) if root.exists() else ""
        image["packages"] = str(folder) if folder.exists() else inherited
        if complaint:
            image["result"] = Result(status=Result.GENERIC_STATUS_FAILURE, exception=complaint)
        else:
            image["result"] = Result(status=Result.GENERIC_STATUS_SUCCESS)
        image["built"].set()

    async def once(self, key: str | None, call: Any) -> Any:
        """Execute a call once per idempotency key."""
        if key is None:
            return await call()
        if key not in self.answers:
            task = self.answers[key] = asyncio.ensure_future(call())
            task.add_done_callback(lambda done: done.exception() and self.answers.pop(key, None))
        return await asyncio.shield(self.answers[key])

    def authorize(self, metadata: Any) -> None:
        token = metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")
        if token != (self.token_id, self.token_secret):
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID or secret is invalid.")
