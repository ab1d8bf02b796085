"""The request of an execution: its code, its variables and its settings."""

from __future__ import annotations

import hashlib
import keyword
import os
import unicodedata
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from ..driver_settings import resolve_timeout
from ..errors import ConfigurationError
from ..model_reply import read_program
from ..wire.collection import MAX_PATTERN_CHARACTERS, parse_pattern
from ..wire.names import OWN_FILE_PREFIX, QUERY_ERROR_NAMES, VOLUME_NAMES, add_article
from ..wire.nonfinite import encode_values
from ..wire.strict_json import NotJsonError, convert_fields, encode_fields
from .function_code import convert_code
from .tool_docs import describe_tool

if TYPE_CHECKING:
    from ..driver_settings import Preparation
    from ..intake.reports import ShouldPrune
    from ..queries.recursion import Queries

PROVIDED_NAMES = frozenset(("SUBMIT", *VOLUME_NAMES))  # defined for all code
Tools = Mapping[str, Any]  # functions of the host, and values (`ToolValue`), by their names in the code
FILE_ABOVE_BYTES = 256 * 1024  # JSON; larger values enter the sandbox as a file, not in a frame


@dataclass(frozen=True, slots=True)
class EncodedVariable:
    """A value as JSON, which several requests can share.

    Attributes:
        json: Compact JSON, with null for each non-finite number.
        nonfinite: These numbers by JSON pointer.
    """

    json: bytes
    nonfinite: dict[str, str] = field(default_factory=dict[str, str])

    def compute_digest(self) -> str:
        """Return the SHA-256 of the JSON followed by the non-finite numbers."""
        digest = hashlib.sha256(self.json)
        if self.nonfinite:
            digest.update(encode_fields(dict(sorted(self.nonfinite.items()))))
        return digest.hexdigest()

    @property
    def is_large(self) -> bool:
        """Return True if the value is sent to the sandbox as a file."""
        pointer_bytes = sum(len(pointer) + len('"":"-inf"') for pointer in self.nonfinite)
        return len(self.json) + pointer_bytes > FILE_ABOVE_BYTES

    def encode_file(self, name: str) -> bytes:
        """Return the content of the value's file: a JSON list of the value and of its non-finite numbers by pointer."""
        return b"".join((b"[", self.json, b",", encode_fields(self.build_pointers(name)), b"]"))

    def build_pointers(self, name: str) -> dict[str, str]:
        """Return the non-finite numbers by pointers that begin with `name`, which must not contain a slash."""
        return {f"/{name}{pointer}": number for pointer, number in self.nonfinite.items()}


def encode_variable(value: Any) -> EncodedVariable:
    """Encode a value as JSON, with arrays as lists. Raises NotJsonError, whose message calls the value `value`."""
    parts, numbers = encode_values({"value": value})
    pointers = {pointer.removeprefix("/value"): number for pointer, number in numbers.items()}
    return EncodedVariable(b"".join(parts)[len(b'{"value":') : -1], pointers)


@dataclass(frozen=True, slots=True)
class ToolValue(EncodedVariable):
    """A value that code finds by a tool's name. Models see the description."""

    description: str = ""


def check_variable_name(name: object, where: str = "", taken: Collection[str] = PROVIDED_NAMES) -> None:
    """Raise ConfigurationError for an invalid variable name.

    Args:
        name: The name.
        where: The name's origin, as the beginning of the message.
        taken: Names of functions and constants that the code already has.
    """
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(f"{where}the variable {name!r} has a name that Python code cannot use: rename it")
    is_special = name.startswith("__") and name.endswith("__")
    if is_special or name in taken:
        raise ConfigurationError(
            f"{where}the variable {name!r} has the name of a function or constant that code already has: rename it"
        )


@dataclass(slots=True)
class WorkTime:
    """A limit on the seconds that code works, for one or several executions.

    The seconds in which the code waits for functions of the host do not count.
    """

    limit: float
    used: float = 0.0


@dataclass(slots=True)
class ExecutionRequest:
    """One execution: its code, its variables and its settings.

    An interpreter calls `complete`, which also encodes the body of the driver's frame. `BaseInterpreter.execute`
    explains the arguments that are not listed here.

    Args:
        timeout: Seconds. None means the interpreter's default, and after `complete` no limit.
        work_time: Interrupts the code at this limit. The execution needs a context, whose state is kept.
        context: Name of a process that keeps its state between executions. None runs the code in a fresh process.
        on_output: Called with ("stdout" or "stderr", text) on the event loop while the code writes.
        encoded: More variables, already encoded as JSON. `meta.variables` does not contain them.
        queries: Gives the code access to a language model.
        index: Number or numbers from which the execution's seed is derived, if the preparation has a seed.
        should_prune: Called with the step and value of each report; returns True to end the execution.
        tools: Functions of the host that the code may call by name. `complete` sets them.
        body: The body of the driver's frame, in parts. `complete` sets it.
        files: Paths in the sandbox of the variables of `encoded` that are too large for the frame and must be uploaded.
            `complete` sets them.

    Raises:
        ConfigurationError: A variable is not JSON, or a pattern is invalid.
    """

    code: str | Callable[..., object]
    variables: dict[str, Any] | None = None
    _: KW_ONLY
    timeout: float | None = None
    work_time: WorkTime | None = None
    context: str | None = None
    output_fields: list[dict[str, str]] | None = None
    on_output: Callable[[str, str], object] | None = None
    refuse_exit: bool = False
    collect: Sequence[str] | None = None
    collect_to: str | os.PathLike[str] | None = None
    encoded: Mapping[str, EncodedVariable] | None = None
    queries: Queries | None = None
    index: int | tuple[int, ...] = 0
    should_prune: ShouldPrune | None = None
    tools: Tools = field(default_factory=dict[str, Callable[..., Any]])
    body: list[bytes] = field(default_factory=list[bytes])
    files: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        try:
            self.variables = convert_fields(self.variables or {}, allow_nonfinite=True)
        except NotJsonError as error:
            raise ConfigurationError(f"the variables are not JSON: {error}") from None
        self.collect = check_patterns(self.collect)

    def complete(self, tools: Tools, timeout: float | None, preparation: Preparation | None) -> None:
        """Check the code and the names, set the timeout and the tools, and encode the body.

        Args:
            tools: The interpreter's tools.
            timeout: The interpreter's default timeout in seconds.
            preparation: The interpreter's preparation, from whose seed the execution's seed is derived.

        Raises:
            ConfigurationError: The code, a variable's name or the timeout is invalid, or text is not UTF-8.
        """
        if self.timeout is None:
            self.timeout = timeout
        self.timeout = resolve_timeout("timeout", self.timeout)
        query_tools = {} if self.queries is None else self.queries.tools
        self.tools = {**tools, **query_tools}
        variable_names = (*(self.variables or ()), *(self.encoded or ()))
        self.code = self._read_code(variable_names)
        self._check_variable_names(variable_names)
        values = {name: tool for name, tool in tools.items() if isinstance(tool, ToolValue)}
        self.encoded = {**values, **(self.encoded or {})}
        for name, value in self.encoded.items():
            if value.is_large:
                self.files[name] = f"{OWN_FILE_PREFIX}-{uuid.uuid4().hex}.json"
        fields: dict[str, Any] = {
            "code": self.code,
            "names": [name for name in tools if name not in query_tools and name not in values],
            "output_fields": self.output_fields,
            "files": self.files,
            "queries": self.queries is not None,
        }
        if self.refuse_exit:
            fields["refuse_exit"] = True
            fields["docs"] = {name: describe_tool(name, tools[name]) for name in fields["names"]}
        if preparation is not None and preparation.seed is not None:
            numbers = self.index if isinstance(self.index, tuple) else (self.index,)
            fields["seed"] = preparation.derive_seed(*numbers)
        try:
            self.body = self._encode(fields)
        except NotJsonError as error:
            raise ConfigurationError(f"the variables or the code are not JSON and UTF-8: {error}") from None

    def _read_code(self, variable_names: Collection[str]) -> str:
        code = convert_code(self.code, self.tools, variable_names)
        if type(code) is not str:
            raise ConfigurationError(f"code is {add_article(type(code).__name__)}: pass the text of a Python program")
        return read_program(code)

    def _check_variable_names(self, variable_names: Collection[str]) -> None:
        taken = {*PROVIDED_NAMES, *self.tools}
        if self.queries is not None:
            taken.update(QUERY_ERROR_NAMES)
        for name in variable_names:
            check_variable_name(name, taken=taken)

    def _encode(self, fields: dict[str, Any]) -> list[bytes]:
        """Return the fields and the variables as JSON, in parts. Raises NotJsonError.

        The parts are a few large ones, because copies of large variables take time.
        """
        # Python normalizes names in code to NFKC, too.
        variables = {unicodedata.normalize("NFKC", name): value for name, value in (self.variables or {}).items()}
        parts, nonfinite = encode_values(variables)
        parts[-1] = parts[-1].removesuffix(b"}")  # The encoded variables follow in the same object.
        separator = b"," if variables else b""
        for name, value in (self.encoded or {}).items():
            if name not in self.files:
                nonfinite |= value.build_pointers(name)
                key = encode_fields({name: None}).removeprefix(b"{").removesuffix(b"null}")
                parts += (separator + key, value.json)
                separator = b","
        if nonfinite:
            fields["nonfinite"] = nonfinite
        beginning = encode_fields(fields).removesuffix(b"}") + b',"variables":'
        return [beginning, *parts, b"}}"]


def check_patterns(collect: Sequence[str] | None) -> list[str]:
    """Return the patterns as a list. Raises ConfigurationError if one is invalid or leaves the folder."""
    if collect is None:
        return []
    if not isinstance(collect, (list, tuple)) or any(type(pattern) is not str for pattern in collect):
        raise ConfigurationError("collect must be a list of patterns, such as ['*.png', 'out/model.bin']")
    for pattern in collect:
        try:
            parse_pattern(pattern)
        except ValueError as error:
            raise ConfigurationError(f"collect has the pattern {pattern!r}, and {error}") from None
    if sum(len(pattern) for pattern in collect) > MAX_PATTERN_CHARACTERS:
        raise ConfigurationError(
            f"the patterns of collect have more than {MAX_PATTERN_CHARACTERS:,} characters together: use "
            "a directory, as in out/**"
        )
    return list(collect)
