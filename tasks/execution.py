"""An execution that is to be done, and the key that says whether it has been done before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..sandbox.errors import RlmBatchError
from .ledger.completion_markers import MarkerLocation


@dataclass(slots=True)
class Execution:
    """One piece of code with its variables, at a place in its flow run."""

    index: int
    code: str
    variables: dict[str, Any]
    key: str
    encoded_variables: dict[str, bytes] = field(
        default_factory=dict[str, bytes]
    )  # variables that no ledger repeats, as JSON
    marker: MarkerLocation | None = None  # that says on the volume that it is complete
    errors: list[RlmBatchError] = field(default_factory=list[RlmBatchError])  # one for each attempt that has failed
    is_done: bool = False

    @property
    def attempt(self) -> int:
        """The number of the attempt that is next or under way, from 1."""
        return len(self.errors) + 1

    @property
    def earlier_errors(self) -> tuple[str, ...]:
        """How the attempts so far have failed, a line for each."""
        return tuple(f"{type(error).__name__}: {error.summary}" for error in self.errors)


def assign_keys(
    items: Iterable[tuple[str, dict[str, Any]]],
    fingerprint: dict[str, Any],
    count_occurrence: Callable[[bytes], int] | None = None,
) -> Iterator[Execution]:
    """Gives pairs of code and variables their index and key.

    The key is a SHA-256 over canonical JSON of the code, the variables, the fingerprint of the provider and of the
    language model, and the occurrence number among identical executions, so that replicates are executions of their
    own. `occurrence` counts them: how often it has been asked about a digest; by default in memory.
    """
    count = count_occurrence or _counter()
    for index, (code, variables) in enumerate(items):
        digest = _digest(code, variables, fingerprint)
        key = hashlib.sha256(digest + count(digest).to_bytes(8, "big")).hexdigest()
        yield Execution(index, code, variables, key)


def _counter() -> Callable[[bytes], int]:
    seen: dict[bytes, int] = {}

    def count(digest: bytes) -> int:
        seen[digest] = seen.get(digest, 0) + 1
        return seen[digest]

    return count


def compute_key(
    code: str, variables: dict[str, Any], encoded_variables: dict[str, bytes], fingerprint: dict[str, Any]
) -> str:
    """The key of an execution that has no identical ones in its flow run; `encoded` counts by its hash."""
    hashes = {name: hashlib.sha256(value).hexdigest() for name, value in encoded_variables.items()}
    return _digest(code, variables, {**fingerprint, "encoded": hashes}).hex()


def _digest(code: str, variables: dict[str, Any], fingerprint: dict[str, Any]) -> bytes:
    parts = {"code": code, "variables": variables, "output_fields": None, "provider": fingerprint}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).digest()
