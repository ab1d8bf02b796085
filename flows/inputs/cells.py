"""Values of texts: cells of CSV files, and words of the command line.

All cells of a CSV column have one type: the first one in the order of `READERS` that fits all of them. `read_cell`
reads a cell with the type of its column, and `read_word` reads a single word.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal

from ...sandbox.requests.json_text import JSON, RepeatedKeyError, read_float

ColumnType = Literal["int", "float", "bool", "json", "str"]

WHOLE = re.compile("-?(?:0|[1-9][0-9]*)")
DECIMAL = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
WHOLE_DIGITS = 18  # Longer whole numbers in a column are identifiers, such as card numbers.
SURE_DIGITS = 15  # A float holds any whole number of up to 15 digits.
MOST_DIGITS = 800  # The exact decimal form of a float has at most 767 digits.
BOOLEANS = {"true": True, "false": False}
MISSING = frozenset(("", "NA", "N/A", "null", "None"))  # Columns of type int, float and bool read these as None.
NOT_FINITE = re.compile("nan|[-+]?inf(?:inity)?", re.IGNORECASE)
UNDERSCORE_BESIDE_OTHERS = re.compile("(?<![0-9])_|_(?![0-9])")  # Python allows an underscore between two digits.
JSON_BEGINNINGS = tuple('"[{')


def read_whole(text: str) -> int:
    """Return a whole number without a plus or leading zeros. Raises ValueError."""
    if WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def read_decimal(text: str) -> float:
    """Return the text as a float. Raises ValueError if a float cannot hold all digits of the text.

    A number with a plus must have a point or an exponent. Otherwise it may be a telephone number.
    """
    if DECIMAL.fullmatch(text) is None or (text[0] == "+" and text[1:].isdigit()):
        raise ValueError(f"{text!r} is not a decimal number")
    value = read_float(text)
    has_exponent = "e" in text or "E" in text
    if "." in text and len(text) <= SURE_DIGITS + 1 and not has_exponent:
        return value
    digits = re.split("[eE]", text)[0].lstrip("+-").replace(".", "").strip("0")
    if len(digits) > MOST_DIGITS or (digits and Decimal(f"{value:.{len(digits) - 1}e}") != Decimal(text)):
        raise ValueError(f"{text!r} has more digits than a number can hold")
    return value


def read_boolean(text: str) -> bool:
    """Return true or false, written in any case. Raises ValueError."""
    if text.lower() not in BOOLEANS:
        raise ValueError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]


def read_word(text: str) -> Any:
    """Return the value of a single text: a word of the command line, or a cell in a column of the type json.

    A number is written as in JSON or Python, such as .5, 1., +1 and 1_000. `true` and `false` may have any case. `null`
    and `None` are None, and `nan` and `inf` are floats. Lists, objects and texts in double quotes are JSON. All else is
    text.

    Raises:
        RepeatedKeyError: It is JSON with the same key twice in an object.
    """
    word = text.strip()
    if word.startswith(JSON_BEGINNINGS):
        try:
            return JSON.decode(word)
        except RepeatedKeyError:
            raise
        except (ValueError, RecursionError):
            return text
    if word in ("null", "None"):
        return None
    if NOT_FINITE.fullmatch(word):
        return float(word)
    number = word if UNDERSCORE_BESIDE_OTHERS.search(word) else word.replace("_", "")
    number = re.sub("^[+](?=[0-9]+$)", "", number)
    for read in (read_whole, read_decimal, read_boolean):
        try:
            return read(number)
        except ValueError:
            pass
    return text


READERS: dict[ColumnType, Callable[[str], Any]] = {"int": read_whole, "float": read_decimal, "bool": read_boolean}


def list_fitting_types(text: str, candidates: list[ColumnType]) -> list[ColumnType]:
    """Return those of the candidate types that fit a cell's text. The list is empty if the cell can only be text."""
    if len(text) <= SURE_DIGITS and WHOLE.fullmatch(text):  # This path is faster, and most cells take it.
        return [kind for kind in candidates if kind != "bool"] if "bool" in candidates else candidates
    digits = text.removeprefix("-")
    if len(digits) > WHOLE_DIGITS and digits.isdigit():  # an identifier, such as a card number
        return []
    fitting: list[ColumnType] = []
    for kind in candidates:
        with suppress(ValueError):
            READERS[kind](text)
            fitting.append(kind)
    return fitting


def read_cell(kind: ColumnType | None, cell: str) -> Any:
    """Return the value of a cell in a column of type `kind`. Raises ValueError if the cell does not have that type.

    Without a type, all cells of the column are empty.
    """
    if not cell or kind is None:
        return None
    if kind == "str":
        return cell
    if kind == "json":
        return read_word(cell)
    text = cell.strip()
    if text in MISSING:
        return None
    if not text.isascii() or "_" in text:  # Python would read 1_000, and digits of other alphabets.
        raise ValueError(text)
    if kind == "int":
        return int(text)
    if kind == "float":
        return read_float(text)
    return text == "1" if text in ("0", "1") else read_boolean(text)
