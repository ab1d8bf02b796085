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
# Texts that are hardly meant as texts: of JSON or a call, or bounds.
UNCLEAR = re.compile(r"[\"'[{(\u201c\u201d\u201e\u2018\u2019]|(?:log|int):|.*(?:,|\d\s*\.\.|\.\.[-+.\d])|$", re.DOTALL)
FORMS = {
    "--grid": "give values with commas between, such as {0}=1,2,3, and bounds with --space",
    "--space": "give bounds as LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH, or choices such as {0}=1,2,3",
}


def refuse_data(files: Sequence[str], option: str) -> None:
    """Raise ConfigurationError if the command line names a file of data where code belongs.

    `option` is the command's option for files of data, or an empty text.
    """
    for file in files:
        if DATA_SUFFIX.search(file):
            advice = f"did you mean {option} {shlex.quote(file)}?" if option else "pass files of Python code"
            if option and len(files) > 1:  # The shell has replaced a pattern by several names.
                advice += " A pattern of several files needs quotes"
            raise ConfigurationError(f"{file} is a file of data, and not of Python code: {advice}")


def read_code(file: str) -> str:
    """Return the text of a file of code. Raises ConfigurationError or OSError."""
    refuse_data([file], "")
    return decode_code(Path(file).expanduser().read_bytes(), file)


def resolve_path(path: str | None) -> str | None:
    """Return a path as an absolute path, and a location unchanged.

    Raises ConfigurationError.
    """
    if path is not None and not path.strip():
        raise ConfigurationError("a path is empty: check the variable that it comes from")
    if path is None:
        return None
    return make_absolute(path)


def build_provider(name: str, isolation: str | None) -> str:
    """Return the flow's `provider` with this isolation."""
    if isolation is None:
        return name
    if name != "local":
        raise ConfigurationError(
            f"--isolation needs the provider local, and --provider is {name}: leave --isolation out"
        )
    return f"local:{isolation}"


def parse_grid(words: list[str]) -> dict[str, list[Any]]:
    """Return variables and their values, from words such as `lr=0.001,0.01` or `layers=[[64],[64,64]]`."""
    return {name: _parse_values("--grid", name, values) for name, values in _split_words("--grid", words).items()}


def parse_space(words: list[str]) -> Any:
    """Return a search space, from words such as `lr=log:1e-5..0.1` and `opt=adam,sgd`, or from a file of JSON."""
    if len(words) == 1 and "=" not in words[0]:
        return read_json_file(words[0])
    space: dict[str, Any] = {}
    for name, values in _split_words("--space", words).items():
        if (match := BOUNDS.fullmatch(values)) is None:
            choices = _parse_values("--space", name, values)
            # A single object has bounds as in a file of JSON.
            space[name] = choices[0] if len(choices) == 1 and isinstance(choices[0], dict) else choices
        else:
            numbers = {word: read_word(text) for word in ("low", "high", "step") if (text := match[word]) is not None}
            kinds = match["kinds"]
            space[name] = (
                numbers | ({"log": True} if "log" in kinds else {}) | ({"type": "int"} if "int" in kinds else {})
            )
    return space


def _split_words(option: str, words: list[str]) -> dict[str, str]:
    """Split each word at its first equals sign, and return the values by name. Raises ConfigurationError."""
    texts: dict[str, str] = {}
    for word in words:
        name, _, values = map(str.strip, word.partition("="))
        if not name or not values:
            raise ConfigurationError(f"{option} {word}: {FORMS[option].format(name or 'lr')}")
        if name in texts:
            raise ConfigurationError(f"{option} sets {name} twice: give all its values at once, as in {name}=1,2,3")
        texts[name] = values
    return texts


def _parse_values(option: str, name: str, values: str) -> list[Any]:
    """Return the parsed values, which commas separate, or the values of a single list.

    Raises ConfigurationError for a text that is hardly meant as one.
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
    pieces, depth, is_quoted = [""], 0, False
    for character in values:
        if character == '"' and not pieces[-1].endswith("\\"):
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (character in "[({") - (character in "])}")
        if character == "," and not is_quoted and not depth:
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
