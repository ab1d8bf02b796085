"""The parsing of words on the command line into a flow's parameters. A wrong word is a ConfigurationError."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..blocks.storage.location_parsing import make_absolute
from ..flows.inputs.cells import read_word
from ..flows.inputs.conversion import DATA_SUFFIX
from ..flows.inputs.tables import DataFile
from ..sandbox.errors import ConfigurationError
from ..sandbox.requests.code_text import decode_code
from ..sandbox.requests.json_text import JSON, RepeatedKeyError

NUMBER = r"[-+]?(?:[\d_]+(?:\.[\d_]+)?|\.[\d_]+)(?:[eE][-+]?\d+)?"
# The bounds of a variable, such as log:1e-5..0.1, int:0..1 or 32..512:32.
BOUNDS = re.compile(
    rf"(?P<kinds>(?:(?:log|int):){{0,2}})(?P<low>{NUMBER})\.\.(?P<high>{NUMBER})(?::(?P<step>{NUMBER}))?"
)
# A value that looks like JSON, a call or bounds, or is empty. If it cannot be read as one, it is refused and not taken
# as a text.
UNCLEAR = re.compile(r"[\"'[{(\u201c\u201d\u201e\u2018\u2019]|(?:log|int):|.*(?:,|\d\s*\.\.|\.\.[-+.\d])|$", re.DOTALL)
FORMS = {
    "--grid": "give values with commas between, such as {0}=1,2,3, and bounds with --space",
    "--space": "give bounds as LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH, or choices such as {0}=1,2,3",
}


def read_code(file: str) -> str:
    """Return the text of a file of code. Raises ConfigurationError or OSError."""
    if DATA_SUFFIX.search(file):
        raise ConfigurationError(
            f"{file} is a file of data, and not of Python code: pass data with an option such as --inputs, --points or "
            "--data, and a pattern of several files in quotes"
        )
    return decode_code(Path(file).expanduser().read_bytes(), file)


def resolve_path(path: str) -> str:
    """Return a path as an absolute path, and a location unchanged. Raises ConfigurationError."""
    if not path.strip():
        raise ConfigurationError("a path is empty: check the variable that it comes from")
    return make_absolute(path)


def read_pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """Return values by name, from words such as `STAGE=test`. Raises ConfigurationError."""
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip()
        if not name or not equals:
            raise ConfigurationError(f"--{option} {shlex.quote(word)}: give a name and a value, as in NAME=VALUE")
        if name in pairs:
            raise ConfigurationError(f"--{option} sets {name} twice: leave one out")
        pairs[name] = value
    return pairs


def parse_grid(words: list[str]) -> dict[str, list[Any]]:
    """Return variables and their values, from words such as `lr=0.001,0.01` or `layers=[[64],[64,64]]`."""
    return {name: _parse_values("--grid", name, values) for name, values in read_pairs("grid", words).items()}


def parse_space(words: list[str]) -> Any:
    """Return a search space, from words such as `lr=log:1e-5..0.1` and `opt=adam,sgd`, or from a file of JSON."""
    if len(words) == 1 and "=" not in words[0]:
        return read_json_file(words[0])
    space: dict[str, Any] = {}
    for name, values in read_pairs("space", words).items():
        bounds = BOUNDS.fullmatch(values.strip())
        if bounds is not None:
            space[name] = _read_bounds(bounds)
            continue
        choices = _parse_values("--space", name, values)
        # A single object has bounds as in a file of JSON.
        is_object = len(choices) == 1 and isinstance(choices[0], dict)
        space[name] = choices[0] if is_object else choices
    return space


def _read_bounds(match: re.Match[str]) -> dict[str, Any]:
    """Return bounds, such as log:1e-5..0.1, as a file of JSON has them."""
    bounds: dict[str, Any] = {"low": read_word(match["low"]), "high": read_word(match["high"])}
    if match["step"] is not None:
        bounds["step"] = read_word(match["step"])
    if "log" in match["kinds"]:
        bounds["log"] = True
    if "int" in match["kinds"]:
        bounds["type"] = "int"
    return bounds


def _parse_values(option: str, name: str, values: str) -> list[Any]:
    """Parse values with commas between them, or one list in JSON.

    Raises ConfigurationError for an empty value, and for a text that looks like something else.
    """
    pieces = _split_values(values)
    try:
        parsed = [read_word(piece) for piece in pieces]
    except RepeatedKeyError as error:
        raise ConfigurationError(f"{option} {name}={values}: {error}") from None
    for piece, value in zip(pieces, parsed, strict=True):
        if value == piece and UNCLEAR.match(piece):
            reason = f"{piece} is unclear" if piece else "a value is empty"
            text = shlex.quote(f"{name}={json.dumps(piece, ensure_ascii=False)}")
            forms = FORMS[option].format(name)
            raise ConfigurationError(f"{option} {name}={values}: {reason}: {forms}; a text is {text}")
    return parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed


def _split_values(values: str) -> list[str]:
    """Split the text at commas, except at commas within quotes and brackets."""
    pieces = [""]
    depth = 0  # open brackets
    is_quoted = False
    for character in values:
        if character == '"' and not pieces[-1].endswith("\\"):
            is_quoted = not is_quoted
        elif not is_quoted and character in "[({":
            depth += 1
        elif not is_quoted and character in "])}":
            depth -= 1
        if character == "," and not is_quoted and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]


def read_json_file(file: str) -> Any:
    """Return the value in a file of JSON. Raises ConfigurationError or OSError."""
    try:
        with DataFile(Path(file).expanduser()).open_text() as stream:
            return JSON.decode(stream.read())
    except ValueError as error:
        raise ConfigurationError(f"the file {file} is not JSON: {error}") from None
