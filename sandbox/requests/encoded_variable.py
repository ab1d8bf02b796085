"""A variable encoded as JSON once, to be hashed, stored and sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from ..wire.nonfinite import encode_values
from ..wire.strict_json import encode_fields

FILE_ABOVE_BYTES = 256 * 1024  # JSON; larger values enter the sandbox as a file, not in a frame


@dataclass(frozen=True, slots=True)
class EncodedVariable:
    """A value as compact JSON with null for each non-finite number, and these numbers by JSON pointer."""

    json: bytes
    nonfinite: dict[str, str] = field(default_factory=dict[str, str])

    def compute_digest(self) -> str:
        """Return the SHA-256 of the JSON followed by the non-finite numbers."""
        numbers = encode_fields(dict(sorted(self.nonfinite.items()))) if self.nonfinite else b""
        return hashlib.sha256(self.json + numbers).hexdigest()

    @property
    def is_large(self) -> bool:
        """Return True if the value enters the sandbox as a file."""
        return len(self.json) + sum(len(pointer) + 10 for pointer in self.nonfinite) > FILE_ABOVE_BYTES

    def encode_file(self, name: str) -> bytes:
        """Return the content of a file for the driver: a list of the value and its non-finite numbers."""
        return b"".join((b"[", self.json, b",", encode_fields(self.build_pointers(name)), b"]"))

    def build_pointers(self, name: str) -> dict[str, str]:
        """Return the non-finite numbers by pointers that begin with `name`, which must not contain a slash."""
        return {f"/{name}{pointer}": number for pointer, number in self.nonfinite.items()}


def encode_variable(value: Any) -> EncodedVariable:
    """Encode a value as JSON, with arrays as lists. Raises NotJsonError, whose message calls it `value`."""
    body, numbers = encode_values({"value": value})
    pointers = {pointer.removeprefix("/value"): number for pointer, number in numbers.items()}
    return EncodedVariable(body[len(b'{"value":') : -1], pointers)
