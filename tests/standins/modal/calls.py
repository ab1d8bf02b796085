"""Wrappers of every call: counts, injected faults, tokens and idempotency."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import functools
import json
import random
import re
import time
from typing import Any

import grpclib.const
from grpclib import GRPCError, Status
from grpclib.server import Stream
from modal_proto import api_pb2

TOKEN_SECONDS = 3600.0


def token(**claims: Any) -> str:
    """Return a JSON web token with an invalid signature."""
    parts = [{"alg": "none"}, {"exp": time.time() + TOKEN_SECONDS, **claims}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, "c2ln"])


def unary(handler: Any) -> Any:
    """Wrap a handler of one request and one answer with counts, faults, tokens and idempotency."""
    name = handler.__name__

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


class Faults:
    """Counts of calls, and rules that make some of them fail."""

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.chance = random.Random(0)
        self._are_replaced = asyncio.Event()
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()

    def replace(self, rules: list[dict[str, Any]], seed: int = 0) -> None:
        """Replace the rules; calls that wait for a delay of the old ones continue."""
        self.rules, self.chance = rules, random.Random(seed)
        self._are_replaced.set()
        self._are_replaced = asyncio.Event()

    async def before(self, name: str, stream: Any) -> dict[str, Any] | None:
        """Count a call and apply the first rule that hits; return the rule if it strikes after the call."""
        self.counts[name] += 1
        for rule in self.rules:
            if not re.fullmatch(rule.get("method", ".*"), name) or rule.get("times", 1) <= 0:
                continue
            if self.chance.random() >= rule.get("probability", 1.0):
                continue
            if "times" in rule:
                rule["times"] -= 1
            self.faults[name] += 1
            if rule.get("delay"):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rule["delay"]):
                        await self._are_replaced.wait()
            if rule.get("after"):
                return rule
            self.strike(rule, stream)
            return None
        return None

    @staticmethod
    def strike(rule: dict[str, Any], stream: Any) -> None:
        """Fail a call according to the rule."""
        if rule.get("drop"):
            stream._stream.connection._transport.abort()
            raise asyncio.CancelledError
        if rule.get("status"):
            retry_after = rule.get("retry_after")
            details = [] if retry_after is None else [api_pb2.RPCRetryPolicy(retry_after_secs=retry_after)]
            raise GRPCError(Status[rule["status"]], f"injected {rule['status']}", details)
