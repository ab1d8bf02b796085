"""Parameters that are too long for Prefect. They are written to files, and the process of the flow run reads them."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...blocks.storage.location import write_file
from ...blocks.storage.location_parsing import parse_scheme
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.code_text import decode_code
from ...tasks.ledger.result_index import get_spill_directory
from .conversion import Content
from .host_paths import read_input

PARAMETER_LIMIT = 256 * 1024  # bytes of a parameter
TOTAL_LIMIT = 448 * 1024  # bytes of all parameters; Prefect refuses flow runs with more than 512 KiB
SUFFIXES_OF_LISTS = (".jsonl", ".ndjson", ".json")  # Files with a list of codes.
SPILLED_PARAMETER = re.compile(r"@/.*/[0-9a-f]{24}\.json")  # the reference to the file of a parameter
# Limits of Prefect's server for parameters. After one run with an integer outside this range it cannot list any
# runs. With Postgres it refuses a run with a NUL.
INTEGERS = range(-(2**63), 2**64)
NUL = "\0"


def spill_long_parameters(
    parameters: dict[str, Any], contents: Mapping[str, Content], total_limit: int = TOTAL_LIMIT
) -> dict[str, Any]:
    """Replace each value that Prefect cannot hold by a reference to a file of JSON, and return the parameters.

    Such a value is too long, or has an integer of more than 64 bits or a NUL in it. If all values together have more
    than `total_limit` bytes, the longest are replaced. Raises ConfigurationError if a path or a setting has such an
    integer or a NUL, or if text is not UTF-8.
    """
    short = dict(parameters)
    # Settings are checked later, so one may have a value that is not JSON.
    data_by_name = {name: json.dumps(value, default=str).encode() for name, value in parameters.items()}
    total_bytes = sum(map(len, data_by_name.values()))
    for name, data in sorted(data_by_name.items(), key=lambda item: len(item[1]), reverse=True):
        value = parameters[name]
        can_be_stored = _can_be_stored(name, value)
        content = contents.get(name)
        is_path_or_setting = content is None or (content.is_path_if_text and isinstance(value, str))
        if is_path_or_setting and not can_be_stored:
            raise ConfigurationError(
                f"{name} has a NUL character or an integer of more than 64 bits, which Prefect's server cannot hold: "
                "leave it out"
            )
        is_too_long = len(data) > PARAMETER_LIMIT or total_bytes > total_limit
        if is_too_long or not can_be_stored:
            short[name] = f"@{_write_once(data, '.json')}"
            total_bytes -= len(data)
    return short


def read_spilled_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters, with the values of those in files. Raises ConfigurationError if one cannot be read."""
    values = dict(parameters)
    for name, value in parameters.items():
        if isinstance(value, str) and SPILLED_PARAMETER.fullmatch(value):
            try:
                values[name] = json.loads(read_input(value[1:]))
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"the file of the long parameter `{name}` cannot be read: {error}") from None
    return values


def _can_be_stored(name: str, value: Any) -> bool:
    """Return whether Prefect's server can hold the scalars in a JSON value.

    Raises ConfigurationError for text that is not UTF-8, because Prefect and sandboxes refuse such text.
    """
    scalars = list(_list_scalars(value))
    texts = [scalar for scalar in scalars if isinstance(scalar, str)]
    if not all(text.isascii() or text == text.encode("utf-8", "replace").decode("utf-8") for text in texts):
        raise ConfigurationError(
            f"{name} has text with a lone surrogate, which is not UTF-8: replace it, as "
            "text.encode('utf-8', 'replace').decode() does"
        )
    has_long_integer = any(isinstance(scalar, int) and scalar not in INTEGERS for scalar in scalars)
    return not has_long_integer and not any(NUL in text for text in texts)


def _list_scalars(value: Any) -> Iterator[Any]:
    """Yield the scalars in nested lists and dicts, including the keys of dicts."""
    if isinstance(value, dict):
        value = [*value, *value.values()]  # type: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        for item in value:  # type: ignore[reportUnknownVariableType]
            yield from _list_scalars(item)
    else:
        yield value


def spill_text(text: str) -> str:
    """Write a text to a file that is named after its content, and return the path. Raises OSError."""
    return _write_once(text.encode("utf-8", "replace"), ".txt")


def _write_once(data: bytes, suffix: str) -> str:
    path = get_spill_directory() / f"{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
    if path.exists():
        os.utime(path)  # The time of the last use counts when unused files are deleted.
    else:
        write_file(path, data)
    return str(path)


def read_codes(code: Any) -> list[str]:
    """Return the pieces of code of a parameter: a text, a list of texts, or a reference to a file as in `@PATH`.

    A file of JSON lines has a list of codes, and each may again refer to a file. Raises ConfigurationError.
    """
    codes: list[str] = code if isinstance(code, list) else _read_reference(code)
    if not codes:
        raise ConfigurationError("the list of code is empty: pass at least one piece")
    if codes == [code]:  # a text, and not a reference
        return codes
    texts: list[str] = []
    for item in codes:
        texts += _read_reference(item)
    return texts


def read_text_reference(code: Any) -> str:
    """Return the code of a parameter that takes one text, as `read_codes` does. Raises ConfigurationError."""
    codes = read_codes(code)
    if len(codes) > 1:
        raise ConfigurationError(f"{code[1:].strip()} has a list of code, and one text is needed here")
    return codes[0]


def _read_reference(text: str) -> list[str]:
    """Return [text], or the pieces of code in the file if the text is a reference. Raises ConfigurationError.

    A reference is a single line that begins with `@`, or a text that begins with `@/`. Neither is valid Python.
    """
    is_single_line = "\n" not in text.strip()
    is_reference = text.startswith("@/") or (text.startswith("@") and is_single_line)
    if not is_reference:
        return [text]
    place = text[1:].strip()
    if parse_scheme(place) is None and not os.path.isabs(os.path.expanduser(place)):
        raise ConfigurationError(
            f"the code's file {place!r} is not an absolute path, and a run starts in another directory: "
            f"name it as @/DIRECTORY/{os.path.basename(place) or 'FILE'}, or give a location"
        )
    try:
        data = read_input(place)
        if not place.endswith(SUFFIXES_OF_LISTS):
            return [decode_code(data, place)]
        codes = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
        if not all(isinstance(code, str) for code in codes):
            raise ValueError("each line must be a text in JSON")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"the code in {place} cannot be read: {reason}") from None
    return codes
