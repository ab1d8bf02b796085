"""Parameters that are too long for Prefect: written to files, and read back where the flow runs."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from ...blocks.storage.files import read_file, write_file
from ...blocks.storage.location_parsing import parse_location, parse_scheme
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.results_root import get_results_root
from .chunking import normalize_chunk_ids

PARAMETER_LIMIT = 256 * 1024  # bytes of JSON; Prefect refuses flow runs with parameters over 512 KiB in all
SPILLABLE = {  # and how each refers to a file
    "code": "@{path}",
    "steps": "@{path}",
    "inputs": "{path}",
    "points": "{path}",
    "data": "{path}",
    "chunks": "{path}",
}
TEXTS = ("code", "reduce")  # that are one text, and refer to a file as lists of code do


def spill_long_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, with a reference to a file in the place of each list or text that is too long for Prefect."""
    short = {
        name: _spill_long_list(value, name, SPILLABLE[name])
        if name in SPILLABLE and isinstance(value, (list, dict))
        else value
        for name, value in parameters.items()
    }
    for name in TEXTS:
        text = short.get(name)
        if isinstance(text, str) and len(text) > PARAMETER_LIMIT // 4:
            short[name] = f"@{spill_text(text, get_results_root())}"
    text = short.get("context")
    if isinstance(text, str) and len(text) > PARAMETER_LIMIT // 4:  # a character has 4 bytes at most
        del short["context"]
        short["context_file"] = spill_text(text, get_results_root())
    return short


def _spill_long_list(value: list[Any] | dict[Any, Any], name: str, form: str) -> list[Any] | dict[Any, Any] | str:
    if isinstance(value, dict):
        value = normalize_chunk_ids(value)
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} must be JSON, and is not: {error}") from None
    if size <= PARAMETER_LIMIT:
        return value
    lines = [{"id": key, "data": item} for key, item in value.items()] if isinstance(value, dict) else value
    return form.format(path=spill_list(lines, get_results_root()))


def spill_list(value: list[Any], root: Path) -> str:
    """Writes a list to a file of JSON lines below the results root, named after its content, and returns its path."""
    lines = [json.dumps(item, separators=(",", ":")) + "\n" for item in value]
    return _write_once("".join(lines).encode("ascii"), root, ".jsonl")


def spill_text(text: str, root: Path) -> str:
    """Writes a text to such a file, and returns its path."""
    return _write_once(text.encode("utf-8", "replace"), root, ".txt")


def _write_once(data: bytes, root: Path, suffix: str) -> str:
    path = root / "inputs" / f"{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
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
    """What a parameter of code stands for: the text itself, or what is in the file that `@` and its path refer to.

    Such a file has a list that was too long for a flow run's parameters, or one text. Its path is absolute or a
    location, and no Python begins with `@/` or `@s3://`. Raises ConfigurationError.
    """
    if not text.startswith("@/") and (text[:1] != "@" or parse_scheme(text[1:]) is None):
        return text
    try:
        content = io.StringIO(read_file(parse_location(text[1:])).decode("utf-8"), newline=None).read()
        return content if text.endswith(".txt") else [json.loads(line) for line in content.splitlines()]
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigurationError(f"the code in {text[1:]} cannot be read: {why}") from None


def read_text_reference(text: str) -> str:
    """The same where it is one text. Raises ConfigurationError where it is a list."""
    content = read_code_reference(text)
    if isinstance(content, list):
        raise ConfigurationError(f"{text[1:]} has a list of code, and this takes one text")
    return content
