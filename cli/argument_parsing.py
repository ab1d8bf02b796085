"""From words on the command line to a flow's parameters. What is wrong is a ConfigurationError, in one sentence."""

import json
import re
from pathlib import Path
from typing import Any

from ..blocks.storage.location_parsing import make_absolute
from ..sandbox.errors import ConfigurationError

# Of a variable, as in log:1e-5..0.1 or 32..512:32.
BOUNDS = re.compile(r"(?P<log>log:)?(?P<low>[^.,:]*(?:\.[^.,:]+)?)\.\.(?P<high>[^,:]+)(?::(?P<step>[^,:]+))?")
LIKE_BOUNDS = re.compile(r"log:|[-+]?\.?\d[\de.+-]*?\.\.")  # no text among choices, but a slip


def read_code(file: str) -> str:
    """The text of a file of code."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the file {file} is not UTF-8 text: it should be Python code") from None


def resolve_path(path: str | None) -> str | None:
    """A path as this directory means it, for a flow that may run in another; a location as it is.

    Raises ConfigurationError.
    """
    if path is not None and not path.strip():
        raise ConfigurationError("a path was given that is empty: is the variable set that it was to come from?")
    return None if path is None else make_absolute(path)


def build_provider(name: str, isolation: str | None) -> str:
    """The flow's `provider`, with the isolation that was insisted on."""
    if isolation is None:
        return name
    if name != "local":
        raise ConfigurationError(f"--isolation is for the local provider, and the provider is {name}")
    return f"local:{isolation}"


def parse_grid(words: list[str]) -> dict[str, list[Any]]:
    """Variables and their values, from words such as `lr=0.001,0.01` or `layers=[[64],[64,64]]`."""
    found = _split_words("--grid", words, "a variable and its values, as in lr=0.001,0.01")
    return {name: _parse_values(f"--grid {name}={values}", values) for name, values in found.items()}


def parse_space(words: list[str]) -> Any:
    """A search space from words such as `lr=log:1e-5..0.1`, `units=32..512:32` and `opt=adam,sgd`; or from a file's."""
    if len(words) == 1 and "=" not in words[0]:
        return _read_json(words[0])
    example = "a variable with its bounds or choices, as in lr=log:1e-5..0.1 or opt=adam,sgd, or one file of JSON"
    space: dict[str, Any] = {}
    for name, values in _split_words("--space", words, example).items():
        match = BOUNDS.fullmatch(values)
        word = f"--space {name}={values}"
        if match is None and LIKE_BOUNDS.match(values):
            raise ConfigurationError(f"{word}: bounds are LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH")
        space[name] = _parse_values(word, values) if match is None else _parse_bounds(word, match)
    return space


def _split_words(option: str, words: list[str], form: str) -> dict[str, str]:
    """Names and what stands after their signs."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, values = map(str.strip, word.partition("="))
        if not equals or not name:
            raise ConfigurationError(f"{option} {word}: it is {form}")
        if name in found:
            raise ConfigurationError(f"{option} has {name} twice: name all of its values in one")
        if not values:
            raise ConfigurationError(f"{option} {word}: there are no values after the sign; name at least one")
        found[name] = values
    return found


def _parse_values(word: str, values: str) -> list[Any]:
    from ..flows.inputs.column_types import parse_cell

    if not values.startswith("["):
        return [parse_cell(value.strip()) for value in values.split(",")]
    try:
        return json.loads(values)
    except ValueError as error:
        raise ConfigurationError(f"{word}: a list of values in brackets is JSON, and this is not: {error}") from None


def _parse_bounds(word: str, match: re.Match[str]) -> dict[str, Any]:
    from ..flows.inputs.column_types import parse_cell

    numbers = {name: parse_cell(text) for name in ("low", "high", "step") if (text := match[name]) is not None}
    for number in numbers.values():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ConfigurationError(f"{word}: {number!r} is no number")
    return {**numbers, **({"log": True} if match["log"] else {})}


def _read_json(file: str) -> Any:
    try:
        return json.loads(read_code(file))
    except ValueError as error:
        raise ConfigurationError(f"the file {file} is no JSON: {error}") from None
