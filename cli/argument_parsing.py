"""The parsing of words on the command line into a flow's parameters. A wrong word is a ConfigurationError."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..blocks.storage.location_parsing import make_absolute
from ..flows.inputs.cells import read_word
from ..flows.inputs.conversion import DATA_SUFFIX
from ..flows.inputs.tables import DataFile
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.requests.code_text import decode_code
from ..sandbox.requests.json_text import JSON, RepeatedKeyError

# The bounds of a variable, such as log:1e-5..0.1, int:0..1 or 32..512:32.
BOUNDS = re.compile(
    r"(?P<kinds>(?:(?:log|int):){0,2})(?P<low>[^.,:]*(?:\.[^.,:]+)?)\.\.(?P<high>[^,:]+)(?::(?P<step>[^,:]+))?"
)
QUOTES_AND_BRACKETS = tuple("\"'[{(\u201c\u201d\u201e\u2018\u2019")
DASHES = str.maketrans("\u2212\u2013", "--")  # A minus and a dash that editors put in the place of ASCII's minus.
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# Texts that are hardly meant as texts: bounds, calls such as range(5), and numbers without commas between.
UNCLEAR = re.compile(
    rf"(?:\w+:)?\s*{NUMBER}\s*(?:\.\.|\u2026).*|\W*\.\.[-+.\d].*|log.*\.\..*|(?:log|int):[-+.\d].*|.*,.*"
    r"|(?:np|numpy)\.\w+\(.*|(?:\w+\.)?(?:range|uniform|choice)\(.*"
    rf"|{NUMBER}(?:[\s;|]+{NUMBER})+",
    re.DOTALL,
)
# Such a text is unclear only if it is alone: 2024-01 and 16:9 beside other texts are texts.
UNCLEAR_ALONE = re.compile(rf"{NUMBER}\s*(?:-|to)\s*{NUMBER}|{NUMBER}(?::{NUMBER}){{1,2}}")
FORMS = {
    "--grid": "give values with commas between, such as {0}=1,2,3, and bounds with --space",
    "--space": "give bounds as LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH, or choices such as {0}=1,2,3",
}

MAX_LISTED_VALUES = 20  # values in a message
JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
UNCLEAR_WORDS = ("yes", "no", "on", "off", "y", "n", "t", "f", "nil", "undefined", "na", "n/a")
TYPE_NAMES = {int: "integer", float: "real", bool: "boolean", str: "text", type(None): "None"}


def refuse_data(files: Sequence[str], option: str) -> None:
    """Raise ConfigurationError if the command line has a file of data in the place of code.

    `option` is the command's option for files of data, or an empty text.
    """
    for file in files:
        if DATA_SUFFIX.search(file):
            advice = f"did you mean {option} {shlex.quote(file)}?" if option else "pass files of Python code"
            if option and len(files) > 1:  # The shell has replaced a pattern by several names.
                advice += " A pattern of several files needs quotes"
            raise ConfigurationError(f"{file} is a file of data, and not of Python code: {advice}")


def read_code(file: str) -> str:
    """Return the text of a file of code. Raises ConfigurationError."""
    refuse_data([file], "")
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    return decode_code(data, file)


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
    texts = _split_words("--grid", words, "name a variable and its values, as in lr=0.001,0.01")
    return {name: _parse_values("--grid", name, values) for name, values in texts.items()}


def parse_space(words: list[str]) -> Any:
    """Return a search space, from words such as `lr=log:1e-5..0.1` and `opt=adam,sgd`, or from a file of JSON."""
    if len(words) == 1 and "=" not in words[0]:
        return read_json_file(words[0])
    example = (
        "name a variable with its bounds or choices, as in lr=log:1e-5..0.1 or opt=adam,sgd, or name one file of JSON"
    )
    space: dict[str, Any] = {}
    for name, values in _split_words("--space", words, example).items():
        if isinstance(whole := _read_word("--space", name, values), dict):  # bounds as in a file of JSON
            space[name] = whole
        elif whole == values and (match := BOUNDS.fullmatch(values)) is not None:
            space[name] = _parse_bounds(name, values, match)
        else:
            space[name] = _parse_values("--space", name, values)
    return space


def _split_words(option: str, words: list[str], form: str) -> dict[str, str]:
    """Split each word at its first equals sign, and return the values by name. Raises ConfigurationError."""
    texts: dict[str, str] = {}
    for word in words:
        name, equals, values = map(str.strip, word.partition("="))
        if not equals or not name:
            raise ConfigurationError(f"{option} {word}: {form}")
        if name in texts:
            raise ConfigurationError(f"{option} sets {name} twice: give all its values at once, as in {name}=1,2,3")
        if not values:
            raise ConfigurationError(f"{option} {word} has no values: give at least one, as in {name}=1")
        texts[name] = values
    return texts


def _parse_values(option: str, name: str, values: str) -> list[Any]:
    """Return the parsed values, which commas separate, or the values of a single list.

    Raises ConfigurationError for a text that only looks like a range, a list, JSON or a number.
    """
    whole = _read_word(option, name, values)
    if isinstance(whole, list):
        return whole  # type: ignore[reportUnknownVariableType]
    pieces = _split_values(values)
    parsed = [_read_word(option, name, piece) for piece in pieces]
    for piece, value in zip(pieces, parsed, strict=True):
        if value == piece and _is_unclear_text(piece, is_alone=len(pieces) == 1):
            raise _refuse_values(option, name, values, piece)
    if option == "--grid":  # A search prints its whole space.
        _print_types(name, pieces, parsed)
    return parsed


def _read_word(option: str, name: str, word: str) -> Any:
    try:
        return read_word(word)
    except RepeatedKeyError as error:
        raise ConfigurationError(f"{option} {name}={word}: {error}") from None


def _refuse_values(option: str, name: str, values: str, piece: str) -> ConfigurationError:
    """Return an error that names the unclear value and the allowed forms."""
    reason = f"{piece} is unclear" if piece else "a value is missing beside a comma"
    quoted = shlex.quote(f"{name}={json.dumps(piece, ensure_ascii=False)}")
    return ConfigurationError(f"{option} {name}={values}: {reason}: {FORMS[option].format(name)}; a text is {quoted}")


def _split_values(values: str) -> list[str]:
    """Split the text at commas, except at commas within quotes, lists, objects and calls such as f(1,2)."""
    pieces: list[str] = []
    begin = 0
    while begin <= len(values):
        begin += len(values[begin:]) - len(values[begin:].lstrip())
        end = begin
        if values.startswith(QUOTES_AND_BRACKETS, begin):
            try:
                end = JSON.raw_decode(values, begin)[1]
            except (ValueError, RecursionError):
                end = len(values)
        depth = 0
        while end < len(values) and (depth or values[end] != ","):
            if values[end] in "[({" and (depth or values[begin:end].rstrip(" _")[-1:].isalnum()):
                depth += 1
            elif values[end] in "])}" and depth:
                depth -= 1
            end += 1
        pieces.append(values[begin:end].strip())
        begin = end + 1
    return pieces


def _is_unclear_text(text: str, *, is_alone: bool) -> bool:
    """Return whether a text is hardly meant as one: it is empty, or looks like a number, numbers, bounds or JSON."""
    plain = text.translate(DASHES)
    return (
        not text
        or text.startswith(QUOTES_AND_BRACKETS)
        or UNCLEAR.fullmatch(plain) is not None
        or (is_alone and UNCLEAR_ALONE.fullmatch(plain) is not None)
        or _is_python_number(plain)
    )


def _is_python_number(text: str) -> bool:
    """Return whether Python reads the text as a number, such as 0x10 or 01234."""
    for read in (lambda: int(text, 0), lambda: float(text)):
        try:
            read()
        except ValueError:
            continue
        return True
    return False


def _print_types(name: str, pieces: list[str], values: list[Any]) -> None:
    """Print the values that were read and their types, if a word may have been meant as another value."""
    if not any(map(_is_unclear, pieces, values)):
        return
    kinds = [TYPE_NAMES.get(type(value), "JSON") for value in values[:MAX_LISTED_VALUES]]
    texts = [
        json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else repr(value) for value in values
    ]
    shown = [text if text == kind else f"{text} ({kind})" for kind, text in zip(kinds, texts, strict=False)]
    more = ["..."] if len(values) > MAX_LISTED_VALUES else []
    print(escape_text(f"{name}: {', '.join(shown + more)}"), file=sys.stderr)


def _is_unclear(word: str, value: Any) -> bool:
    """Return whether a word is neither a number of JSON nor a text that looks like nothing else."""
    if isinstance(value, str):
        return word != value or word.lower() in UNCLEAR_WORDS or re.match(r"[-+.]?\d", word) is not None
    return type(value) not in (int, float) or JSON_NUMBER.fullmatch(word) is None


def _parse_bounds(name: str, values: str, match: re.Match[str]) -> dict[str, Any]:
    numbers = {word: read_word(text) for word in ("low", "high", "step") if (text := match[word]) is not None}
    for number in numbers.values():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise _refuse_values("--space", name, values, values)
    kinds = match["kinds"]
    return {**numbers, **({"log": True} if "log" in kinds else {}), **({"type": "int"} if "int" in kinds else {})}


def read_json_file(file: str) -> Any:
    """Return the value in a file of JSON. Raises ConfigurationError."""
    try:
        with DataFile(Path(file).expanduser()).open_text() as stream:
            return JSON.decode(stream.read())
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"the file {file} is not JSON: {error}") from None
