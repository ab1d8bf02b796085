"""The types of a CSV file's columns: found from all of a column's cells, or given; and cells made values of them.

- `int`: whole numbers of any size. `01234` is none, as zeros that come first say that it is a name for something;
- `float`: numbers, NaN and infinities; a column that has whole numbers beside others is one of these;
- `bool`: true and false, also as True and TRUE;
- `json`: lists and objects of JSON, where all of a column are; one that was named so has today's values of each cell by
  itself, JSON where that parses and else text;
- `str`: the text as it is, and what every other column is.

A cell that is empty, or says that there is nothing (`MISSING`), is None in a column of another type than `str`, and in
one that has no other cells.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

ColumnType = Literal["int", "float", "bool", "json", "str"]
Cells = Sequence[str]

MISSING = frozenset(("", "NA", "N/A", "null", "None"))
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
GIVEN_BOOLEANS = {**BOOLEANS, "1": True, "0": False}  # where it was said that they are
# Two, as a pattern that begins with one of two characters takes five times as long to search for.
LEADING_ZEROS = [re.compile(f"{before}[-+ ]*0[0-9]") for before in ("\n", ",")]
JSON_BEGINNINGS = frozenset('-0123456789"[{tfn \t\n\r')


def is_plain(cells: str) -> bool:
    """Whether all that Python reads as a number in these cells, with commas or new lines between them, is one here."""
    text = "\n" + cells
    return text.isascii() and "_" not in text and not any(zero.search(text) for zero in LEADING_ZEROS)


def find_column_type(
    cells: Cells, expected: ColumnType | None = None, *, are_plain: bool = False
) -> tuple[ColumnType | None, list[Any]]:
    """The type of some cells, None where all are missing, and their values.

    `expected` is what others are; `are_plain` says that it is known of them, as one look at many columns is shorter.
    """
    are_plain = are_plain or is_plain("\n".join(cells))
    if are_plain and expected in ("int", "float", None):
        if expected != "float":
            try:
                return "int", list(map(int, cells))
            except ValueError:
                pass
        try:
            return "float", list(map(float, cells))
        except ValueError:
            pass
    present = [cell for cell in cells if cell not in MISSING]
    if not present:
        return None, [None] * len(cells)
    kinds: tuple[ColumnType, ...] = ("int", "float", "bool", "json") if are_plain else ("bool", "json")
    for kind in kinds:
        try:
            read = FIND[kind]
            return kind, [None if cell in MISSING else read(cell) for cell in cells]
        except (ValueError, KeyError, RecursionError):
            continue
    return "str", list(cells)


def merge_types(one: ColumnType | None, other: ColumnType | None) -> ColumnType | None:
    """The type of a column of which some cells are of one type and some of another; None where all are missing."""
    if one is None or other is None or one == other:
        return one or other
    return "float" if {one, other} == {"int", "float"} else "str"


def read_cells(cells: Cells, kind: ColumnType) -> list[Any]:
    """The values of cells whose type was given. Raises CellError for the first that is no such value."""
    if kind == "str":
        return list(cells)
    if kind == "json":
        return [parse_cell(cell) for cell in cells]
    found, values = find_column_type(cells, kind)
    if found in (kind, None):
        return values
    if found == "int" and kind == "float":
        return convert_to_float(values)
    read, values = GIVEN[kind], []
    for number, cell in enumerate(cells):
        try:
            values.append(None if cell in MISSING else read(cell))
        except (ValueError, KeyError):
            raise CellError(number, cell) from None
    return values


class CellError(Exception):
    """A cell that is no value of its column's type: its number among those that were read, and its text."""

    def __init__(self, number: int, cell: str) -> None:
        super().__init__(number, cell)
        self.number, self.cell = number, cell


def convert_to_float(values: list[Any]) -> list[Any]:
    """Whole numbers of a column that has other numbers too."""
    return [None if value is None else _to_float(value) for value in values]


def _to_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)  # as of its text


def parse_cell(text: str) -> Any:
    """The value of a word in a CSV file or on the command line: JSON where it parses, else the text itself."""
    if text[:1] not in JSON_BEGINNINGS:
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse_container(cell: str) -> Any:
    if cell[:1] not in ("[", "{"):
        raise ValueError(cell)
    return json.loads(cell, parse_constant=_refuse_constant)


def _parse_plain(number: type[int] | type[float]) -> Callable[[str], Any]:
    """Reads digits with leading zeros too, and not all that Python takes for a number: 1_000, or other alphabets'."""

    def parse(cell: str) -> Any:
        if "_" in cell or not cell.isascii():
            raise ValueError(cell)
        return number(cell)

    return parse


FIND: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": BOOLEANS.__getitem__,
    "json": _parse_container,
}
GIVEN: dict[str, Callable[[str], Any]] = {
    "int": _parse_plain(int),
    "float": _parse_plain(float),
    "bool": GIVEN_BOOLEANS.__getitem__,
}
