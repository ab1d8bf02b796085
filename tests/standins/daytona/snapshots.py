"""The API's calls for snapshots of sandboxes, as the SDK's client of the API describes them.

The refusals are those of apps/api/src/sandbox/services/snapshot.service.ts and of daytonaio/daytona#4990.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import uuid
from typing import Any

from .account import Account, Snapshot
from .answers import Refused


class SnapshotCalls:
    """Captures, listing, activation and removal of snapshots."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.routes: list[tuple[str, str, Any]] = [
            ("POST", "/api/sandbox/{box}/snapshot", self.capture),
            ("GET", "/api/snapshots", self.list),
            ("GET", "/api/snapshots/{snapshot}", self.get),
            ("POST", "/api/snapshots/{snapshot}/activate", self.activate),
            ("DELETE", "/api/snapshots/{snapshot}", self.delete),
        ]

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

    async def list(self, request: Any) -> Any:
        query, snapshots = request.query_params, list(self.account.snapshots.values())
        size, page = int(query.get("limit") or 100), int(query.get("page") or 1)
        shown = [snapshot.dto() for snapshot in snapshots[(page - 1) * size : page * size]]
        pages = max(1, math.ceil(len(snapshots) / size))
        return {"items": shown, "total": len(snapshots), "page": page, "totalPages": pages}

    async def get(self, request: Any) -> Any:
        return self.find(request).dto()

    async def activate(self, request: Any) -> Any:
        snapshot = self.find(request)
        if snapshot.state != "inactive":
            raise Refused(400, f"Snapshot {snapshot.id} cannot be activated - it is in {snapshot.state} state")
        snapshot.state = "active"
        return snapshot.dto()

    async def delete(self, request: Any) -> Any:
        snapshot = self.find(request)
        del self.account.snapshots[snapshot.id]
        await asyncio.to_thread(shutil.rmtree, snapshot.folder, True)
