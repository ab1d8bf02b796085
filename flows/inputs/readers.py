"""Readers of a flow's inputs: lists, and files of JSON lines, CSV or Parquet, which are checked once and then read."""

import itertools
import json
import math
import shlex
import weakref
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from ...blocks.storage.location import Location, PathOrLocation
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.execution_request import check_variable_name
from ...tasks.ledger.run_record import list_run_records
from .cells import JSON, ColumnType, read_word
from .host_paths import locate_input, pin_file
from .table_files import CsvTable, ParquetTable, Table
from .text_files import COMPRESSED, SPREADSHEET, Report, TextFile

Variables = dict[str, Any]
TypesOfColumns = dict[str, Any] | Literal["json"] | None  # The caller's; None means that the cells decide.
RuleOfTypes = dict[str, Any] | Literal["json"]  # The run's record keeps this.
JSON_LINES = (".jsonl", ".ndjson", ".json")
CSV = (".csv", ".tsv")
OTHER_FILES = {**dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), SPREADSHEET), ".gz": COMPRESSED}


class RecordedTypes(dict[str, Any]):
    """Types of an earlier run, whose file may have had other columns."""


class Inputs(Iterable[Variables], Sized, Protocol):
    """Dicts of variables, in an order, and how many there are."""


class InputFile:
    """The values in a file, each a dict of variables: JSON lines, CSV or Parquet.

    The file is copied and checked as a whole, and then read value by value; one at a location is fetched once.
    """

    takes_any_value = False  # A line of JSON is an object.
    default_types: ClassVar[dict[str, ColumnType]] = {}  # CSV columns have these where the caller gives none.

    def __init__(self, path: str, types: TypesOfColumns = None, report: Report | None = None) -> None:
        """Check the file.

        Args:
            path: The file or its location.
            types: The types of a CSV file's columns.
            report: A function that takes lines about how far a large file has been read.

        Raises:
            ConfigurationError: The file cannot or must not be read, or has a wrong value.
        """
        self.path = locate_input(path)
        suffix = self.path.suffix.lower()
        if suffix not in (*JSON_LINES, *CSV, ".parquet"):
            advice = f"it is {OTHER_FILES[suffix]}" if suffix in OTHER_FILES else "rename or convert it"
            if isinstance(self.path, Path) and not self.path.exists():
                advice = "there is no such file, and a text is the path of one"
            raise ConfigurationError(
                f"{self.path} is neither JSON lines (.jsonl) nor CSV (.csv) nor Parquet (.parquet): {advice}"
            )
        if types and suffix not in CSV:
            raise ConfigurationError(
                f"types are those of a CSV file's columns, and {self.path} is none: leave them out"
            )
        self.table: Table | None = None
        self._rule: RuleOfTypes = {}
        mirror = LocalMirror(self.path) if isinstance(self.path, Location) else None
        try:
            file = mirror.fetch_file() if mirror is not None else pin_file(self.path)  # type: ignore[arg-type]
            if suffix in JSON_LINES:
                self._text = TextFile(file, self.path)
                self._length = sum(1 for _ in self._check_lines(report))
                return
            self.table = self._open_table(file, suffix, types, report)
        except OSError as error:
            raise ConfigurationError(f"the input file {self.path} cannot be read: {error.strerror}") from None
        self.check_columns(self.table.names, f"the header of {self.path}")

    @classmethod
    def open(cls, path: str, types: TypesOfColumns = None, report: Report | None = None) -> Self:
        """The file's reader: one that is still in use where the file is as it was, so that it is not checked again.

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
        return self._read_lines() if self.table is None else iter(self.table)

    def check(self, value: Any, number: int) -> None:
        """Check a value of JSON lines, whose number counts from 1. Raises ConfigurationError."""

    def check_columns(self, names: Iterable[str], where: str) -> None:
        """Check the names of a table's columns. Raises ConfigurationError."""

    def _open_table(self, file: Path, suffix: str, types: TypesOfColumns, report: Report | None) -> Table:
        if suffix == ".parquet":
            return ParquetTable(file, self.path)
        if types == "json":
            self._rule = "json"
            return CsvTable(file, self.path, {}, "json", report)
        table = CsvTable(file, self.path, {**self.default_types, **(types or {})}, None, report)
        unknown = [name for name in types or {} if name not in table.names]
        if unknown and not isinstance(types, RecordedTypes):
            raise ConfigurationError(
                f"types names the column {unknown[0]!r}, which {self.path} has not: it has {', '.join(table.names)}"
            )
        return table

    def _check_lines(self, report: Report | None) -> Iterator[Any]:
        for number, value in enumerate(self._read_lines(report), 1):
            self.check(value, number)
            yield value

    def _read_lines(self, report: Report | None = None) -> Iterator[Any]:
        for number, line in enumerate(self._text.read_lines(report), 1):
            if line.strip():
                yield self._parse_line(line, number)

    def _parse_line(self, line: str, number: int) -> Any:
        try:
            value = JSON.decode(line)
        except ValueError as error:
            raise ConfigurationError(
                f"line {number} of {self.path} is not JSON: {error}{self._advise_lines(line)}"
            ) from None
        except RecursionError:
            raise ConfigurationError(f"line {number} of {self.path} is nested too deeply: flatten it") from None
        if not (self.takes_any_value or isinstance(value, dict)):
            raise ConfigurationError(
                f"line {number} of {self.path} is a {type(value).__name__}: a line is an object of variables"
                f"{self._advise_lines(line)}"
            )
        return value

    def _advise_lines(self, line: str) -> str:
        if not line.lstrip().startswith("["):
            return ""
        path = Path(str(self.path))
        program = "import json, sys; [print(json.dumps(item)) for item in json.load(sys.stdin)]"
        files = f"< {shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.lines.jsonl')))}"
        return f'. If the file is one list, give each item a line of its own: python3 -c "{program}" {files}'


# Readers that are still in use.
_open_files: weakref.WeakValueDictionary[tuple[Any, ...], InputFile] = weakref.WeakValueDictionary()


class VariablesFile(InputFile):
    """A file of variables, whose names are checked with the file."""

    _names: frozenset[str] = frozenset()  # Names that have been checked.

    def check(self, value: Variables, number: int) -> None:
        if not self._names.issuperset(value):
            check_variable_names(value, f"line {number} of {self.path}: ")
            self._names = self._names.union(value)

    def check_columns(self, names: Iterable[str], where: str) -> None:
        for number, name in enumerate(names, 1):
            if not name or name.startswith("Unnamed:"):
                index = (
                    ", as pandas writes its index: save without it, to_csv(index=False)" if number == 1 else ": drop it"
                )
                raise ConfigurationError(f"{where}: column {number} has no name{index}, or name the column")
            if name.startswith("__index_level_"):
                raise ConfigurationError(f"{where}: {name} is pandas' index: save without it, to_parquet(index=False)")
            if name.startswith(("{", "[")):
                raise ConfigurationError(f"{where} is {name}: if the file is JSON lines, call it NAME.jsonl")
            if not any(isinstance(read_word(part), str) for part in name.split()):
                raise ConfigurationError(
                    f"{where}: {name} is no name of a variable. Put a line of names before the data"
                )
        check_variable_names(names, f"{where}: ")


class ItemFile(InputFile):
    """A file of data, in which a line of JSON is any value."""

    takes_any_value = True


class PointFile(VariablesFile):
    """A file of a sweep's points, which all have the variables of the first."""

    _variables: set[str] | None = None

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
        check_variable_names(grid, "the grid: ")
        for name, values in grid.items():
            if not values:
                raise ConfigurationError(f"the grid has no values for {name!r}: give at least one")
        self._grid = grid

    def __len__(self) -> int:
        return math.prod(map(len, self._grid.values()))

    def __iter__(self) -> Iterator[Variables]:
        return (dict(zip(self._grid, values, strict=True)) for values in itertools.product(*self._grid.values()))


def read_inputs(inputs: list[Variables] | str, types: TypesOfColumns = None, report: Report | None = None) -> Inputs:
    """Return a flow's inputs, of a list or a path. Raises ConfigurationError for none, and for a wrong name."""
    found = _require_values(open_or_take(VariablesFile, inputs, types, report), inputs, "inputs")
    if not isinstance(found, InputFile):
        check_variable_names(dict.fromkeys(name for variables in found for name in variables), "inputs: ")
    return found


def read_points(points: list[Variables] | str, types: TypesOfColumns = None, report: Report | None = None) -> Inputs:
    """The points of a sweep, as a list or as a path. Raises ConfigurationError where their variables differ."""
    found = _require_values(open_or_take(PointFile, points, types, report), points, "points")
    if isinstance(found, InputFile):
        return found
    names: set[str] | None = None
    for number, point in enumerate(found, 1):
        names = set(point) if names is None else names
        check_same_variables(names, point, number)
    check_variable_names(names or (), "points: ")
    return found


def check_variable_names(names: Iterable[str], where: str) -> None:
    """Raise ConfigurationError for a name that no variable can have; `where` begins the sentence."""
    for name in names:
        check_variable_name(name, where)


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


def resolve_types_of(source: object, types: TypesOfColumns, ledger: PathOrLocation | None) -> TypesOfColumns:
    """Return the given types, or those of the ledger's last run if `source` is a CSV file and no types are given.

    A resumed job therefore reads its file as before, and runs nothing again. Raises ConfigurationError.
    """
    is_csv = isinstance(source, str) and source.lower().endswith(CSV)
    if types is not None or ledger is None or not is_csv:
        return types
    try:
        recorded = next((record.column_types for record in reversed(list_run_records(ledger))), None)
    except OSError as error:
        raise ConfigurationError(f"the results in {ledger} cannot be read: {error.strerror or error}") from None
    return RecordedTypes(recorded) if isinstance(recorded, dict) else recorded or None  # type: ignore[return-value]


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
