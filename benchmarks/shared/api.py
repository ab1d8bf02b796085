"""What a server's API answers: through Prefect's client, which brings the token that the server wants with a POST."""

from functools import cache
from typing import Any

from prefect.client.orchestration import SyncPrefectClient


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer of the server at `url`. Raises httpx.HTTPError."""
    return _make_client(url).request("POST", path, json=body).json()  # type: ignore[arg-type]


@cache
def _make_client(url: str) -> SyncPrefectClient:
    return SyncPrefectClient(url)
