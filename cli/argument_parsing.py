"""From words on the command line to a flow's parameters. What is wrong is a ConfigurationError, in one sentence."""

import ast
import json
import math
import re
import shlex
import warnings
from pathlib import Path
from typing import Any, NoReturn

from ..blocks.storage.location_parsing import make_absolute
from ..flows.inputs.cells import parse_json, read_word
from ..flows.inputs.text_files import TextFile
from ..sandbox.errors import ConfigurationError
from ..sandbox.requests.code_text import decode_code

# Of a variable, as in log:1e-5..0.1 or 32..512:32.
BOUNDS = re.compile(r"(?P<log>log:)?(?P<low>[^.,:]*(?:\.[^.,:]+)?)\.\.(?P<high>[^,:]+)(?::(?P<step>[^,:]+))?")
LIKE_BOUNDS = re.compile(r"log:|[-+]?\.?\d[\de.+-]*?(?:\.\.|\u2026)|(?:\.\.|\u2026)[-+]?\.?\d")
LIKE_SLICE = re.compile(r"[-+.\de]*\d(?::[-+.\de]*\d){1,2}")
LIKE_CALL = re.compile(r"(?:\w+\.)?(?:a?range|(?:lin|log|geom)space|choice|q?(?:log_?)?uniform|interval|randint)\(")
TYPOGRAPHIC_QUOTES = str.maketrans("\u201c\u201d\u201e\u2018\u2019", '"""\'\'')
QUOTES_AND_BRACKETS = (*"\"'[{(", *map(chr, TYPOGRAPHIC_QUOTES))

SUFFIXES_OF_DATA = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def read_code(file: str) -> str:
    """Return the text of a file of code. Raises ConfigurationError."""
    if file.lower().endswith(SUFFIXES_OF_DATA):
        raise ConfigurationError(
            f"the file {file} has data, and here goes Python code: give it with an option, such as --inputs, --points "
            "or --data"
        )
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    return decode_code(data, file)


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
    return {name: _parse_values("--grid", name, values) for name, values in found.items()}


def parse_space(words: list[str]) -> Any:
    """A search space from words such as `lr=log:1e-5..0.1`, `units=32..512:32` and `opt=adam,sgd`; or from a file's."""
    if len(words) == 1 and "=" not in words[0]:
        return _read_json(words[0])
    example = "a variable with its bounds or choices, as in lr=log:1e-5..0.1 or opt=adam,sgd, or one file of JSON"
    space: dict[str, Any] = {}
    for name, values in _split_words("--space", words, example).items():
        if isinstance(whole := read_word(values), dict):  # bounds as in a file of JSON
            space[name] = whole
        elif (match := BOUNDS.fullmatch(values)) is not None:
            space[name] = _parse_bounds(name, values, match)
        else:
            space[name] = _parse_values("--space", name, values)
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


def _parse_values(option: str, name: str, values: str) -> list[Any]:
    """Return the values between commas, each read by itself, or the values of a single list.

    Raises ConfigurationError, with the spelling that was meant, for a word that only looks like a range, a list, JSON
    or a number.
    """
    whole = read_word(values)
    if isinstance(whole, list):
        return whole  # type: ignore[reportUnknownVariableType]
    pieces = [values] if LIKE_CALL.match(values) else _split_values(values)
    if "" in pieces:
        _refuse_values(
            option,
            name,
            values,
            "a comma has no value beside it",
            [p for p in pieces if p],
            [p or '""' for p in pieces],
        )
    found: list[Any] = []
    for number, piece in enumerate(pieces):
        found.append(read_word(piece))
        if found[-1] == piece and (slip := _find_slip(option, name, values, piece)) is not None:
            reason, meant = slip
            before, after = pieces[:number], pieces[number + 1 :]
            as_text = json.dumps(piece, ensure_ascii=False)
            _refuse_values(
                option, name, values, reason, [*before, *meant, *after] if meant else [], [*before, as_text, *after]
            )
    return found


def _refuse_values(option: str, name: str, values: str, reason: str, meant: list[str], as_text: list[str]) -> NoReturn:
    spellings = [shlex.quote(f"{name}={','.join(pieces)}") for pieces in (meant, as_text) if pieces]
    raise ConfigurationError(f"{option} {name}={values}: {reason}; write {', or '.join(spellings)} for the text")


def _split_values(values: str) -> list[str]:
    """Return the texts between commas, but for commas within quotes, lists and objects."""
    pieces: list[str] = []
    begin = 0
    while begin <= len(values):
        begin += len(values[begin:]) - len(values[begin:].lstrip())
        end = begin
        if values.startswith(QUOTES_AND_BRACKETS, begin):
            try:
                end = parse_json(values, begin)[1]
            except (ValueError, RecursionError):
                end = len(values)
        end = len(values) if (comma := values.find(",", end)) < 0 else comma
        pieces.append(values[begin:end].strip())
        begin = end + 1
    return pieces


def _find_slip(option: str, name: str, values: str, text: str) -> tuple[str, list[str]] | None:
    """Return why a text is surely not what was meant, and the values that were, if they show; None where it was."""
    if text.startswith(QUOTES_AND_BRACKETS):
        return f"{text} begins like JSON and is none", _spell_json(text, is_alone=text == values)
    if LIKE_CALL.match(text):
        return "values are listed, as in 1,2,3, or drawn from bounds with --space", []
    if LIKE_BOUNDS.match(text) or (text == values and LIKE_SLICE.fullmatch(text)):
        if option == "--grid":
            bounds = text if BOUNDS.fullmatch(text) else "LOW..HIGH"
            return f"a grid lists its values; --space {name}={bounds} with --trials draws from bounds", []
        return "bounds are LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH, and stand alone", []
    parts = re.split(r"[\s;|]+", text)
    if len(parts) > 1 and all(isinstance(read_word(part), (int, float)) for part in parts):
        return f"{text} is like a list, and values have commas between them", parts
    number = _read_as_python(text)
    if number is None:
        return None
    return f"{text} is like a number, and is written as none", [repr(number)] if math.isfinite(number) else []


def _spell_json(text: str, *, is_alone: bool) -> list[str]:
    """Return the JSON that was meant by literals of Python, an open quote or bracket, or texts without quotes.

    Where the text is alone, a list has its values. Nothing where the meaning does not show.
    """
    text = text.translate(TYPOGRAPHIC_QUOTES)
    is_list = text.startswith("[")
    for end in ("", *"]})\"'"):
        try:
            with warnings.catch_warnings(action="ignore"):  # Backslashes would warn.
                value = ast.literal_eval(f"{text}{end}" if is_list else f"[{text}{end}]")
            return [json.dumps(item, allow_nan=False) for item in ([value] if is_list or is_alone else value)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    items = _split_values(text[1:-1]) if is_list and text.endswith("]") else []
    return [json.dumps([read_word(item) for item in items])] if items and all(items) else []


def _read_as_python(text: str) -> float | None:
    """Return the number that Python would read in its code or by `float`, or None."""
    for read in (lambda: int(text, 0), lambda: int(text), lambda: float(text)):
        try:
            return read()
        except ValueError:
            pass
    return None


def _parse_bounds(name: str, values: str, match: re.Match[str]) -> dict[str, Any]:
    numbers = {word: read_word(text) for word in ("low", "high", "step") if (text := match[word]) is not None}
    for number in numbers.values():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            forms = "bounds are LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH"
            raise ConfigurationError(f"--space {name}={values}: {number!r} is no number; {forms}")
    return {**numbers, **({"log": True} if match["log"] else {})}


def _read_json(file: str) -> Any:
    try:
        return json.loads(TextFile(Path(file).expanduser(), Path(file)).read())
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"the file {file} is no JSON: {error}") from None
