"""The stand-in's sandboxes and volumes, and the events that it sends about them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .answers import Refused, now
from .box import Box
from .settings import Settings


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


@dataclass
class Snapshot:
    """A snapshot of a sandbox: a copy of its files. The general snapshots are only names in the settings."""

    id: str
    name: str
    source: str
    folder: Path
    state: str = "active"
    reason: str | None = None
    last_used: str | None = None
    created: str = field(default_factory=now)

    def dto(self) -> dict[str, Any]:
        return {
            "id": self.id, "organizationId": "standin", "general": False, "name": self.name, "state": self.state,
            "size": 0.5, "entrypoint": None, "cpu": 1, "gpu": 0, "mem": 1, "disk": 3, "errorReason": self.reason,
            "createdAt": self.created, "updatedAt": now(), "lastUsedAt": self.last_used, "sourceSandboxId": self.source,
        }  # fmt: skip


class Account:
    """State that all calls share."""

    def __init__(self, settings: Settings, root: Path) -> None:
        import socketio

        self.settings = self.first_settings = settings
        self.root = root
        self.base = ""
        self.boxes: dict[str, Box] = {}
        self.volumes: dict[str, Volume] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.created = self.destroyed = self.peak = 0
        self.creates: deque[float] = deque()
        self.transports: dict[Any, asyncio.Transport] = {}
        self.followed: set[Any] = set()  # addresses of clients that follow a log
        self.resets = 0
        self._is_configured = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.events = socketio.AsyncServer(async_mode="asgi", cors_allowed_origins="*")
        self.events.on("connect", self.on_connect)

    async def on_connect(self, _sid: str, _environ: Any, auth: Any = None) -> bool:
        return bool(auth) and auth.get("token") == self.settings.key

    def configure(self, settings: Settings) -> None:
        """Apply new settings, also to waits that have begun."""
        self.settings = settings
        self._is_configured.set()
        self._is_configured = asyncio.Event()

    async def pass_seconds(self, name: str) -> None:
        """Wait for that setting's seconds; a changed setting applies at once, and 0 ends the wait."""
        begun = time.monotonic()
        while (rest := begun + getattr(self.settings, name) - time.monotonic()) > 0:
            await self._wait_for_settings(rest)

    async def _wait_for_settings(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_configured.wait()

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

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

    async def move(self, box: Box, state: str) -> None:
        before, box.state = box.state, state
        await self.events.emit("sandbox.state.updated", {"sandbox": box.dto(), "oldState": before, "newState": state})

    async def destroy(self, box: Box) -> None:
        if box.state in ("destroying", "destroyed"):
            return
        await self.move(box, "destroying")
        box.kill()
        await self.pass_seconds("destroy_s")
        box.remove()
        if self.boxes.pop(box.id, None) is not None:
            self.destroyed += 1
        await self.move(box, "destroyed")

    async def reap(self) -> None:
        """Keep ending sandboxes that have been idle for too long or have exceeded their lifetime."""
        while True:
            await self._wait_for_settings(min(max(self.settings.minute / 20, 0.01), 1.0))
            moment, minute = time.monotonic(), self.settings.minute
            for box in list(self.boxes.values()):
                ttl, idle = box.body.get("ttlMinutes"), box.body.get("autoStopInterval", 15)
                is_over = bool(ttl) and moment >= box.ttl_began + ttl * minute
                # Ephemeral sandboxes, the only ones that rlm-batch creates, are deleted when they are stopped.
                is_idle = bool(idle) and box.state == "started" and moment >= box.active + idle * minute
                if is_over or is_idle:
                    await self.destroy(box)

    def add(self, box: Box) -> None:
        """Add a sandbox, and start it."""
        self.boxes[box.id] = box
        self.created += 1
        self.peak = max(self.peak, len(self.boxes))
        if self.settings.boot_s > 0 or box.body.get("snapshot") in self.settings.broken_snapshots:
            self.later(self.boot(box))
        else:
            box.make()
            box.state = "started"

    async def boot(self, box: Box) -> None:
        await self.pass_seconds("boot_s")
        if box.state == "creating":
            box.make()
            is_broken = box.body.get("snapshot") in self.settings.broken_snapshots
            box.reason = "the runner could not start it" if is_broken else None
            await self.move(box, "error" if is_broken else "started")

    def drop(self, scope: Any) -> None:
        self.abort(tuple(scope["client"]))

    def abort(self, client: Any) -> None:
        transport = self.transports.get(client)
        if transport is not None:
            transport.abort()

    def cut(self) -> None:
        """Break every connection that follows a log."""
        for client in self.followed:
            self.abort(client)

    async def reset(self) -> None:
        """Remove everything and restore the first settings. A call that a fault delays is dropped."""
        self.resets += 1
        self.configure(self.first_settings)
        for box in list(self.boxes.values()):
            await self.destroy(box)
        while self.boxes:  # noqa: ASYNC110 - other tasks may be destroying one
            await asyncio.sleep(0.01)
        for volume in self.volumes.values():
            shutil.rmtree(volume.folder, ignore_errors=True)
        self.volumes.clear()
        for snapshot in self.snapshots.values():
            shutil.rmtree(snapshot.folder, ignore_errors=True)
        self.snapshots.clear()
        self.creates.clear()
        self.created = self.destroyed = self.peak = 0
