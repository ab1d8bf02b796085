"""The API's calls for volumes."""

from __future__ import annotations

import uuid
from typing import Any

from .account import Account, Volume
from .answers import Refused


class VolumeCalls:
    """Creation of volumes, which become ready after a delay."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.routes: list[tuple[str, str, Any]] = [
            ("GET", "/api/volumes", self.list_volumes),
            ("POST", "/api/volumes", self.create_volume),
            ("GET", "/api/volumes/by-name/{name}", self.get_volume),
        ]

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
