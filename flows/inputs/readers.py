"""Readers of a flow's inputs: lists, and files of JSON, CSV or Parquet, which are checked once and then read."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.execution_request import check_variable_name
from ...sandbox.requests.function_code import find_parameters
from ...sandbox.requests.json_text import JSON
from ...tasks.check import NAMES, check_names
from ...tasks.repeats import REPEAT, refuse_own_repeat
from .file_patterns import refuse_pattern
from .host_paths import locate_input
from .parquet import ParquetTable
from .tables import CheckNames, CsvTable, DataFile, JsonValues, split_suffix

if TYPE_CHECKING:
    from ..parameters import Options

Variables = dict[str, Any]
TypesOfColumns = dict[str, Any] | Literal["json"] | None  # The caller's types. None means that the cells decide.
JSON_LINES = (".jsonl", ".ndjson", ".json")
CSV = (".csv", ".tsv")
PARQUET = ".parquet"


class Inputs(Iterable[Variables], Sized, Protocol):
    """An ordered collection of dicts of variables, with a length."""


InputFile = ParquetTable | CsvTable | JsonValues  # the values in a file


def open_input_file(
    path: str, types: TypesOfColumns = None, *, check: CheckNames | None = None, texts: Iterable[str] = ()
) -> InputFile:
    """Check the file of JSON, CSV or Parquet at a path or location, and return its values, which are read one by one.

    Args:
        path: The path or location.
        types: The types of a CSV file's columns.
        check: Checks the names of a table's columns, or of each object of JSON, which must then be objects.
        texts: Columns of CSV that are text by default.

    Raises:
        ConfigurationError: The file must not be read, or has a wrong value.
    """
    refuse_pattern(path)
    place = locate_input(path)
    suffix = _find_suffix(place)
    if suffix not in CSV:
        refuse_types(types)
    try:
        if suffix == PARQUET:
            values: InputFile = ParquetTable(place)
        elif suffix in CSV:
            values = _read_csv(DataFile(place), types, texts)
        else:
            return JsonValues(DataFile(place), check)
    except OSError as error:
        raise ConfigurationError(f"the input file {place} cannot be read: {error.strerror}") from None
    if isinstance(types, dict):
        for name in types:
            if name not in values.names:
                raise ConfigurationError(
                    f"`types` names the column {name!r}, and {place} has {', '.join(values.names)}"
                )
    if check is not None:
        check(values.names, f"the header of {place}")
    return values


def _find_suffix(place: PathOrLocation) -> str:
    """Return the suffix of a file's format, or that of Parquet for a folder. Raises ConfigurationError."""
    if isinstance(place, Path) and place.is_dir():
        return PARQUET
    suffix = split_suffix(place)[0]
    if suffix not in (*JSON_LINES, *CSV, PARQUET):
        is_missing = isinstance(place, Path) and not place.exists()
        reason = "it does not exist, and a text is taken as a path" if is_missing else "convert or rename it"
        raise ConfigurationError(
            f"{place} is not JSON lines (.jsonl), a JSON array (.json), CSV (.csv) or Parquet (.parquet): {reason}"
        )
    return suffix


def _read_csv(file: DataFile, types: TypesOfColumns, texts: Iterable[str]) -> CsvTable:
    text_columns: dict[str, Any] = dict.fromkeys(texts, "str")
    if types == "json":
        return CsvTable(file, text_columns, "json")
    return CsvTable(file, {**text_columns, **(types or {})})


def check_variable_names(names: Iterable[str], where: str) -> None:
    """Raise ConfigurationError for a name that no variable can have; `where` is the place of the names."""
    for number, name in enumerate(names, 1):
        if not name or name.startswith("Unnamed:"):
            raise ConfigurationError(
                f"{where}: column {number} has no name: name it, or save a DataFrame without index, to_csv(index=False)"
            )
        check_variable_name(name, f"{where}: ")


@dataclass
class _NamesCheck:
    """A check of the variable names of each row. With `must_be_same`, all rows must have the names of the first."""

    must_be_same: bool
    known: frozenset[str] | None = None

    def __call__(self, names: Iterable[str], where: str) -> None:
        if self.known is None:
            check_variable_names(names, where)
            self.known = frozenset(names)
        elif self.must_be_same:
            for name in sorted(self.known ^ set(names)):
                problem = "no" if name in self.known else "a new"
                raise ConfigurationError(f"{where} has {problem} variable {name!r}: give all points the same variables")
        elif not self.known.issuperset(names):
            check_variable_names(names, where)
            self.known = self.known.union(names)


def read_inputs(
    inputs: Any,
    types: TypesOfColumns = None,
    *,
    texts: Iterable[str] = (),
    noun: str = "inputs",
) -> Inputs:
    """Return a flow's inputs from a list of dicts or a path. All `points` must have the same variables.

    `open_input_file` describes the other parameters. Raises ConfigurationError for no inputs or a wrong name.
    """
    check = _NamesCheck(must_be_same=noun == "points")
    if isinstance(inputs, str):
        rows: Inputs = open_input_file(inputs, types, check=check, texts=texts)
    else:
        refuse_types(types)
        rows = inputs
        for number, variables in enumerate(rows, 1):
            check(variables, f"item {number} of {noun}")
    if not len(rows):
        raise ConfigurationError(f"{inputs if isinstance(inputs, str) else noun} has no rows: give at least one row")
    return rows


def refuse_types(types: TypesOfColumns) -> None:
    """Raise ConfigurationError if there are types of columns, which only a CSV file has."""
    if types:
        raise ConfigurationError("`types` needs a CSV file, and there is none: leave it out")


class Grid:
    """Every combination of the values of some variables. The last variable changes fastest."""

    def __init__(self, grid: dict[str, list[Any]]) -> None:
        check_variable_names(grid, "the grid")
        self._grid = grid

    def __len__(self) -> int:
        return math.prod(map(len, self._grid.values()))

    def __iter__(self) -> Iterator[Variables]:
        return (dict(zip(self._grid, values, strict=True)) for values in itertools.product(*self._grid.values()))


def read_lines(path: str) -> list[str]:
    """Return the lines of a text file that are not empty, or the texts of JSON lines. Raises ConfigurationError."""
    try:
        file = DataFile(locate_input(path))
        lines = [line.strip() for line in file.read_lines() if line.strip()]
        return [JSON.decode(line) for line in lines] if split_suffix(file.path)[0] in JSON_LINES else lines
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the file {path} cannot be read: {error}") from None


@dataclass(frozen=True)
class _Chunks:
    """Chunks as variables. Without a `size`, the items are rows with an id and data.

    With a `size`, the items are cut into lists of this size, with ids from 0. Only one list of a file is in memory at a
    time.
    """

    items: list[Any] | InputFile
    size: int | None = None

    def __len__(self) -> int:
        return len(self.items) if self.size is None else math.ceil(len(self.items) / self.size)

    def __iter__(self) -> Iterator[Variables]:
        if self.size is None:
            for row in self.items:
                yield {"chunk_id": _normalize_chunk_id(row["id"]), "data": row["data"]}
        else:
            items = iter(self.items)
            for number in range(len(self)):
                yield {"chunk_id": str(number), "data": list(itertools.islice(items, self.size))}


def build_chunks(chunks: Any, data: Any, chunk_size: int | None, types: TypesOfColumns = None) -> Inputs:
    """Return the variables of chunks: data by id, or lists of `chunk_size` items. Raises ConfigurationError."""
    if data is not None:
        if isinstance(data, str):
            items = open_input_file(data, types)
        else:
            refuse_types(types)
            items = data
        if not len(items):
            raise ConfigurationError("`data` is empty: give at least one item")
        return _Chunks(items, chunk_size)
    if isinstance(chunks, str):
        rows = _Chunks(open_input_file(chunks, types, check=_check_chunk, texts=("id",)))
    else:
        refuse_types(types)
        rows = _Chunks([{"id": name, "data": value} for name, value in chunks.items()])
    ids: set[str] = set()
    for number, row in enumerate(rows, 1):
        chunk_id = row["chunk_id"]
        if chunk_id in ids:
            raise ConfigurationError(f"chunk {number} of {chunks} has the id {chunk_id!r}, like an earlier one")
        ids.add(chunk_id)
    if not ids:
        raise ConfigurationError("`chunks` is empty: give at least one chunk")
    return rows


def _check_chunk(names: Iterable[str], where: str) -> None:
    if set(names) != {"id", "data"}:
        raise ConfigurationError(f"{where} has {', '.join(names) or 'nothing'}: a chunk needs id and data")


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


def check_variables(
    code: str, inputs: Iterable[Iterable[str]], options: "Options | None" = None, repeats: int | None = None
) -> None:
    """Check the code, and the code of `check`, with the variables of each input. Raises ConfigurationError.

    Without `prepare` the inputs must define all parameters of a function that have no default. With `repeats`, the run
    sets the variable `repeat` of a function that has this parameter.
    """
    if repeats is not None:
        refuse_own_repeat(next(iter(inputs), ()))
    check_code = None if options is None else options.check_code
    parameters, check_parameters = find_parameters(code), find_parameters(check_code)
    if parameters is None and check_code is None:
        return
    if isinstance(inputs, (ParquetTable, CsvTable)):
        inputs = [inputs.names]  # All rows have the same variables.
    needs_all = options is None or options.preparation is None
    for variables in inputs:
        if parameters is not None:
            names = list(variables)
            if repeats is not None and REPEAT in parameters.names:
                names.append(REPEAT)
            parameters.check(names, needs_all=needs_all)
        if check_code is not None:
            check_names(variables)
        if check_parameters is not None:
            provided = [name for name in (*variables, *NAMES) if name in check_parameters.names]
            check_parameters.check(provided, needs_all=True)


def check_provided_variables(code: str | None, names: tuple[str, ...], *, needs_all: bool) -> None:
    """Check the code as `check_variables` does. The flow provides the variables, and a function may ignore them."""
    parameters = None if code is None else find_parameters(code)
    if parameters is not None:
        parameters.check((name for name in names if name in parameters.names), needs_all=needs_all)
