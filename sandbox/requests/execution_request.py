"""The request of an execution: its code and its variables. Several requests can share an encoded variable."""

from __future__ import annotations

import hashlib
import keyword
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigurationError
from ..model_reply import read_program
from ..wire.collection import MAX_PATTERN_CHARACTERS, parse_pattern
from ..wire.names import QUERY_ERROR_NAMES, QUERY_NAMES, VOLUME_NAMES, add_article
from ..wire.nonfinite import encode_values, encode_values_in_parts
from ..wire.strict_json import NotJsonError, convert_fields, encode_fields

PROVIDED_NAMES = frozenset(("SUBMIT", *VOLUME_NAMES))  # defined for all code
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
    """Encode a value as JSON, with arrays as lists. Raises NotJsonError; its message names the value `value`."""
    body, numbers = encode_values({"value": value})
    pointers = {pointer.removeprefix("/value"): number for pointer, number in numbers.items()}
    return EncodedVariable(body[len(b'{"value":') : -1], pointers)


def convert_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables with arrays as lists. Raises ConfigurationError for values that JSON cannot hold."""
    try:
        return convert_fields(variables or {}, allow_nonfinite=True)
    except NotJsonError as error:
        raise ConfigurationError(f"the variables are not JSON: {error}") from None


def check_variable_name(name: object, where: str = "") -> None:
    """Raise ConfigurationError for an invalid variable name. The message begins with `where`, the name's origin."""
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
        better = re.sub(r"[ .()/%-]+", "_", name).strip("_") if isinstance(name, str) else ""
        better = f"_{better}" if better[:1].isdigit() else f"{better}_" if keyword.iskeyword(better) else better
        advice = f"rename it, as to {better}" if better.isidentifier() else "rename it"
        raise ConfigurationError(f"{where}the variable {name!r} has a name that Python code cannot use: {advice}")
    if name in PROVIDED_NAMES or (name.startswith("__") and name.endswith("__")):
        raise ConfigurationError(
            f"{where}the variable {name!r} has the name of a function or constant that code already has: rename it"
        )


def encode_request(
    code: str,
    variables: dict[str, Any],
    tools: Collection[str],
    output_fields: list[dict[str, str]] | None = None,
    encoded: Mapping[str, EncodedVariable] | None = None,
    files: Mapping[str, str] | None = None,
    *,
    queries: bool = False,
    seed: int | None = None,
    refuse_exit: bool = False,
) -> list[bytes]:
    """Encode the body of an execute frame, in parts. Raises ConfigurationError for invalid code or variables.

    Args:
        code: Python program, which may be in Markdown.
        variables: Variables of the code.
        tools: Names of the host functions that the code may call.
        output_fields: Expected fields with name and type, or None for any fields.
        encoded: More variables, already encoded.
        files: Paths in the sandbox of variables that are sent as files.
        queries: Allow queries to a model.
        seed: Seed of the random generators, for a fork of prepared code.
        refuse_exit: Treat a call of exit() as a failure, even with status 0.
    """
    if type(code) is not str:
        raise ConfigurationError(f"code is {add_article(type(code).__name__)}: pass the text of a Python program")
    code = read_program(code)
    for name in (*variables, *(encoded or ()), *(files or ())):
        check_variable_name(name)
        if name in tools or (queries and (name in QUERY_NAMES or name in QUERY_ERROR_NAMES)):
            raise ConfigurationError(
                f"the variable {name!r} has the name of a function or constant that code already has: rename it"
            )
    try:
        # Python normalizes names in code to NFKC, too.
        values, nonfinite = encode_values_in_parts(
            {unicodedata.normalize("NFKC", name): value for name, value in variables.items()}
        )
        for name, value in (encoded or {}).items():
            nonfinite |= value.build_pointers(name)
        rest = encode_fields(
            {
                "code": code,
                "names": list(tools),
                "output_fields": output_fields,
                "files": dict(files or {}),
                "queries": queries,
                **({} if seed is None else {"seed": seed}),
                **({"refuse_exit": True} if refuse_exit else {}),
                **({"nonfinite": nonfinite} if nonfinite else {}),
            }
        )
    except NotJsonError as error:
        raise ConfigurationError(f"the variables or the code are not JSON and UTF-8: {error}") from None
    more = b",".join(encode_fields({name: None})[1:-5] + value.json for name, value in (encoded or {}).items())
    comma = b"," if variables and more else b""
    return [rest[:-1] + b',"variables":', *values[:-1], values[-1][:-1] + comma, more, b"}}"]


def check_patterns(collect: Sequence[str] | None) -> list[str]:
    """Return the patterns as a list. Raises ConfigurationError for a pattern that is invalid or leaves the folder."""
    if collect is None:
        return []
    if not isinstance(collect, (list, tuple)) or any(type(pattern) is not str for pattern in collect):
        raise ConfigurationError("collect must be a list of patterns, such as ['*.png', 'out/model.bin']")
    for pattern in collect:
        try:
            parse_pattern(pattern)
        except ValueError as error:
            raise ConfigurationError(f"collect has the pattern {pattern!r}, and {error}") from None
    if sum(map(len, collect)) > MAX_PATTERN_CHARACTERS:
        raise ConfigurationError(
            f"the patterns of collect have more than {MAX_PATTERN_CHARACTERS:,} characters together: use "
            "a directory, as in out/**"
        )
    return list(collect)
