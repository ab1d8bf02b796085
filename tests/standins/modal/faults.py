"""Injected faults: which calls fail, how often and how."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import re
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2


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
