"""Readers of a flow's inputs: lists, and files of JSON, CSV or Parquet, which are checked once and then read."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from ...blocks.storage.location import Location, PathOrLocation
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.execution_request import check_variable_name
from ...sandbox.requests.function_code import find_parameters
from ...sandbox.requests.json_text import JSON
from ...tasks.check import NAMES, check_names
from ...tasks.ledger.run_record import list_run_records
from ...tasks.repeats import REPEAT, refuse_own_repeat
from .cells import ColumnType
from .file_patterns import refuse_pattern
from .host_paths import locate_input, pin_file
from .parquet import ParquetTable
from .tables import LARGE_BYTES, SPREADSHEET, CsvTable, JsonValues, Report, Table, TextFile, split_suffix

Variables = dict[str, Any]
Chunk = tuple[str, Any]  # an id and its data
TypesOfColumns = dict[str, Any] | Literal["json"] | None  # The caller's types. None means that the cells decide.
RuleOfTypes = dict[str, Any] | Literal["json"]  # The run's record keeps this.
JSON_LINES = (".jsonl", ".ndjson", ".json")
CSV = (".csv", ".tsv")
PARQUET = ".parquet"
RENAME = (
    "rename or convert it. To send the file itself to an execution, pass batch a pattern as its inputs, such as "
    "'*.png' in quotes"
)
OTHER_FILES = dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), SPREADSHEET)


class RecordedTypes(dict[str, Any]):
    """Types of an earlier run, whose file may have had other columns."""


class Inputs(Iterable[Variables], Sized, Protocol):
    """An ordered collection of dicts of variables, with a length."""


class ChunkSource(Iterable[Chunk], Sized, Protocol):
    """An ordered collection of chunk ids with their data, with a length."""


class InputFile:
    """The values in a file of JSON, CSV or Parquet. A value is a dict, or anything if `takes_any_value`.

    The file is checked as a whole, and then read value by value. A file at a location is downloaded once.
    """

    takes_any_value = False  # Each line of JSON must be an object.
    default_types: ClassVar[dict[str, ColumnType]] = {}  # types of CSV columns for which the caller gives none

    def __init__(self, path: str, types: TypesOfColumns = None, report: Report | None = None) -> None:
        """Check the file at a path or location. Raises ConfigurationError if it must not be read or has a wrong value.

        `types` are the types of a CSV file's columns. `report` gets a line before a large file is read.
        """
        refuse_pattern(path)
        self.path = locate_input(path)
        is_folder = isinstance(self.path, Path) and self.path.is_dir()
        suffix = PARQUET if is_folder else split_suffix(self.path)[0]
        if suffix not in (*JSON_LINES, *CSV, PARQUET):
            advice = f"it is {OTHER_FILES[suffix]}" if suffix in OTHER_FILES else RENAME
            if isinstance(self.path, Path) and not self.path.exists():
                advice = "the file does not exist, and a text is taken as a path"
            raise ConfigurationError(
                f"{self.path} is not JSON lines (.jsonl), a JSON array (.json), CSV (.csv) or Parquet (.parquet): "
                f"{advice}"
            )
        if types and suffix not in CSV:
            raise ConfigurationError(
                f"{name_parameter('types')} needs a CSV file, and {self.path} is not one: leave it out"
            )
        self.table: Table | None = None  # None for JSON
        self._rule: RuleOfTypes = {}
        # The mirror's copy is deleted with the mirror, after `DataFile` has copied it.
        mirror = LocalMirror(self.path) if isinstance(self.path, Location) else None
        try:
            if mirror is not None:
                file = mirror.fetch_file()
            else:
                assert isinstance(self.path, Path)
                file = self.path if is_folder else pin_file(self.path)
            if report is not None and not is_folder and (size := file.stat().st_size) >= LARGE_BYTES:
                report(f"reading {self.path}, {size / 1e6:.0f} MB")
            if suffix in JSON_LINES:
                self._rows: Table | JsonValues = JsonValues(
                    file, self.path, self.check, takes_any_value=self.takes_any_value
                )
                return
            self._rows = self.table = self._open_table(file, suffix, types)
        except OSError as error:
            raise ConfigurationError(f"the input file {self.path} cannot be read: {error.strerror}") from None
        self.check_columns(self.table.names, f"the header of {self.path}")

    @property
    def column_types(self) -> RuleOfTypes:
        """The rule by which the file's cells were read, for a run's record: each column's type, or "json"."""
        return {} if self.table is None else self._rule or dict(self.table.types)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def check(self, value: Any, number: int, where: str) -> None:
        """Check a value of JSON. Raises ConfigurationError.

        Args:
            value: The value.
            number: Its number, counted from 1.
            where: Its line and file.
        """

    def check_columns(self, names: Iterable[str], where: str) -> None:
        """Check the names of a table's columns. Raises ConfigurationError."""

    def _open_table(self, file: Path, suffix: str, types: TypesOfColumns) -> Table:
        if suffix == PARQUET:
            return ParquetTable(file, self.path)
        if types == "json":
            self._rule = "json"
            return CsvTable(file, self.path, {}, "json")
        table = CsvTable(file, self.path, {**self.default_types, **(types or {})})
        unknown = [name for name in types or {} if name not in table.names]
        if unknown and not isinstance(types, RecordedTypes):
            raise ConfigurationError(
                f"{name_parameter('types')} names the column {unknown[0]!r}, and {self.path} has "
                f"{', '.join(table.names)}"
            )
        return table


class VariablesFile(InputFile):
    """A file of variables. The check of the file includes the variables' names."""

    _names: frozenset[str] = frozenset()  # Names that have been checked.

    def check(self, value: Variables, number: int, where: str) -> None:
        if not self._names.issuperset(value):
            check_variable_names(value, f"{where}: ")
            self._names = self._names.union(value)

    def check_columns(self, names: Iterable[str], where: str) -> None:
        for number, name in enumerate(names, 1):
            if not name or name.startswith("Unnamed:"):
                index = (
                    ", as pandas writes its index: save without it, to_csv(index=False)" if number == 1 else ": drop it"
                )
                raise ConfigurationError(f"{where}: column {number} has no name{index}, or name the column")
        check_variable_names(names, f"{where}: ")


class ItemFile(InputFile):
    """A file of data. A value of JSON may have any type."""

    takes_any_value = True


class PointFile(VariablesFile):
    """A file of a sweep's points. All points must have the variables of the first point."""

    _variables: set[str] | None = None

    def check(self, value: Variables, number: int, where: str) -> None:
        super().check(value, number, where)
        if self._variables is None:
            self._variables = set(value)
        _check_same_variables(self._variables, value, number)


class _ChunkFile(InputFile):
    """The chunks of a file whose lines have an id and data."""

    default_types: ClassVar[dict[str, ColumnType]] = {"id": "str"}

    def __init__(self, path: str, types: TypesOfColumns = None, report: Report | None = None) -> None:
        super().__init__(path, types, report)
        ids: set[str] = set()
        for number, (chunk_id, _) in enumerate(self, 1):
            if chunk_id in ids:
                raise ConfigurationError(
                    f"chunk {number} of {self.path} has the id {chunk_id!r}, like an earlier one: give "
                    "each chunk its own id"
                )
            ids.add(chunk_id)

    def __iter__(self) -> Iterator[Chunk]:
        return ((_normalize_chunk_id(line["id"]), line["data"]) for line in super().__iter__())

    def check(self, value: dict[str, Any], number: int, where: str) -> None:
        self.check_columns(value, where)

    def check_columns(self, names: Iterable[str], where: str) -> None:
        if set(names) != {"id", "data"}:
            raise ConfigurationError(
                f"{where} has {', '.join(map(str, names)) or 'nothing'}: a chunk needs id and data"
            )


class _SlicedChunks:
    """Data cut into lists of `size` items, with ids from 0. Only one list of a file is in memory at a time."""

    def __init__(self, items: list[Any] | ItemFile, size: int) -> None:
        self._items, self._size = items, size

    @property
    def column_types(self) -> RuleOfTypes:
        """The rule by which the cells of its file were read."""
        return get_column_types(self._items)

    def __len__(self) -> int:
        return (len(self._items) + self._size - 1) // self._size

    def __iter__(self) -> Iterator[Chunk]:
        rest = iter(self._items)
        slices = iter(lambda: list(itertools.islice(rest, self._size)), [])  # An empty list ends the iterator.
        return ((str(number), items) for number, items in enumerate(slices))


class Grid:
    """Every combination of the values of some variables. The last variable changes fastest."""

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
    """Return a flow's inputs from a list or a path. Raises ConfigurationError if they are empty or a name is wrong."""
    return read_rows(VariablesFile, inputs, types, report)


def read_rows(
    kind: type[VariablesFile],
    inputs: list[Variables] | str,
    types: TypesOfColumns = None,
    report: Report | None = None,
) -> Inputs:
    """Return inputs as `read_inputs` does, from a path as a file of this kind. Raises ConfigurationError."""
    values = _open_rows(kind, inputs, "inputs", types, report)
    if not isinstance(values, InputFile):
        check_variable_names(dict.fromkeys(name for variables in values for name in variables), "inputs: ")
    return values


def read_lines(path: str, parameter: str) -> list[str]:
    """Return the lines of a text file that are not empty, or the texts in a file of JSON lines.

    Raises:
        ConfigurationError: The file cannot be read, or a line of JSON is no text.
    """
    file = locate_input(path)
    mirror = None if isinstance(file, Path) else LocalMirror(file)  # Its copy is deleted with it.
    try:
        source = pin_file(file) if isinstance(file, Path) else mirror.fetch_file()  # type: ignore[reportOptionalMemberAccess]
        lines = [line.strip() for line in TextFile(source, file).read_lines() if line.strip()]
        texts = [JSON.decode(line) for line in lines] if split_suffix(file)[0] in JSON_LINES else lines
    except OSError as error:
        raise ConfigurationError(
            f"{name_parameter(parameter)} names the file {path}, which cannot be read: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON lines: {error}") from None
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(f"{path} has a line that is no text in JSON: write each as one in double quotes")
    return texts


def read_points(points: list[Variables] | str, types: TypesOfColumns = None, report: Report | None = None) -> Inputs:
    """Return a sweep's points from a list or a path. Raises ConfigurationError if their variables differ."""
    values = _open_rows(PointFile, points, "points", types, report)
    if not isinstance(values, InputFile):
        first = next(iter(values))
        for number, point in enumerate(values, 1):
            _check_same_variables(set(first), point, number)
        check_variable_names(first, "points: ")
    return values


def _open_rows(kind: type[InputFile], source: Any, noun: str, types: TypesOfColumns, report: Report | None) -> Inputs:
    rows = _open_or_take(kind, source, types, report)
    if not len(rows):
        where = f"the file {source} has no rows" if isinstance(source, str) else f"the list of {noun} is empty"
        raise ConfigurationError(f"{where}: give at least one {'row' if isinstance(source, str) else 'dict'}")
    return rows


def _open_or_take(kind: type[InputFile], values: Any, types: TypesOfColumns, report: Report | None) -> Any:
    if isinstance(values, str):
        return kind(values, types, report)
    if types is not None:
        raise ConfigurationError(f"{name_parameter('types')} needs a CSV file, and there is none: leave it out")
    return values


def check_variable_names(names: Iterable[str], where: str) -> None:
    """Raise ConfigurationError for a name that no variable can have; `where` begins the message."""
    for name in names:
        check_variable_name(name, where)


def get_column_types(values: object) -> RuleOfTypes:
    """Return the rule by which the cells of a CSV file were read; empty for anything else."""
    return getattr(values, "column_types", {})


def resolve_types_of(source: object, types: TypesOfColumns, ledger: PathOrLocation | None) -> TypesOfColumns:
    """Return the given types. If `source` is a CSV file without given types, return the types of the ledger's last run.

    A resumed job therefore reads its file as before, and runs nothing again. Raises ConfigurationError.
    """
    is_csv = isinstance(source, str) and split_suffix(Path(source))[0] in CSV
    if types is not None or ledger is None or not is_csv:
        return types
    try:
        recorded = next((record.column_types for record in reversed(list_run_records(ledger))), None)
    except OSError as error:
        raise ConfigurationError(f"the results in {ledger} cannot be read: {error.strerror or error}") from None
    return RecordedTypes(recorded) if isinstance(recorded, dict) else recorded or None  # type: ignore[return-value]


def _check_same_variables(names: set[str], point: Variables, number: int) -> None:
    """Raise ConfigurationError if a sweep's point does not have the variables `names`, which the first one has."""
    for name in sorted(names ^ set(point)):
        which, there = (
            (f"point {number}", "the first has") if name in names else ("the first point", f"point {number} has")
        )
        raise ConfigurationError(
            f"{which} has no variable {name!r}, which {there}: give every point the same variables"
        )


def build_chunks(
    chunks: dict[str, Any] | str | None,
    data: list[Any] | str | None,
    chunk_size: int | None,
    types: TypesOfColumns = None,
    report: Report | None = None,
) -> ChunkSource:
    """Return the chunks of a flow's parameters. Raises ConfigurationError."""
    if (chunks is None) == (data is None):
        raise ConfigurationError(
            f"pass either {name_parameter('chunks')} (data by id), or {name_parameter('data')} with "
            f"{name_parameter('chunk_size')}"
        )
    if data is None and chunk_size is not None:
        raise ConfigurationError(
            f"{name_parameter('chunk_size')} needs {name_parameter('data')}: leave it out, because "
            f"{name_parameter('chunks')} are already cut"
        )
    if data is not None and chunk_size is None:
        raise ConfigurationError(f"{name_parameter('chunk_size')} is missing: give the number of items in a chunk")
    if chunks is not None:
        by_id = _open_or_take(_ChunkFile, chunks, types, report)
        source: ChunkSource = by_id if isinstance(by_id, _ChunkFile) else normalize_chunk_ids(by_id).items()
    else:
        assert data is not None
        assert chunk_size is not None
        source = _SlicedChunks(_open_or_take(ItemFile, data, types, report), chunk_size)
    if not len(source):
        raise ConfigurationError(f"{name_parameter('data')} is empty: give at least one item")
    return source


def normalize_chunk_ids(chunks: dict[Any, Any]) -> dict[str, Any]:
    """Return the chunks with ids that are text, as in JSON. Raises ConfigurationError if two ids become equal."""
    normalized = {_normalize_chunk_id(name): value for name, value in chunks.items()}
    if len(normalized) < len(chunks):
        raise ConfigurationError("two chunks have the same id once ids are text, such as 1 and '1': rename one")
    return normalized


def _normalize_chunk_id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigurationError(f"{value!r} is not a chunk id: use text or whole numbers")
    return str(value)


def check_variables(code: str, inputs: Iterable[Iterable[str]], *, needs_all: bool, repeats: int | None = None) -> None:
    """Raise ConfigurationError if the code comes from a function that does not take the variables of each input.

    `needs_all` says that the inputs must define all parameters without defaults, because no `prepare` defines them.
    With `repeats`, the run sets the variable `repeat` of a function that has this parameter.
    """
    if repeats is not None:
        refuse_own_repeat(next(iter(inputs), ()))
    parameters = find_parameters(code)
    if parameters is None:
        return
    provided = (REPEAT,) if repeats is not None and REPEAT in parameters.names else ()
    if isinstance(inputs, InputFile) and inputs.table is not None:
        inputs = [inputs.table.names]  # all rows have the same variables
    for variables in inputs:
        parameters.check((*variables, *provided), needs_all=needs_all)


def check_judge(check: str | None, inputs: Iterable[Iterable[str]]) -> None:
    """Check the code of `check`, which gets the variables of each input and those that describe the execution.

    Raises:
        ConfigurationError: An input has a variable with the name of one that the check gets, or the check is a function
            with a parameter that no variable fills.
    """
    if check is None:
        return
    parameters = find_parameters(check)
    if isinstance(inputs, InputFile) and inputs.table is not None:
        inputs = [inputs.table.names]
    for variables in inputs:
        check_names(variables)
        if parameters is not None:
            known = (*variables, *NAMES)
            parameters.check((name for name in known if name in parameters.names), needs_all=True)


def check_provided_variables(code: str | None, names: tuple[str, ...], *, needs_all: bool) -> None:
    """Check the code as `check_variables` does. The flow provides the variables, and a function may ignore them."""
    parameters = None if code is None else find_parameters(code)
    if parameters is not None:
        parameters.check((name for name in names if name in parameters.names), needs_all=needs_all)
