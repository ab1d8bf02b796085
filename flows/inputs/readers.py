"""Readers of a flow's inputs: lists, and files of JSON lines, CSV or Parquet, which are parsed once."""

import itertools
import json
import math
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from ...blocks.storage.location import Location
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.execution_request import check_variable_name
from .block_spool import BlockSpool
from .csv_blocks import BLOCK_CHARACTERS
from .host_paths import locate_input, pin_file
from .reading_progress import OnBytes, ReadingProgress, Report
from .table_files import Table, read_csv, read_parquet

Variables = dict[str, Any]
TypesOfColumns = dict[str, Any] | Literal["json"] | None  # as they are given; None where all are found
RuleOfTypes = dict[str, Any] | Literal["json"]  # as a run's record has it


class RecordedTypes(dict[str, Any]):
    """Types of an earlier run, whose file may have had other columns."""


JSON_LINES = (".jsonl", ".ndjson", ".json")


class Inputs(Iterable[Variables], Sized, Protocol):
    """Dicts of variables, in an order, and how many there are."""


class InputFile:
    """The values in a file, each a dict of variables: JSON lines, CSV or Parquet.

    All of them are parsed and checked at once, and are then in memory or in a temporary file: see `BlockSpool`. One at
    a location is fetched once.
    """

    takes_any_value = False  # in a line of JSON, rather than an object alone

    def __init__(self, path: str, types: TypesOfColumns = None, report: Report | None = None) -> None:
        """Raises ConfigurationError where the file may not or cannot be read, or a value is not what it should be.

        `types` are those of a CSV file's columns, `report` is told how far a large file has been read.
        """
        self.path = locate_input(path)  # what messages call it
        suffix = self.path.suffix.lower()
        if suffix not in (*JSON_LINES, ".csv", ".parquet"):
            raise ConfigurationError(
                f"{self.path} is neither JSON lines (.jsonl) nor CSV (.csv) nor Parquet (.parquet): rename or convert "
                "it"
            )
        if types and suffix != ".csv":
            raise ConfigurationError(
                f"types are those of a CSV file's columns, and {self.path} is none: leave them out"
            )
        mirror = LocalMirror(self.path) if isinstance(self.path, Location) else None
        try:
            file = mirror.fetch_file() if mirror is not None else pin_file(self.path)  # type: ignore[arg-type]
            copy = _copy_stream(file)  # it is there until this method returns
            file = file if copy is None else Path(copy.name)
            progress = ReadingProgress(str(self.path), file.stat().st_size, report)
            if suffix in JSON_LINES:
                self.table, self._blocks, self._length = None, *self._parse_json_lines(file, progress.on_bytes)
            else:
                self.table = self._parse_table(file, suffix, types, progress.on_bytes)
                self.check_table(self.table)
        except OSError as error:
            raise ConfigurationError(f"the input file {self.path} cannot be read: {error.strerror}") from None

    @classmethod
    def open(cls, path: str, types: TypesOfColumns = None, report: Report | None = None) -> Self:
        """The file's reader: one that is still in use where the file is as it was, so that it is not parsed again.

        The command line checks a file before it starts a server, and then runs the flow that reads it.
        """
        file = locate_input(path)
        status = file.stat() if isinstance(file, Path) and file.is_file() else None
        version = None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        key = (cls, str(file), version, json.dumps(types, sort_keys=True))
        reader = _open_files.get(key)
        if reader is None:
            reader = _open_files[key] = cls(path, types, report)
        assert isinstance(reader, cls)
        return reader

    @property
    def column_types(self) -> RuleOfTypes:
        """The rule by which its cells were read, for a run's record: each column's type, or "json"."""
        return {} if self.table is None else self._rule or dict(self.table.types)

    def __len__(self) -> int:
        return self._length if self.table is None else len(self.table)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._blocks) if self.table is None else iter(self.table)

    def check(self, value: Any, number: int) -> None:
        """Is called with each value and its number, from 1. Raises ConfigurationError for what must not be there."""

    def check_table(self, table: Table) -> None:
        """The same of a table, where no check of each row is needed."""

    _rule: RuleOfTypes | None = None

    def _parse_table(self, file: Path, suffix: str, types: TypesOfColumns, on_bytes: OnBytes) -> Table:
        if suffix == ".parquet":
            return read_parquet(file, self.path, on_bytes)
        if types == "json":
            self._rule = "json"
            return read_csv(file, self.path, {}, "json", on_bytes)
        table = read_csv(file, self.path, types or {}, None, on_bytes)
        unknown = [name for name in types or {} if name not in table.names]
        if unknown and not isinstance(types, RecordedTypes):
            raise ConfigurationError(
                f"types names the column {unknown[0]!r}, which {self.path} has not: it has {', '.join(table.names)}"
            )
        return table

    def _parse_json_lines(self, path: Path, on_bytes: OnBytes) -> tuple[BlockSpool, int]:
        blocks, block, count, begin = BlockSpool(), list[Any](), 0, 0
        try:
            with open(str(path), encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    value = self._parse_line(line, number)
                    count += 1
                    self.check(value, count)
                    block.append(value)
                    begin += len(line)
                    if begin > BLOCK_CHARACTERS:
                        blocks.append(block)
                        block, begin = [], 0
                        on_bytes(os.lseek(file.fileno(), 0, os.SEEK_CUR))
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"the input file {self.path} is not UTF-8: {error.reason}") from None
        blocks.append(block)
        return blocks, count

    def _parse_line(self, line: str, number: int) -> Any:
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
        return value


def _copy_stream(path: Path) -> "tempfile._TemporaryFileWrapper[bytes] | None":  # type: ignore[reportPrivateUsage]
    """A copy of what a pipe has, which cannot be read again; None of a file. Raises OSError."""
    if stat.S_ISREG(path.stat().st_mode):
        return None
    copy = tempfile.NamedTemporaryFile()  # noqa: SIM115  # whoever has it closes it, in the end
    with open(path, "rb") as stream:
        shutil.copyfileobj(stream, copy)
    copy.flush()
    return copy


# Those that somebody has.
_open_files: weakref.WeakValueDictionary[tuple[Any, ...], InputFile] = weakref.WeakValueDictionary()


class VariablesFile(InputFile):
    """The same for variables, whose names are checked with the file: a CSV file of semicolons has one odd column."""

    _names: frozenset[str] = frozenset()  # that are known to be names

    def check(self, value: Variables, number: int) -> None:
        if not self._names.issuperset(value):
            self._check_names(value, f"line {number} of {self.path}: ")

    def check_table(self, table: Table) -> None:
        self._check_names(table.names, f"the header of {self.path}: ")

    def _check_names(self, names: Iterable[str], where: str) -> None:
        for name in names:
            check_variable_name(name, where)
        self._names = self._names.union(names)


class ItemFile(InputFile):
    """The same for items of data: a line of JSON is any value."""

    takes_any_value = True


class PointFile(VariablesFile):
    """The same for the points of a sweep, which all have the same variables."""

    _variables: set[str] | None = None  # of the first

    def check(self, value: Variables, number: int) -> None:
        super().check(value, number)
        if self._variables is None:
            self._variables = set(value)
        check_same_variables(self._variables, value, number)


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


def read_inputs(inputs: list[Variables] | str, types: TypesOfColumns = None, report: Report | None = None) -> Inputs:
    """The inputs that a flow was given, as a list or as a path. Raises ConfigurationError where there are none."""
    return _require_values(open_or_take(VariablesFile, inputs, types, report), inputs, "inputs")


def read_points(points: list[Variables] | str, types: TypesOfColumns = None, report: Report | None = None) -> Inputs:
    """The points of a sweep, as a list or as a path. Raises ConfigurationError where their variables differ."""
    found = _require_values(open_or_take(PointFile, points, types, report), points, "points")
    if isinstance(found, InputFile):
        return found
    names: set[str] | None = None
    for number, point in enumerate(found, 1):
        names = set(point) if names is None else names
        check_same_variables(names, point, number)
    return found


def open_or_take(kind: type[InputFile], values: Any, types: TypesOfColumns, report: Report | None) -> Any:
    """The reader of a file, or a list as it is. Raises ConfigurationError."""
    if isinstance(values, str):
        return kind.open(values, types, report)
    if types is not None:
        raise ConfigurationError("types are those of a CSV file's columns, and there is no file: leave them out")
    return values


def get_column_types(values: object) -> RuleOfTypes:
    """The rule by which the cells of a CSV file were read; empty of anything else."""
    return getattr(values, "column_types", {})


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
