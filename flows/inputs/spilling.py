"""Parameters that are too long for Prefect. They are written to files, and the process of the flow run reads them."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...blocks.storage.location import write_file
from ...blocks.storage.location_parsing import parse_scheme
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.code_text import declare_utf8, decode_code
from .conversion import Content
from .host_paths import get_spill_directory, locate_input, pin_file
from .readers import normalize_chunk_ids

PARAMETER_LIMIT = 256 * 1024  # bytes of JSON; Prefect refuses flow runs with parameters over 512 KiB in all
# Contents whose lists are stored in a file.
LISTS = (Content.CODE, Content.STEP, Content.ROWS, Content.ITEMS, Content.DATA_BY_ID)
SUFFIXES_OF_LISTS = (".jsonl", ".ndjson", ".json")  # Files with a list of codes or inputs.
# Limits of Prefect's server for parameters. After one run with an integer outside this range it cannot list any
# runs. With Postgres it refuses a run with a NUL.
INTEGERS = range(-(2**63), 2**64)
NUL = "\0"
JSON_FILE = "<file of JSON>"  # the only key of a dict that names the file of a long value


def spill_long_parameters(parameters: dict[str, Any], contents: Mapping[str, Content]) -> dict[str, Any]:
    """Return the parameters with a reference to a file for each list or text that Prefect cannot hold.

    Such a list or text is too long, or has an integer of more than 64 bits or a NUL in it. The files are below the
    results root, and named after their content.

    Raises:
        ConfigurationError: Another parameter has such an integer or a NUL, or a parameter has text that is not UTF-8.
    """
    short = dict(parameters)
    for name, value in parameters.items():
        content = contents.get(name)
        if content in LISTS and isinstance(value, (list, dict)):
            short[name] = _spill_long_list(name, content, value)
            continue
        can_spill = isinstance(value, str) and content is not None and (content.is_code or content is Content.CONTEXT)
        if content is Content.CONTEXT and isinstance(value, (list, dict)):
            short[name] = _spill_json(name, value)
            continue
        problem = _find_unstorable(name, value)
        if problem is not None and not can_spill:
            raise ConfigurationError(f"{name} has {problem}, or give it in inputs, points or data")
        # A character has 4 bytes at most.
        if can_spill and (len(value) > PARAMETER_LIMIT // 4 or NUL in value):
            if content is Content.CONTEXT:
                del short[name]
                short[f"{name}_file"] = spill_text(value)
            else:
                short[name] = f"@{spill_text(declare_utf8(value))}"
    return short


def _find_unstorable(name: str, value: Any) -> str | None:
    """Return a phrase about the part of a JSON value that Prefect's server cannot hold, with a remedy, or None.

    Raises ConfigurationError for text that is not UTF-8, because Prefect and sandboxes refuse such text.
    """
    scalars = list(_list_scalars(value))
    texts = [scalar for scalar in scalars if isinstance(scalar, str)]
    if not all(text.isascii() or text == text.encode("utf-8", "replace").decode("utf-8") for text in texts):
        raise ConfigurationError(
            f"{name} has text with a lone surrogate, which is not UTF-8: replace it, as "
            "text.encode('utf-8', 'replace').decode() does"
        )
    if any(isinstance(scalar, int) and scalar not in INTEGERS for scalar in scalars):
        return "an integer of more than 64 bits, which Prefect's server cannot hold: give it as text"
    if any(NUL in text for text in texts):
        return "a NUL character, which Prefect's server cannot hold on Postgres: leave it out"
    return None


def _list_scalars(value: Any) -> Iterator[Any]:
    """Yield the scalars in nested lists and dicts, including the keys of dicts."""
    if isinstance(value, dict):
        value = [*value, *value.values()]  # type: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        for item in value:  # type: ignore[reportUnknownVariableType]
            yield from _list_scalars(item)
    else:
        yield value


def _spill_long_list(
    name: str, content: Content, value: list[Any] | dict[Any, Any]
) -> list[Any] | dict[Any, Any] | str:
    items: Iterable[Any] = value
    if isinstance(value, dict):
        value = normalize_chunk_ids(value)
        items = ({"id": chunk_id, "data": data} for chunk_id, data in value.items())
    try:
        lines = [json.dumps(item, separators=(",", ":")) + "\n" for item in items]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} is not JSON: {error}") from None
    if sum(map(len, lines)) <= PARAMETER_LIMIT and _find_unstorable(name, value) is None:
        return value
    path = _write_once("".join(lines).encode("ascii"), ".jsonl")
    return f"@{path}" if content.is_code else path


def _spill_json(name: str, value: Any) -> Any:
    """Return a JSON value, or a dict that names its file if Prefect cannot hold it. `read_json_reference` reads it."""
    text = json.dumps(value)
    if len(text) <= PARAMETER_LIMIT and _find_unstorable(name, value) is None:
        return value
    return {JSON_FILE: spill_text(text)}


def read_json_reference(value: Any) -> Any:
    """Return the JSON value of a parameter: the value itself, or the content of the file that `_spill_json` wrote.

    Raises ConfigurationError if the file cannot be read.
    """
    if not isinstance(value, dict) or value.keys() != {JSON_FILE}:
        return value
    place = str(value[JSON_FILE])
    try:
        file = locate_input(place)
        return json.loads((pin_file(file) if isinstance(file, Path) else file).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the value in {place} cannot be read: {error}") from None


def spill_text(text: str) -> str:
    """Write a text to a file that is named after its content, and return the path. Raises ConfigurationError."""
    return _write_once(text.encode("utf-8", "replace"), ".txt")


def _write_once(data: bytes, suffix: str) -> str:
    path = get_spill_directory() / f"{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
    try:
        if path.exists():
            os.utime(path)  # The time of the last use counts when unused files are deleted.
        else:
            write_file(path, data)
    except OSError as error:
        raise ConfigurationError(
            f"a long parameter could not be written to {path}: {error.strerror}. Set RLM_BATCH_RESULTS to "
            "another directory"
        ) from error
    return str(path)


def read_code_reference(text: str) -> list[str] | str:
    """Return the code of a parameter: the text itself, or the content of the file in `@PATH`.

    A file of JSON lines has a list of codes, and each may again refer to a file. Any other file is one text.

    Raises:
        ConfigurationError: The file cannot be read, or its path is not absolute.
    """
    place = _find_reference(text)
    if place is None:
        return text
    try:
        file = locate_input(place)
        data = (pin_file(file) if isinstance(file, Path) else file).read_bytes()
        if not place.endswith(SUFFIXES_OF_LISTS):
            return decode_code(data, place)
        codes = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
        if not all(isinstance(code, str) for code in codes):
            raise ValueError("each line must be a text in JSON")
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigurationError(f"the code in {place} cannot be read: {why}") from None
    return read_codes(codes)


def read_codes(codes: list[str]) -> list[str]:
    """Replace each code that refers to a file with the file's content. Raises ConfigurationError."""
    return [read_text_reference(code) if code.startswith("@") else code for code in codes]


def _find_reference(text: str) -> str | None:
    """Return the path or location that the text refers to, or None if it is code. Raises ConfigurationError.

    A single line that begins with `@` is never valid Python, because a decorator needs a definition below it.
    """
    if not text.startswith("@") or ("\n" in text.strip() and not text.startswith("@/")):
        return None
    place = text[1:].strip()
    if parse_scheme(place) is None and not os.path.isabs(os.path.expanduser(place)):
        raise ConfigurationError(
            f"the code's file {place!r} is not an absolute path, and a run starts in another directory: "
            f"name it as @/DIRECTORY/{os.path.basename(place) or 'FILE'}, or give a location"
        )
    return place


def read_text_reference(text: str) -> str:
    """Return the code as `read_code_reference` does. Raises ConfigurationError if it is a list."""
    content = read_code_reference(text)
    if isinstance(content, list):
        raise ConfigurationError(f"{text[1:].strip()} has a list of code, and one text is needed here")
    return content
