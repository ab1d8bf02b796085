"""Error answers in the SDK's envelope, and timestamps."""

from __future__ import annotations

import datetime
import time
from typing import Any


class Refused(Exception):
    """An error answer in the envelope that the SDK reads."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        source: str = "DAYTONA_API",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"statusCode": status, "message": message, "code": code, "source": source}
        self.headers = headers or {}


def daemon(status: int, message: str, code: str = "") -> Refused:
    return Refused(status, message, code, "DAYTONA_DAEMON")


def now(after: float = 0.0) -> str:
    return datetime.datetime.fromtimestamp(time.time() + after, datetime.UTC).isoformat()


async def refuse(scope: Any, receive: Any, send: Any, status: int, retry_after: float, message: str = "") -> None:
    """Send an error instead of an answer or a websocket."""
    from starlette.responses import JSONResponse
    from starlette.websockets import WebSocket

    usual = "ThrottlerException: Too Many Requests" if status == 429 else "upstream error"
    error = Refused(status, message or usual)
    headers = {"Retry-After": f"{retry_after:g}"} if status == 429 else {}
    response = JSONResponse(error.body, status, headers)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        while (await receive()).get("more_body"):
            pass
        await response(scope, receive, send)
