"""A flow's inputs: lists in memory, or files that are read as a stream, as often as they are asked for."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol

from ...blocks.storage.location import Location
from ...blocks.storage.location_parsing import parse_location
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError

Variables = dict[str, Any]
CELL_LIMIT = (
    64 * 1024 * 1024
)  # characters of a cell of CSV: data may be long, but a quote left open is not all of a file


class Inputs(Iterable[Variables], Sized, Protocol):
    """Dicts of variables, in an order, and how many there are."""


class FileInputs:
    """The variables in a file: JSON lines, a dict a line, or CSV, whose cells are JSON where they parse, else text.

    The file is read once to count and check it, and again when it is used; only a line at a time is in memory. One at a
    location is fetched once, and its copy is read. `check` is called with each and its number at the first reading.
    """

    def __init__(self, path: str, check: Callable[[Variables, int], None] | None = None) -> None:
        self._path = parse_location(path)  # what it is called
        if self._path.suffix.lower() == ".csv":
            self._read: Callable[[], Iterator[Variables]] = self._csv
        elif self._path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
            self._read = self._lines
        else:
            raise ConfigurationError(
                f"{self._path} is neither JSON lines (.jsonl) nor CSV (.csv): rename or convert it"
            )
        try:
            self._length = 0
            self._copies = LocalMirror(self._path) if isinstance(self._path, Location) else None
            self._file = self._path if self._copies is None else self._copies.fetch_file()
            for value in self._read():
                self._length += 1
                if check is not None:
                    check(value, self._length)
        except OSError as error:
            raise ConfigurationError(f"the input file {self._path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"the input file {self._path} is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise ConfigurationError(f"the input file {self._path} is no CSV that can be read: {error}") from None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Variables]:
        return self._read()

    def _lines(self) -> Iterator[Variables]:
        with open(str(self._file), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise ConfigurationError(f"line {number} of {self._path} is not JSON: {error}") from None
                except RecursionError:
                    raise ConfigurationError(
                        f"line {number} of {self._path} is nested too deeply: flatten it"
                    ) from None
                if not self._accepts(value):
                    raise ConfigurationError(
                        f"line {number} of {self._path} is a {type(value).__name__}: a line is an object of variables"
                    )
                yield value

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, dict)

    def _csv(self) -> Iterator[Variables]:
        with open(str(self._file), encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(max(csv.field_size_limit(), CELL_LIMIT))
            reader = csv.DictReader(file)
            header = reader.fieldnames or ()
            for name in header:
                if list(header).count(name) > 1:
                    raise ConfigurationError(
                        f"the header of {self._path} has {name!r} twice: rename one of the columns"
                    )
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigurationError(
                        f"line {reader.line_num} of {self._path} has not as many cells as the header: "
                        f"{', '.join(header)}"
                    )
                yield {name: parse_cell(text) for name, text in row.items()}


class FileRows(FileInputs):
    """The same for items of data: a line of JSON is any value."""

    def _accepts(self, value: Any) -> bool:
        return True


def parse_cell(text: str) -> Any:
    """The value of a word in a CSV file or on the command line: JSON where it parses, else the text itself."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return text


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class Grid:
    """Every combination of the values of some variables, the last one changing fastest."""

    def __init__(self, grid: dict[str, list[Any]]) -> None:
        if not grid:
            raise ConfigurationError(
                "the grid is empty: give at least one variable with its values, such as lr=0.001,0.01"
            )
        for name, values in grid.items():
            if not values:
                raise ConfigurationError(f"the grid has no values for {name!r}: give at least one")
        self._grid = grid

    def __len__(self) -> int:
        length = 1
        for values in self._grid.values():
            length *= len(values)
        return length

    def __iter__(self) -> Iterator[Variables]:
        return (dict(zip(self._grid, values, strict=True)) for values in itertools.product(*self._grid.values()))


def read_inputs(inputs: list[Variables] | str, what: str) -> Inputs:
    """The inputs that a flow was given, as a list or as a path. Raises ConfigurationError where there are none."""
    found: Inputs = FileInputs(inputs) if isinstance(inputs, str) else inputs
    if not len(found):
        where = f"the file {inputs}" if isinstance(inputs, str) else f"the list of {what}"
        raise ConfigurationError(f"{where} is empty: there is nothing to run")
    return found


def check_same_variables(points: Inputs) -> Inputs:
    """The points, once it is sure that they all have the same variables. Raises ConfigurationError."""
    names: set[str] | None = None
    for number, point in enumerate(points, 1):
        if names is None:
            names = set(point)
        for name in sorted(names ^ set(point)):
            which, there = (
                (f"point {number}", "the first has") if name in names else ("the first point", f"point {number} has")
            )
            raise ConfigurationError(
                f"{which} has no variable {name!r}, which {there}: every point of a sweep has the same"
            )
    return points
