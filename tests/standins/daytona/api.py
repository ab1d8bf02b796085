"""The API's calls for sandboxes, for their snapshots and for volumes.

The refusals of snapshots are those of apps/api/src/sandbox/services/snapshot.service.ts and of daytonaio/daytona#4990.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from .account import Account, Snapshot, Volume
from .answers import Refused, now
from .box import Box


class ApiCalls:
    """Sandboxes, snapshots, and volumes, which become ready after a delay."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.routes: list[tuple[str, str, Any]] = [
            ("POST", "/api/sandbox", self.create),
            ("GET", "/api/sandbox", self.list),
            ("GET", "/api/sandbox/{box}", self.get),
            ("DELETE", "/api/sandbox/{box}", self.delete),
            ("POST", "/api/sandbox/{box}/last-activity", self.refresh),
            ("POST", "/api/sandbox/{box}/autostop/{minutes}", self.set_auto_stop),
            ("POST", "/api/sandbox/{box}/ttl/{minutes}", self.set_ttl),
            ("PUT", "/api/sandbox/{box}/labels", self.replace_labels),
            ("POST", "/api/sandbox/{box}/ssh-access", self.grant_ssh),
            ("DELETE", "/api/sandbox/{box}/ssh-access", self.get),
            ("POST", "/api/sandbox/{box}/snapshot", self.capture),
            ("GET", "/api/snapshots", self.list_snapshots),
            ("GET", "/api/snapshots/{snapshot}", self.get_snapshot),
            ("DELETE", "/api/snapshots/{snapshot}", self.delete_snapshot),
            ("GET", "/api/volumes", self.list_volumes),
            ("POST", "/api/volumes", self.create_volume),
            ("GET", "/api/volumes/by-name/{name}", self.get_volume),
        ]

    async def create(self, request: Any) -> Any:
        settings = self.account.settings
        body, moment = await request.json(), time.monotonic()
        while self.account.creates and self.account.creates[0] < moment - settings.minute:
            self.account.creates.popleft()
        if settings.creates_per_minute is not None and len(self.account.creates) >= settings.creates_per_minute:
            tenths = math.ceil(10 * (settings.minute - (moment - self.account.creates[0])))
            wait = f"{tenths / 10:.1f}"
            raise Refused(429, "ThrottlerException: Too Many Requests", headers={"Retry-After-sandbox-create": wait})
        snapshot = body.get("snapshot")
        copied = next((copy for copy in self.account.snapshots.values() if copy.name == snapshot), None)
        if copied is not None and copied.state != "active":
            raise Refused(400, f"Snapshot {snapshot} is {copied.state}")
        if snapshot and copied is None and snapshot not in settings.snapshots + settings.broken_snapshots:
            raise Refused(400, f"Snapshot {snapshot} not found. Did you add it through the Daytona Dashboard?")
        if settings.max_sandboxes is not None and len(self.account.boxes) >= settings.max_sandboxes:
            raise Refused(400, f"Total disk limit exceeded. Maximum allowed: {3 * settings.max_sandboxes}GiB.")
        if any(box.name == body.get("name") for box in self.account.boxes.values()):
            raise Refused(409, f"Sandbox with name {body['name']} already exists")
        mounts: dict[str, Path] = {}
        for mount in body.get("volumes") or []:
            volume = self.account.volumes.get(mount["volumeId"])
            if volume is None:
                raise Refused(404, f"Volume {mount['volumeId']} not found")
            if volume.state != "ready":
                raise Refused(400, f"Volume '{volume.name}' is not in a ready state. Current state: {volume.state}")
            mounts[mount["mountPath"]] = volume.folder
        self.account.creates.append(moment)
        box = Box(body, self.account.root, mounts, self.account.base, None if copied is None else copied.folder)
        if copied is not None:
            copied.last_used = now()
        self.account.add(box)
        return box.dto()

    async def list(self, request: Any) -> Any:
        query = request.query_params
        wanted = json.loads(query.get("labels") or "{}")
        boxes = [box for box in self.account.boxes.values() if wanted.items() <= box.labels.items()]
        size = min(int(query.get("limit") or self.account.settings.page), self.account.settings.page)
        begin = int(query.get("cursor") or 0)
        cursor = str(begin + size) if begin + size < len(boxes) else None
        return {"items": [box.dto() for box in boxes[begin : begin + size]], "nextCursor": cursor}

    async def get(self, request: Any) -> Any:
        return self.account.box(request).dto()

    async def delete(self, request: Any) -> Any:
        box = self.account.box(request)
        if self.account.settings.keeps_pending and box.state in ("creating", "destroying"):
            raise Refused(409, "Sandbox state change in progress")
        self.account.later(self.account.destroy(box))
        return {**box.dto(), "state": "destroying"}

    async def refresh(self, request: Any) -> Any:
        self.account.box(request).active = time.monotonic()
        return {}

    async def set_auto_stop(self, request: Any) -> Any:
        return self.set_interval(request, "autoStopInterval")

    async def set_ttl(self, request: Any) -> Any:
        self.account.box(request).ttl_began = time.monotonic()
        return self.set_interval(request, "ttlMinutes")

    async def replace_labels(self, request: Any) -> Any:
        box = self.account.box(request)
        box.labels = (await request.json())["labels"]
        return {"labels": box.labels}

    async def grant_ssh(self, request: Any) -> Any:
        box, moment = self.account.box(request), now()
        times = dict.fromkeys(("expiresAt", "createdAt", "updatedAt"), moment)
        token = f"token-of-{box.id}"
        command = f"ssh -p 2222 {token}@ssh.daytona.example"
        return {"id": box.id, "sandboxId": box.id, "token": token, "sshCommand": command, **times}

    def set_interval(self, request: Any, name: str) -> Any:
        box = self.account.box(request)
        box.body[name] = int(request.path_params["minutes"])
        return box.dto()

    def find(self, request: Any) -> Snapshot:
        name = request.path_params["snapshot"]
        found = [snapshot for snapshot in self.account.snapshots.values() if name in (snapshot.id, snapshot.name)]
        if not found:
            raise Refused(404, f"Snapshot {name} not found")
        return found[0]

    async def capture(self, request: Any) -> Any:
        box, name = self.account.box(request), (await request.json())["name"]
        settings = self.account.settings
        if box.state != "started":
            raise Refused(400, f"Sandbox {box.id} is not started")
        if any(snapshot.name == name for snapshot in self.account.snapshots.values()):
            raise Refused(409, f'Snapshot with name "{name}" already exists for this organization')
        if settings.max_snapshots is not None and len(self.account.snapshots) >= settings.max_snapshots:
            raise Refused(403, f"Snapshot quota exceeded. Maximum allowed: {settings.max_snapshots}")
        await self.account.move(box, "snapshotting")
        self.account.later(self.finish(box, name))
        return box.dto()

    async def finish(self, box: Any, name: str) -> None:
        await self.account.pass_seconds("capture_s")
        if box.state != "snapshotting":
            return
        if not self.account.settings.capture_fails:
            number = str(uuid.uuid4())
            snapshot = Snapshot(number, name, box.id, self.account.root / "snapshots" / number)
            await asyncio.to_thread(box.capture, snapshot.folder)
            self.account.snapshots[number] = snapshot
        await self.account.move(box, "started")

    async def list_snapshots(self, request: Any) -> Any:
        query, snapshots = request.query_params, list(self.account.snapshots.values())
        size, page = int(query.get("limit") or 100), int(query.get("page") or 1)
        shown = [snapshot.dto() for snapshot in snapshots[(page - 1) * size : page * size]]
        pages = max(1, math.ceil(len(snapshots) / size))
        return {"items": shown, "total": len(snapshots), "page": page, "totalPages": pages}

    async def get_snapshot(self, request: Any) -> Any:
        return self.find(request).dto()

    async def delete_snapshot(self, request: Any) -> Any:
        snapshot = self.find(request)
        del self.account.snapshots[snapshot.id]
        await asyncio.to_thread(shutil.rmtree, snapshot.folder, True)

    async def list_volumes(self, _request: Any) -> Any:
        return [volume.dto() for volume in self.account.volumes.values()]

    async def create_volume(self, request: Any) -> Any:
        name = (await request.json())["name"]
        if any(volume.name == name for volume in self.account.volumes.values()):
            raise Refused(409, f"Volume with name {name} already exists")
        volume = Volume(str(uuid.uuid4()), name, "pending_create", self.account.root / "volumes" / uuid.uuid4().hex)
        self.account.volumes[volume.id] = volume
        self.account.later(self.make_volume(volume))
        return volume.dto()

    async def make_volume(self, volume: Volume) -> None:
        await self.account.pass_seconds("volume_ready_s")
        volume.folder.mkdir(parents=True)
        broken = volume.name in self.account.settings.broken_volumes
        volume.state, volume.reason = ("error", "the bucket could not be made") if broken else ("ready", None)

    async def get_volume(self, request: Any) -> Any:
        name = request.path_params["name"]
        for volume in self.account.volumes.values():
            if volume.name == name:
                return volume.dto()
        raise Refused(404, f"Volume with name {name} not found")
