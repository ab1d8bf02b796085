"""The API's calls for warm pools, as the SDK's client of the API and Daytona's page on warm pools describe them.

The service's code is not published. So the texts of refusals are this stand-in's own, and so are these choices: an
organization without pools gets a 403, and a pool that becomes smaller loses its newest sandboxes.
"""

from __future__ import annotations

import uuid
from typing import Any

from .account import Account, WarmPool
from .answers import Refused


class WarmPoolCalls:
    """Creation, listing, change and removal of warm pools."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.routes: list[tuple[str, str, Any]] = [
            ("GET", "/api/warm-pools", self.list),
            ("POST", "/api/warm-pools", self.create),
            ("PATCH", "/api/warm-pools/{pool}", self.update),
            ("DELETE", "/api/warm-pools/{pool}", self.delete),
        ]

    def find(self, request: Any) -> WarmPool:
        pool = self.account.pools.get(request.path_params["pool"])
        if pool is None:
            raise Refused(404, f"Warm pool {request.path_params['pool']} not found")
        return pool

    async def list(self, _request: Any) -> Any:
        return [self.account.describe_pool(pool) for pool in self.account.pools.values()]

    async def create(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        body, settings = await request.json(), self.account.settings
        name, target, size = body["snapshot"], body.get("target") or "local", self.read_size(body, 1)
        if not settings.warm_pools:
            raise Refused(403, "Warm pools are not available for this organization")
        snapshots = self.account.snapshots.values()
        snapshot = next((item for item in snapshots if name in (item.id, item.name)), None)
        if snapshot is None:
            raise Refused(404, f"Snapshot {name} not found")
        if snapshot.state != "active":
            raise Refused(400, f"Snapshot {name} is {snapshot.state}")
        if any((pool.snapshot, pool.target) == (snapshot.name, target) for pool in self.account.pools.values()):
            raise Refused(409, f"Warm pool for snapshot {snapshot.name} in {target} already exists")
        if settings.max_sandboxes is not None and size > settings.max_sandboxes:
            raise Refused(400, f"Warm pool quota exceeded. Maximum allowed: {settings.max_sandboxes}")
        pool = WarmPool(str(uuid.uuid4()), snapshot.name, target, size)
        self.account.pools[pool.id] = pool
        self.account.fill_pools()
        return JSONResponse(self.account.describe_pool(pool), 201)  # The SDK reads no answer of another status.

    async def update(self, request: Any) -> Any:
        pool = self.find(request)
        pool.size = self.read_size(await request.json(), 0)
        self.account.fill_pools()
        return self.account.describe_pool(pool)

    async def delete(self, request: Any) -> None:
        self.account.drop_pools([self.find(request)])

    def read_size(self, body: dict[str, Any], least: int) -> int:
        if body["pool"] < least:
            raise Refused(400, f"pool must not be less than {least}")
        return int(body["pool"])
