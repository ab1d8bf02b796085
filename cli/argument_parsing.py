"""The parsing of words on the command line into a flow's parameters. A wrong word is a ConfigurationError."""

import ast
import json
import math
import re
import shlex
import sys
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..blocks.storage.location_parsing import make_absolute
from ..flows.inputs.cells import read_word
from ..flows.inputs.conversion import DATA_SUFFIX
from ..flows.inputs.file_patterns import refuse_json
from ..flows.inputs.tables import TextFile
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.requests.code_text import decode_code
from ..sandbox.requests.json_text import JSON, RepeatedKeyError

# The bounds of a variable, such as log:1e-5..0.1, int:0..1 or 32..512:32.
BOUNDS = re.compile(
    r"(?P<kinds>(?:(?:log|int):){0,2})(?P<low>[^.,:]*(?:\.[^.,:]+)?)\.\.(?P<high>[^,:]+)(?::(?P<step>[^,:]+))?"
)
LIKE_BOUNDS = re.compile(r"log:|(?:log|[a-z]+:)?\s*[-+]?\.?\d[\de.+-]*?\s*(?:\.\.|\u2026)|(?:\.\.|\u2026)\s*[-+]?\.?\d")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
LIKE_RANGE = re.compile(rf"({NUMBER})\s*(?:-|to)\s*({NUMBER})")
LIKE_SLICE = re.compile(r"[-+.\de]*\d(?::[-+.\de]*\d){1,2}")
LIKE_CALL = re.compile(
    r"(?:np|numpy)\.\w+\(|(?:\w+\.)?(?:a?range|(?:lin|log|geom)space|choice|q?(?:log_?)?uniform|interval|randint)\("
)
TYPOGRAPHIC_QUOTES = str.maketrans("\u201c\u201d\u201e\u2018\u2019", '"""\'\'')
QUOTES_AND_BRACKETS = (*"\"'[{(", *map(chr, TYPOGRAPHIC_QUOTES))

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
    refuse_json(path)
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

    Raises ConfigurationError for a text that only looks like a range, a list, JSON or a number. The message has the
    spelling that the user probably meant.
    """
    whole = _read_word(option, name, values)
    if isinstance(whole, list):
        return whole  # type: ignore[reportUnknownVariableType]
    parsed: list[Any] = []
    reasons: list[str] = []
    meant: list[str] | None = []  # None if the intended spelling of a value is unknown
    as_text: list[str] = []
    for piece in _split_values(values):
        parsed.append(_read_word(option, name, piece))
        slip = _find_slip(option, name, piece, is_alone=piece == values) if parsed[-1] == piece else None
        spelled: list[str] | None = [piece]
        if slip is not None:
            reason, spelled = slip
            reasons.append(reason)
        meant = None if meant is None or spelled is None else [*meant, *spelled]
        as_text.append(piece if slip is None else json.dumps(piece, ensure_ascii=False))
    if reasons:
        _refuse_values(option, name, values, reasons[0], meant, as_text)
    if option == "--grid":  # A search prints its whole space.
        _print_types(name, _split_values(values), parsed)
    return parsed


def _read_word(option: str, name: str, word: str) -> Any:
    try:
        return read_word(word)
    except RepeatedKeyError as error:
        raise ConfigurationError(f"{option} {name}={word}: {error}") from None


def _refuse_values(
    option: str, name: str, values: str, reason: str, meant: list[str] | None, as_text: list[str]
) -> NoReturn:
    spellings = [shlex.quote(f"{name}={','.join(pieces)}") for pieces in (meant, as_text) if pieces]
    raise ConfigurationError(f"{option} {name}={values}: {reason}; write {', or '.join(spellings)} for the text")


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


def _find_slip(option: str, name: str, text: str, *, is_alone: bool) -> tuple[str, list[str] | None] | None:
    """Return why a text is certainly a mistake, and the intended words, or None if the text may be correct.

    Instead of unknown words, return None as the second item.
    """
    if not text:
        return "a value is missing beside a comma", []
    if text.startswith(QUOTES_AND_BRACKETS):
        return f"{text} looks like JSON, but is not valid JSON", _spell_json(text, is_alone=is_alone)
    plain = _replace_lookalikes(text)
    if plain != text and not isinstance(read_word(plain), str):
        return f"{json.dumps(text)} contains characters that only look like ASCII", [plain]
    if "," in text or LIKE_CALL.match(text):
        return f"{text} is not evaluated: list the values, as in 1,2,3, or draw them from bounds with --space", None
    if is_alone and (match := LIKE_RANGE.fullmatch(plain)):
        bounds = _spell_bounds(f"{match[1]}..{match[2]}")
        if option == "--space":
            return "a single text is one choice, and bounds are LOW..HIGH", [bounds] if bounds else None
        if bounds and read_word(match[1]) < read_word(match[2]):  # `2024-01` may be a text.
            return f"{text} is a single value here, a text", _list_range(bounds)
    if LIKE_BOUNDS.match(plain) or (is_alone and LIKE_SLICE.fullmatch(plain)):
        bounds = _spell_bounds(plain)
        if option == "--grid":
            spelled = shlex.quote(f"{name}={bounds or 'LOW..HIGH'}")
            values = ",".join(_list_range(bounds or "") or [])
            example = f", as in {shlex.quote(f'{name}={values}')}" if values else ""
            text = f"a grid needs a list of values{example}; to draw from bounds, use --space {spelled} with --trials"
            return text, None
        meant = [bounds] if bounds and is_alone else None
        return "bounds are LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH, without other values", meant
    parts = re.split(r"[\s;|,]+", plain)
    if len(parts) > 1 and all(isinstance(read_word(part), (int, float)) for part in parts):
        return f"{text} looks like a list, and commas separate values", parts
    number = _read_as_python(text)
    if number is None:
        return None
    return f"{text} looks like a number, but is not a valid one", [repr(number)] if math.isfinite(number) else None


def _replace_lookalikes(text: str) -> str:
    """Return the text with ASCII's digits and minus, and without invisible characters."""
    plain = unicodedata.normalize("NFKC", text.replace("\u2026", "..").replace("\u2212", "-"))
    kinds = [(character, unicodedata.category(character)) for character in plain]
    return "".join("-" if kind == "Pd" else character for character, kind in kinds if kind != "Cf").strip()


def _spell_bounds(text: str) -> str | None:
    """Return LOW..HIGH, with its step or log, as `parse_space` takes it, or None."""
    found = re.fullmatch(r"(log)?:?(int)?:?(.*?\.\..*)", re.sub(r"\s", "", text))
    bounds = found and f"{'log:' if found[1] else ''}{'int:' if found[2] else ''}{found[3]}"
    match = BOUNDS.fullmatch(bounds or "")
    numbers = [read_word(match[word] or "0") for word in ("low", "high", "step")] if match else [""]
    return bounds if all(type(number) in (int, float) for number in numbers) else None


def _list_range(bounds: str) -> list[str] | None:
    """Return the words for the integers from LOW..HIGH or LOW..HIGH:STEP, or None if they are not a few integers."""
    match = BOUNDS.fullmatch(bounds)
    numbers: list[Any] = [read_word(match[word] or "1") for word in ("low", "high", "step")] if match else [""]
    if not match or "log" in match["kinds"] or not all(type(number) is int for number in numbers) or numbers[2] < 1:
        return None
    values = range(numbers[0], numbers[1] + 1, numbers[2])
    return [str(value) for value in values] if 1 < len(values) <= MAX_LISTED_VALUES else None


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


def _spell_json(text: str, *, is_alone: bool) -> list[str] | None:
    """Return the JSON that the user meant, or None if it is unknown.

    The mistakes are literals of Python, an unclosed quote or bracket, and texts without quotes. A text that is alone
    gives one JSON value, even if it contains commas.
    """
    text = re.sub(r"(?<=['\"])\s+(?=['\"])", ",", text.translate(TYPOGRAPHIC_QUOTES))  # numpy's texts have no commas
    is_list = text.startswith("[")
    for end in ("", *"]})\"'"):
        try:
            with warnings.catch_warnings(action="ignore"):  # Backslashes would warn.
                value = ast.literal_eval(f"{text}{end}" if is_list else f"[{text}{end}]")
            return [json.dumps(item, allow_nan=False) for item in ([value] if is_list or is_alone else value)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    words: list[str] = []
    for item in _split_values(text[1:-1]) if is_list and text.endswith("]") else [""]:
        is_text = read_word(item) == item
        if is_text and (item.startswith(QUOTES_AND_BRACKETS) or ".." in item):
            return None
        slip = _find_slip("", "", item, is_alone=False) if is_text else None
        spelled = slip[1] if slip else [item]
        if not spelled:
            return None
        words += spelled
    return [json.dumps([read_word(word) for word in words])]


def _read_as_python(text: str) -> float | None:
    """Return the number that a Python literal or `float` reads from the text, or None."""
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
            reason = f"{number!r} is not a number; bounds are LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH"
            bounds = _spell_bounds(_replace_lookalikes(values))
            _refuse_values(
                "--space", name, values, reason, [bounds] if bounds else None, [json.dumps(values, ensure_ascii=False)]
            )
    kinds = match["kinds"]
    return {**numbers, **({"log": True} if "log" in kinds else {}), **({"type": "int"} if "int" in kinds else {})}


def read_json_file(file: str) -> Any:
    """Return the value in a file of JSON. Raises ConfigurationError."""
    try:
        return JSON.decode(TextFile(Path(file).expanduser(), Path(file)).read())
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"the file {file} is not JSON: {error}") from None
