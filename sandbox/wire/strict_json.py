"""Strict JSON, as the host and the driver exchange it.

It uses the native parts of CPython's ``json`` directly. ``json`` itself imports ``re``, which would take longer than
the rest of a sandbox's start.
"""

from __future__ import annotations

from _json import encode_basestring, make_encoder, make_scanner  # type: ignore[attr-defined]

from .names import add_article

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

_FIRST_UNREADABLE_INTEGER = 10**4300  # Python's default limit refuses to parse such integers
# Limit on lists and dicts in one value on the host, because Python's garbage collector scans all of them at once.
MAX_CONTAINERS = 100_000
_LARGE_TEXT = 16 * 1024  # characters

JSON_KINDS = "numbers, text, lists and dicts"
# Attributes of well-known classes, and the expressions that messages suggest for their values.
CONVERSIONS = {
    "to_dicts": "{}.to_dicts()",  # a data frame of Polars
    "iloc": "{}.to_dict('list')",  # a data frame of pandas
    "model_dump": "{}.model_dump(mode='json')",  # a model of pydantic
    "__dataclass_fields__": "dataclasses.asdict({})",
    "isoformat": "{}.isoformat()",  # a date or time
}

# The characters that `dumps` escapes. The backslash comes first, because the other escapes contain it.
_ESCAPES = {"\\": "\\\\", '"': '\\"', **{chr(number): f"\\u{number:04x}" for number in range(32)}}
_ESCAPES.update({"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"})


class NotJsonError(Exception):
    """A value that strict JSON cannot hold; the message names its place and what to use."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name + " is not JSON")


def _read_finite(text: str) -> float:
    """Parse a number. Raises ValueError for a number such as 1e999, which `float` reads as infinity."""
    value = float(text)
    if value - value != 0:
        raise ValueError(text[:20] + " is more than a number can be")
    return value


class _ScannerSettings:
    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float = staticmethod(_read_finite)
    parse_int = int
    parse_constant = staticmethod(_refuse_constant)
    memo: dict[str, str] = {}  # noqa: RUF012 - the scanner's own protocol


# Typed as Any: the scanner accepts any object with these attributes, but its stub requires a scanner.
_settings: Any = _ScannerSettings()
_no_default: Any = None  # the encoder raises TypeError for a value that is not JSON
_scan: Any = make_scanner(_settings)
_encode: Any = make_encoder(None, _no_default, encode_basestring, None, ":", ",", False, False, False)


def loads(text: str) -> Any:
    """Parse compact JSON. Raises ValueError or RecursionError."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one JSON value")
    return value


def dumps(value: Any) -> str:
    """Return compact JSON, not escaped to ASCII. Raises ValueError, TypeError or RecursionError."""
    return "".join(_encode(value, 0))


def encode_in_parts(fields: dict[str, Any]) -> list[bytes]:
    """Encode the fields as UTF-8 JSON. Each large text is its own part, which saves copies. Raises as `dumps` does."""
    if not any(map(_has_few_escapes, fields.values())):
        return [dumps(fields).encode("utf-8")]
    parts: list[bytes] = []
    json = ""  # the JSON after the last large text
    separator = "{"
    for name, value in fields.items():
        json += f"{separator}{dumps(name)}:"
        separator = ","
        if _has_few_escapes(value):
            parts += f'{json}"'.encode(), _escape_text(value).encode("utf-8")
            json = '"'
        else:
            json += dumps(value)
    return [*parts, (json + "}").encode("utf-8")]


def _has_few_escapes(value: Any) -> bool:
    """Return True for a large text whose beginning needs few escapes."""
    if type(value) is not str or len(value) < _LARGE_TEXT:
        return False
    beginning = value[:_LARGE_TEXT]
    escapes = beginning.count('"') + beginning.count("\n") + beginning.count("\\")
    return escapes < _LARGE_TEXT // 32


def _escape_text(text: str) -> str:
    """Escape a text for JSON. One search per special character is faster than one pass over all characters."""
    for mark, escape in _ESCAPES.items():
        if mark in text:
            text = text.replace(mark, escape)
    return text


def is_certainly_json(value: Any) -> bool:
    """Return True if a value is certainly JSON. After False, the slower conversion decides."""
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return -_FIRST_UNREADABLE_INTEGER < value < _FIRST_UNREADABLE_INTEGER
    if kind is float:
        return value - value == 0  # neither infinite nor NaN
    if kind is list or kind is tuple:
        return all(map(is_certainly_json, value))
    if kind is not dict:
        return False
    return all(type(key) is str for key in value) and all(map(is_certainly_json, value.values()))


def convert_fields(
    fields: dict[str, Any], max_items: int | None = None, *, allow_nonfinite: bool = False
) -> dict[str, Any]:
    """Return the fields with arrays converted to lists of Python numbers.

    An array is converted by its `tolist`. An array of dates and a Series with an index are refused, because the list
    would lose the unit or the index. Numbers of float64 and int64 arrays stay exact.

    Args:
        fields: Values by name.
        max_items: Maximum number of items of an array. Default None: no limit.
        allow_nonfinite: Keep NaN and infinities, which JSON cannot hold.

    Raises:
        NotJsonError: JSON cannot hold a value. The message names the value.
    """
    converter = _Converter(max_items, allow_nonfinite)
    converted: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            converted[name] = value if is_certainly_json(value) else converter.convert(value, name)
        except RecursionError:
            raise NotJsonError(f"{name} contains itself, or is nested too deeply") from None
    return converted


class _Converter:
    """A converter of values to JSON, which explains why a value is not JSON."""

    def __init__(self, max_items: int | None, allow_nonfinite: bool) -> None:
        self._max_items = max_items
        self._allow_nonfinite = allow_nonfinite

    def convert(self, value: Any, place: str) -> Any:
        """Return the value as lists, dicts, numbers, texts and None. Raises NotJsonError, which names `place`."""
        kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
        if hasattr(kind, "tolist") and not isinstance(value, memoryview):
            return self._convert_array(value, place)
        if isinstance(value, int) and not -_FIRST_UNREADABLE_INTEGER < value < _FIRST_UNREADABLE_INTEGER:
            raise NotJsonError(f"{place} is an integer of more than 4,300 digits: use hex({place})")
        if value is None or isinstance(value, (str, int)):
            return value
        if isinstance(value, float):
            value = float.__float__(value)  # a subclass may override any method
            if not self._allow_nonfinite and value - value != 0:
                raise NotJsonError(f"{place} is {value!r}, which JSON cannot hold: use None or a string in its place")
            return value
        if isinstance(value, (list, tuple)):
            items: Any = value  # type: ignore[reportUnknownVariableType]
            return [self.convert(item, f"{place}[{index}]") for index, item in enumerate(items)]
        if isinstance(value, dict):
            pairs: Any = value  # type: ignore[reportUnknownVariableType]
            for key in pairs:
                if not isinstance(key, str):
                    raise NotJsonError(f"{place} has the key {key!r}, which is not a string: use strings as keys")
            # `str.__str__` returns the plain text of a key that is a member of a str enumeration.
            return {str.__str__(key): self.convert(item, f"{place}[{key!r}]") for key, item in pairs.items()}
        raise self._refuse(value, place, f"{place} is {add_article(kind.__qualname__)}, which is not JSON")

    def _convert_array(self, array: Any, place: str) -> Any:
        """Return the result of the array's `tolist` as JSON. Raises NotJsonError."""
        kind: Any = type(array)  # type: ignore[reportUnknownVariableType]
        loss = find_loss(array)
        if loss is not None:
            raise NotJsonError(f"{place} is {add_article(kind.__qualname__)} {loss}")
        try:
            count = 1
            for length in getattr(array, "shape", ()):
                count *= length
            if self._max_items is not None and count > self._max_items:
                raise NotJsonError(
                    f"{place} is an array of {count:,} items, and takes at most {self._max_items:,}: save "
                    "it to the volume with save_to_volume and return its path, or return less of it"
                )
            value = array.tolist()
            if is_certainly_json(value):
                return value
            if type(value) is kind:  # numpy's longdouble, for example, has no Python equivalent
                raise self._refuse(array, place, f"{place} is {add_article(kind.__qualname__)}, which is not JSON")
        except (RecursionError, MemoryError, NotJsonError):
            raise
        except Exception as error:  # noqa: BLE001 - untrusted code may define tolist()
            problem = f"{type(error).__name__}: {error}".rstrip(".")
            reason = f"{place} is {add_article(kind.__qualname__)} whose tolist() raised {problem}"
            raise self._refuse(array, place, reason) from None
        return self.convert(value, place)

    def _refuse(self, value: Any, place: str, reason: str) -> NotJsonError:
        """Return an error with an expression for a value of a well-known class, or with the kinds of JSON."""
        kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
        for attribute, expression in CONVERSIONS.items():
            if hasattr(kind, attribute):
                return NotJsonError(f"{reason}: use {expression.format(place)}")
        return NotJsonError(f"{reason}: use {JSON_KINDS}")


def find_loss(array: Any) -> str | None:
    """Return a description of what an array's `tolist` would lose, with a remedy; None if it loses nothing."""
    dtype = getattr(array, "dtype", None)
    if getattr(dtype, "kind", None) in ("m", "M"):  # dates and durations
        return f"({dtype}), which is not JSON: use astype(str)"
    index = getattr(array, "index", None)
    has_index = index is not None and not callable(index)  # A list's `index` is a method.
    is_default = getattr(index, "start", None) == 0 and getattr(index, "step", None) == 1
    if has_index and not is_default:
        return "with an index, which a list would lose: use to_dict(), or tolist() without the index"
    return None


def encode_fields(fields: dict[str, Any]) -> bytes:
    """Return the fields as compact UTF-8 JSON, with tuples and arrays as lists.

    Raises NotJsonError, which names the field.
    """
    fields = convert_fields(fields)
    try:
        return b"".join(encode_in_parts(fields))
    except (ValueError, RecursionError):
        pass
    for name, value in fields.items():  # Find the field at fault.
        try:
            dumps({name: value}).encode("utf-8")
        except (ValueError, RecursionError) as error:
            raise NotJsonError(f"{name}: {error}") from None
    raise NotJsonError("the fields together are nested too deeply")


def has_too_many_containers(value: Any, encoded: bytes) -> bool:
    """Return True if a value has more lists and dicts than the host accepts; `encoded` is its JSON."""
    if encoded.count(b"[") + encoded.count(b"{") <= MAX_CONTAINERS:
        return False
    # Count exactly, because texts may contain brackets, too.
    count = 0
    for containers in walk_levels(value):
        count += len(containers)
        if count > MAX_CONTAINERS:
            return True
    return False


def walk_levels(value: Any) -> Iterator[list[Any]]:
    """Yield the lists and dicts of a value, level by level. Recursion could reach Python's own limit."""
    containers: list[Any] = [value] if isinstance(value, (dict, list, tuple)) else []
    while containers:
        yield containers
        items: list[Any] = []
        for container in containers:
            items += container.values() if isinstance(container, dict) else container
        containers = [item for item in items if isinstance(item, (dict, list, tuple))]
