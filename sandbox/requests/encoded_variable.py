"""A variable as it goes to a sandbox: JSON, which is made once and is hashed, stored and sent as it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from ..wire.nonfinite import encode_values
from ..wire.strict_json import encode_fields

FILE_ABOVE_BYTES = 256 * 1024  # of JSON, above which a value goes into the sandbox as a file and not in a frame


@dataclass(frozen=True, slots=True)
class EncodedVariable:
    """Compact JSON, with null for each number that is not finite, and what those were by JSON pointer."""

    json: bytes
    nonfinite: dict[str, str] = field(default_factory=dict[str, str])

    def compute_digest(self) -> str:
        """A SHA-256 of the value: of its JSON, and then of what is not finite in it."""
        numbers = encode_fields(dict(sorted(self.nonfinite.items()))) if self.nonfinite else b""
        return hashlib.sha256(self.json + numbers).hexdigest()

    @property
    def is_large(self) -> bool:
        """Whether it goes into the sandbox as a file."""
        return len(self.json) + sum(len(pointer) + 10 for pointer in self.nonfinite) > FILE_ABOVE_BYTES

    def encode_file(self, name: str) -> bytes:
        """A file from which the driver reads it: a list of the value, and of what in it is not finite."""
        return b"".join((b"[", self.json, b",", encode_fields(self.build_pointers(name)), b"]"))

    def build_pointers(self, name: str) -> dict[str, str]:
        """What was not finite, by pointers from where the value is the item of that name; a name has no slash."""
        return {f"/{name}{pointer}": number for pointer, number in self.nonfinite.items()}


def encode_variable(value: Any) -> EncodedVariable:
    """The value as JSON; arrays are lists there. Raises NotJsonError, in which it is called `value`."""
    body, numbers = encode_values({"value": value})
    pointers = {pointer.removeprefix("/value"): number for pointer, number in numbers.items()}
    return EncodedVariable(body[len(b'{"value":') : -1], pointers)
