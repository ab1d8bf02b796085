"""An execution that is to be done, and the key that says whether it has been done before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..sandbox.errors import RlmBatchError


@dataclass(slots=True)
class Execution:
    """One piece of code with its variables, at a place in its flow run."""

    index: int
    code: str
    variables: dict[str, Any]
    key: str
    errors: list[RlmBatchError] = field(default_factory=list[RlmBatchError])  # one for each attempt that has failed
    done: bool = False

    @property
    def attempt(self) -> int:
        """The number of the attempt that is next or under way, from 1."""
        return len(self.errors) + 1


def identified(
    items: Iterable[tuple[str, dict[str, Any]]], fingerprint: dict[str, Any], model: dict[str, Any] | None = None
) -> Iterator[Execution]:
    """Gives pairs of code and variables their index and key.

    The key is a SHA-256 over canonical JSON of the code, the variables, the provider's fingerprint, the language
    model's where there is one, and the occurrence number among identical executions, so that replicates are executions
    of their own.
    """
    seen: dict[bytes, int] = {}
    for index, (code, variables) in enumerate(items):
        parts = {"code": code, "variables": variables, "output_fields": None, "provider": fingerprint}
        if model is not None:
            parts["language_model"] = model
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
        digest = hashlib.sha256(text.encode()).digest()
        occurrence = seen[digest] = seen.get(digest, 0) + 1
        key = hashlib.sha256(digest + occurrence.to_bytes(8, "big")).hexdigest()
        yield Execution(index, code, variables, key)
