"""Readers of a flow's inputs: lists, and files of JSON lines or CSV that are parsed once where they are small."""

import csv
import itertools
import json
import math
import weakref
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Protocol, Self

from ...blocks.storage.location import Location
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from .host_paths import locate_input, pin_file

Variables = dict[str, Any]
CELL_CHARACTERS = 64 * 1024 * 1024  # of a cell of CSV: data may be long, but a quote left open is not all of a file
KEPT_BYTES = 8 * 1024 * 1024  # of the largest file whose values stay in memory; parsed they take some ten times that


class Inputs(Iterable[Variables], Sized, Protocol):
    """Dicts of variables, in an order, and how many there are."""


class InputFile:
    """The values in a file, each a dict of variables: JSON lines, or CSV whose cells are JSON where they parse.

    All of them are parsed and checked at once. Those of a file of up to `KEPT_BYTES` stay in memory; a larger one is
    parsed again, a line at a time, whenever its values are asked for. One at a location is fetched once.
    """

    takes_any_value = False  # in a line of JSON, rather than an object alone

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError where the file may not or cannot be read, or a value is not what it should be."""
        self.path = locate_input(path)  # what messages call it
        if self.path.suffix.lower() not in (".csv", ".jsonl", ".ndjson", ".json"):
            raise ConfigurationError(f"{self.path} is neither JSON lines (.jsonl) nor CSV (.csv): rename or convert it")
        try:
            self._copies = LocalMirror(self.path) if isinstance(self.path, Location) else None
            self._file = self._copies.fetch_file() if self._copies is not None else pin_file(self.path)  # type: ignore[arg-type]
            self._values: list[Any] | None = [] if self._file.stat().st_size <= KEPT_BYTES else None
            self._length = 0
            for value in self._parse():
                self._length += 1
                self.check(value, self._length)
                if self._values is not None:
                    self._values.append(value)
        except OSError as error:
            raise ConfigurationError(f"the input file {self.path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"the input file {self.path} is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise ConfigurationError(f"the input file {self.path} is no CSV that can be read: {error}") from None

    @classmethod
    def open(cls, path: str) -> Self:
        """The file's reader: one that is still in use where the file is as it was, so that it is not parsed again.

        The command line checks a file before it starts a server, and then runs the flow that reads it.
        """
        file = locate_input(path)
        status = file.stat() if isinstance(file, Path) and file.is_file() else None
        version = None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        key = (cls, str(file), version)
        reader = _open_files.get(key)
        if reader is None:
            reader = _open_files[key] = cls(path)
        assert isinstance(reader, cls)
        return reader

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._parse() if self._values is None else iter(self._values)

    def check(self, value: Any, number: int) -> None:
        """Is called with each value and its number, from 1. Raises ConfigurationError for what must not be there."""

    def _parse(self) -> Iterator[Any]:
        return self._parse_csv() if self.path.suffix.lower() == ".csv" else self._parse_json_lines()

    def _parse_json_lines(self) -> Iterator[Any]:
        with open(str(self._file), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise ConfigurationError(f"line {number} of {self.path} is not JSON: {error}") from None
                except RecursionError:
                    raise ConfigurationError(f"line {number} of {self.path} is nested too deeply: flatten it") from None
                if not (self.takes_any_value or isinstance(value, dict)):
                    raise ConfigurationError(
                        f"line {number} of {self.path} is a {type(value).__name__}: a line is an object of variables"
                    )
                yield value

    def _parse_csv(self) -> Iterator[Variables]:
        with open(str(self._file), encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(max(csv.field_size_limit(), CELL_CHARACTERS))
            reader = csv.DictReader(file)
            header = reader.fieldnames or ()
            for name in header:
                if list(header).count(name) > 1:
                    raise ConfigurationError(f"the header of {self.path} has {name!r} twice: rename one of the columns")
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigurationError(
                        f"line {reader.line_num} of {self.path} has not as many cells as the header: "
                        f"{', '.join(header)}"
                    )
                yield {name: parse_cell(text) for name, text in row.items()}


# Those that somebody has.
_open_files: weakref.WeakValueDictionary[tuple[Any, ...], InputFile] = weakref.WeakValueDictionary()


class ItemFile(InputFile):
    """The same for items of data: a line of JSON is any value."""

    takes_any_value = True


class PointFile(InputFile):
    """The same for the points of a sweep, which all have the same variables."""

    _variables: set[str] | None = None  # of the first

    def check(self, value: Variables, number: int) -> None:
        if self._variables is None:
            self._variables = set(value)
        check_same_variables(self._variables, value, number)


def parse_cell(text: str) -> Any:
    """The value of a word in a CSV file or on the command line: JSON where it parses, else the text itself."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(constant: str) -> None:
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
        return math.prod(map(len, self._grid.values()))

    def __iter__(self) -> Iterator[Variables]:
        return (dict(zip(self._grid, values, strict=True)) for values in itertools.product(*self._grid.values()))


def read_inputs(inputs: list[Variables] | str) -> Inputs:
    """The inputs that a flow was given, as a list or as a path. Raises ConfigurationError where there are none."""
    return _require_values(InputFile.open(inputs) if isinstance(inputs, str) else inputs, inputs, "inputs")


def read_points(points: list[Variables] | str) -> Inputs:
    """The points of a sweep, as a list or as a path. Raises ConfigurationError where their variables differ."""
    if isinstance(points, str):
        return _require_values(PointFile.open(points), points, "points")
    _require_values(points, points, "points")
    names = set(points[0])
    for number, point in enumerate(points, 1):
        check_same_variables(names, point, number)
    return points


def check_same_variables(names: set[str], point: Variables, number: int) -> None:
    """Raises ConfigurationError if a sweep's point does not have the first one's variables, which are `names`."""
    for name in sorted(names ^ set(point)):
        which, there = (
            (f"point {number}", "the first has") if name in names else ("the first point", f"point {number} has")
        )
        raise ConfigurationError(
            f"{which} has no variable {name!r}, which {there}: every point of a sweep has the same"
        )


def _require_values(inputs: Inputs, source: list[Variables] | str, what: str) -> Inputs:
    if not len(inputs):
        where = f"the file {source}" if isinstance(source, str) else f"the list of {what}"
        raise ConfigurationError(f"{where} is empty: there is nothing to run")
    return inputs
