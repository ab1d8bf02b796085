"""Headers that our Prefect servers require for a request that changes something, or for a POST."""

from functools import cache
from uuid import uuid4

import httpx


@cache
def get_csrf_headers(api_url: str, auth: tuple[str, str] | None = None) -> dict[str, str]:
    """Return the headers of a token for plain HTTP requests to that server; the token is valid for an hour.

    Prefect's clients get their own tokens. Each address gets its own client id, because a second token for the same id
    would invalidate the first.
    """
    client = str(uuid4())
    answer = httpx.get(f"{api_url}/csrf-token", params={"client": client}, auth=auth, timeout=60).raise_for_status()
    return {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": answer.json()["token"]}
