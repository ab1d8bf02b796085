"""The headers that a server of ours wants of whoever changes something, or asks with a POST."""

from functools import cache
from uuid import uuid4

import httpx


@cache
def get_csrf_headers(api_url: str, auth: tuple[str, str] | None = None) -> dict[str, str]:
    """A token's headers for plain requests to that server; Prefect's clients have their own. It holds for an hour.

    Each address has a client of its own: a second token of the same one would make the first invalid.
    """
    client = str(uuid4())
    answer = httpx.get(f"{api_url}/csrf-token", params={"client": client}, auth=auth, timeout=60).raise_for_status()
    return {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": answer.json()["token"]}
