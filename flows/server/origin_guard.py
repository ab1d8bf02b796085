"""Who may ask a Prefect server that rlm-batch starts: programs, and web pages of its own addresses.

Whoever may use the API can have code run. A browser sends what any page tells it to a server on this machine, so the
address 127.0.0.1 keeps no page out. Prefect's own means do not either: CORS hides an answer from a page, but lets
simple requests through; its CSRF tokens leave web sockets out; and a page whose name is made to point here (DNS
rebinding) is of the server's own origin to the browser, and only the name in `Host` tells it from the UI.
"""

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

EXTERNAL = "rlm_batch.external"  # in the scope of what came from outside of the server's own process
FACTORY = "rlm_batch.flows.server.app:create_guarded_app"  # what uvicorn is told to serve
APP_DIR = sys.prefix  # where uvicorn looks for modules first, in the place of the working directory: there are none
# The names of one setting, the one that Prefect prefers first.
ORIGIN_VARIABLES = ("PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS")
NAMES = ("127.0.0.1", "localhost", "[::1]")  # of a server on loopback
FETCH_HEADERS = (b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")  # which browsers set, and no page can
FOREIGN_SITES = {"cross-site", "same-site"}  # of another host; of another port on this one
DEFAULT_PORTS = {"http": 80, "https": 443}  # which browsers leave out
REMEDY = (
    "To allow one more address, start the server with PREFECT_SERVER_CORS_ALLOWED_ORIGINS=http://HOST:PORT in its "
    "environment (several with commas between them)."
)
FOREIGN_ORIGIN = "Refused: this server takes nothing from web pages of other addresses than its own. " + REMEDY
FOREIGN_HOST = "Refused: this server goes by its own addresses only, and was asked by another name. " + REMEDY


def build_origin_settings(port: int) -> dict[str, str]:
    """The environment variables by which a server on loopback learns its own origins, and those that a person allows.

    A person allows them with PREFECT_SERVER_CORS_ALLOWED_ORIGINS, a setting of Prefect's, in the environment or in a
    profile; `*` there allows every page.
    """
    from prefect.settings import get_current_settings

    suffix = "" if port == DEFAULT_PORTS["http"] else f":{port}"
    own = [f"http://{name}{suffix}" for name in NAMES]
    api = get_current_settings().server.api
    profile = api.cors_allowed_origins if "cors_allowed_origins" in api.model_fields_set else ""  # by default it is *
    given = next((os.environ[name] for name in ORIGIN_VARIABLES if name in os.environ), profile)
    origins = ",".join(dict.fromkeys([*own, *split_origins(given)]))
    return dict.fromkeys(ORIGIN_VARIABLES, origins)


def split_origins(setting: str) -> list[str]:
    """The origins of Prefect's setting, in the form in which browsers send them."""
    return [origin for item in setting.split(",") if (origin := item.strip().rstrip("/").lower())]


class OriginGuard:
    """An ASGI application that lets through to `app` what comes from `origins` and from no web page at all.

    It stands around Prefect's application and not in it: the server's automations ask the application itself, in their
    own process, by a name that nobody else may use. Web sockets are held to the same rules as requests. `*` among the
    origins lets everything through.
    """

    def __init__(self, app: App, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = frozenset(host for origin in self._origins for host in _list_hosts(origin))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers a connection, or has it answered."""
        refusal = None if scope["type"] == "lifespan" else self._find_refusal(scope)
        if refusal is None:
            await self._app({**scope, EXTERNAL: True}, receive, send if "*" in self._origins else _forbid_frames(send))
        elif scope["type"] == "http":
            await _send_refusal(send, "http.response", refusal)
        elif "websocket.http.response" in scope.get("extensions", {}):
            await _send_refusal(send, "websocket.http.response", refusal)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _find_refusal(self, scope: Message) -> str | None:
        """Why it is refused, None where it is not."""
        if "*" in self._origins:
            return None
        given: dict[bytes, set[str]] = {b"origin": set(), b"host": set(), **{name: set() for name in FETCH_HEADERS}}
        for name, value in scope["headers"]:
            if name in given:
                given[name].add(value.decode("latin-1").lower())
        if not given[b"host"] or not given[b"host"] <= self._hosts:
            return FOREIGN_HOST
        if given[b"origin"]:  # "null", of a page in a frame or a file, is nobody's
            return None if given[b"origin"] <= self._origins else FOREIGN_ORIGIN
        # Programs send neither. A browser leaves the origin out of a page's pictures, frames and links: links are let
        # through, for they show the UI to a person.
        is_link = (given[b"sec-fetch-mode"], given[b"sec-fetch-dest"]) == ({"navigate"}, {"document"})
        return FOREIGN_ORIGIN if given[b"sec-fetch-site"] & FOREIGN_SITES and not is_link else None


def _forbid_frames(send: Send) -> Send:
    """Sends answers that no page of another origin may show in a frame, where a person would click on what it hides."""

    async def send_message(message: Message) -> None:
        if message["type"] == "http.response.start":
            policy = (b"content-security-policy", b"frame-ancestors 'self'")
            message = {**message, "headers": [*message.get("headers", ()), policy]}
        await send(message)

    return send_message


def _list_hosts(origin: str) -> list[str]:
    """What `Host` is when a page of that origin asks its own server, with a default port and without."""
    parts = urlsplit(origin)
    port = DEFAULT_PORTS.get(parts.scheme)
    if not parts.netloc or port is None:
        return []
    return [parts.netloc] if parts.netloc.rpartition("]")[2].count(":") else [parts.netloc, f"{parts.netloc}:{port}"]


async def _send_refusal(send: Send, kind: str, text: str) -> None:
    body = json.dumps({"detail": text}).encode()  # Prefect's clients show the details of JSON only
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": f"{kind}.start", "status": 403, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
