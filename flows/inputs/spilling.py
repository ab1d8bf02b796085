"""Parameters that are too long for Prefect: written to files, and read back where the flow runs."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ...blocks.storage.location import write_file
from ...blocks.storage.location_parsing import parse_scheme
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.code_text import declare_utf8, decode_code
from .host_paths import get_spill_directory, locate_input, pin_file
from .readers import normalize_chunk_ids

PARAMETER_LIMIT = 256 * 1024  # bytes of JSON; Prefect refuses flow runs with parameters over 512 KiB in all
LISTS = ("code", "steps", "inputs", "points", "data", "chunks")  # parameters that are lists, or data by id
LISTS_OF_CODE = ("code", "steps")  # These refer to a file by `@` and its path, the others by the path.
FILE_NAME = re.compile(r"[\w.~/\\-]+\.py")
MAX_FILE_NAME = 250  # characters of what may be a file's name
SUFFIXES_OF_LISTS = (".jsonl", ".ndjson", ".json")  # Files with a list of codes or inputs.
TEXTS = ("code", "reduce", "prepare")  # Parameters with one text, which may also refer to a file by `@`.
# Limits of Prefect's server for parameters. After one run with a larger integer it cannot list any runs, and with
# Postgres it refuses a run with a NUL.
INTEGERS = range(-(2**63), 2**64)
NUL = "\0"


def spill_long_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with a reference to a file for each list or text that Prefect cannot hold.

    Such a list or text is too long, or has an integer of more than 64 bits or a NUL in it. The files are below the
    results root, and named after their content.

    Raises:
        ConfigurationError: Another parameter has such an integer or a NUL, or one has text that is not UTF-8.
    """
    short = dict(parameters)
    for name, value in parameters.items():
        if name in LISTS and isinstance(value, (list, dict)):
            continue
        problem = _find_unstorable(name, value)
        if problem is not None and not (name in (*TEXTS, "context") and isinstance(value, str)):
            raise ConfigurationError(f"{name} has {problem}, or give it in inputs, points or data")
    for name in LISTS:
        if isinstance(short.get(name), (list, dict)):
            short[name] = _spill_long_list(short[name], name)
    for name in TEXTS:
        if _needs_file(text := short.get(name)):
            short[name] = f"@{_spill_text(declare_utf8(text))}"
    if _needs_file(text := short.get("context")):
        del short["context"]
        short["context_file"] = _spill_text(text)
    return short


def _find_unstorable(name: str, value: Any) -> str | None:
    """Return what Prefect's server cannot hold in the value, which is JSON, and a remedy; None if it can hold all.

    Raises ConfigurationError for text that is no UTF-8, which neither Prefect nor a sandbox takes.
    """
    scalars = list(_list_scalars(value))
    texts = [scalar for scalar in scalars if isinstance(scalar, str)]
    if not all(map(_is_utf8, texts)):
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


def _is_utf8(text: str) -> bool:
    return text.isascii() or text == text.encode("utf-8", "replace").decode("utf-8")


def _needs_file(value: Any) -> TypeGuard[str]:
    # A character has 4 bytes at most.
    return isinstance(value, str) and (len(value) > PARAMETER_LIMIT // 4 or NUL in value)


def _spill_long_list(value: list[Any] | dict[Any, Any], name: str) -> list[Any] | dict[Any, Any] | str:
    items: Iterable[Any] = value
    if isinstance(value, dict):
        value = normalize_chunk_ids(value)
        items = ({"id": chunk_id, "data": data} for chunk_id, data in value.items())
    try:
        lines = [json.dumps(item, separators=(",", ":")) + "\n" for item in items]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} must be JSON, and is not: {error}") from None
    if sum(map(len, lines)) <= PARAMETER_LIMIT and _find_unstorable(name, value) is None:
        return value
    path = _write_once("".join(lines).encode("ascii"), ".jsonl")
    return f"@{path}" if name in LISTS_OF_CODE else path


def _spill_text(text: str) -> str:
    return _write_once(text.encode("utf-8", "replace"), ".txt")


def _write_once(data: bytes, suffix: str) -> str:
    path = get_spill_directory() / f"{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
    try:
        if not path.exists():
            write_file(path, data)
    except OSError as error:
        raise ConfigurationError(
            f"parameters too long for a flow run go to a file, and {path} cannot be written: {error.strerror}. Name "
            "another root with the environment variable RLM_BATCH_RESULTS"
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
        check_code(text)
        return text
    try:
        file = locate_input(place)
        data = (pin_file(file) if isinstance(file, Path) else file).read_bytes()
        if not place.endswith(SUFFIXES_OF_LISTS):
            return decode_code(data, place)
        codes = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
        if not all(isinstance(code, str) for code in codes):
            raise ValueError("each of its lines is a text in JSON")
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
            f"the code is to be read from {place!r}, which is no absolute path, and a run starts in a directory of its "
            f"own: name the file as @/DIRECTORY/{os.path.basename(place) or 'FILE'}, or give a location"
        )
    return place


def check_codes(name: str, code: Any) -> None:
    """Raise ConfigurationError if a parameter of code is or contains the name of a file. Ignore other types."""
    texts: list[Any] = code if isinstance(code, list) else [code]
    for text in texts[:1] if name == "steps" else texts:  # In later steps `x.py` may be an attribute of a variable.
        if isinstance(text, str):
            check_code(text)


def check_code(text: str) -> None:
    """Raise ConfigurationError where the code is the name of a file, or lines of data, and surely not what is meant."""
    if len(text) <= MAX_FILE_NAME and FILE_NAME.fullmatch(text.strip()):
        raise ConfigurationError(
            f"the code is {text.strip()!r}, the name of a file: pass the text that is in it, as in "
            f"Path({text.strip()!r}).read_text()"
        )
    if text.lstrip()[:1] in ("{", "[") and _is_json_lines(text):
        raise ConfigurationError(
            "the code is lines of JSON, each of which Python would make and throw away: pass them as inputs, points or "
            "data, or name their file there"
        )


def _is_json_lines(text: str) -> bool:
    """Return whether the text is a JSON object or array in each of several lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), (dict, list)) for line in lines)
    except (ValueError, RecursionError):
        return False


def read_text_reference(text: str) -> str:
    """Return the code as `read_code_reference` does. Raises ConfigurationError if it is a list."""
    content = read_code_reference(text)
    if isinstance(content, list):
        raise ConfigurationError(f"{text[1:].strip()} has a list of code, and this takes one text")
    return content
