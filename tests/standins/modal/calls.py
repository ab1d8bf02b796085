"""Wrappers of every call: counts, faults, tokens and idempotency."""

from __future__ import annotations

import functools
from typing import Any

import grpclib.const
from grpclib.server import Stream


def unary(handler: Any, name: str = "") -> Any:
    """Wrap a handler of one request and one answer with counts, faults, tokens and idempotency."""
    name = name or handler.__name__

    @functools.wraps(handler)
    async def serve(self: Any, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        assert stream.metadata is not None
        after = await self.standin.faults.before(name, stream)
        self.authorize(stream.metadata, request)
        key = stream.metadata.get("x-idempotency-key")
        answer = await self.standin.once(key, lambda: handler(self, request))
        if after is not None:
            self.standin.faults.strike(after, stream)
        await stream.send_message(answer)

    return serve


def refuse_unmodelled_calls(base: type) -> Any:
    """Return a class decorator, with which the server answers UNIMPLEMENTED to calls that the class lacks."""

    def decorate(cls: Any) -> Any:
        missing = set(cls.__abstractmethods__)
        cls.__abstractmethods__ = frozenset()

        def mapping(self: Any) -> dict[str, grpclib.const.Handler]:
            handlers = base.__mapping__(self)  # type: ignore[attr-defined]
            return {path: handler for path, handler in handlers.items() if path.rpartition("/")[2] not in missing}

        cls.__mapping__ = mapping
        return cls

    return decorate
