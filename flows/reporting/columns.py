"""The columns of all tables of outcomes: their names, types and values. A new column is a line of `COLUMNS`.

Tables for people, pages, Prefect's artifacts, CSV, Parquet and DataFrames take their columns from here.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial
from typing import Any

from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.redrawn_lines import redraw_lines
from ...tasks.repeats import REPEAT

STANDARD, VARIABLES, OUTPUTS = "", "variables", "outputs"  # sources of a column's values
LIST = "list:"  # the beginning of a list's type, before the type of its items
# Types within this module. A column has "text" and "int" in their place.
EMPTY, LONG = "empty", "long"  # the items of an empty list; integers that a float cannot hold
Key = tuple[str, str]  # a column's source and name


class Tables(Flag):
    """The tables that show a column."""

    RUN = auto()  # a report in Python, in a notebook, and at the end of a command
    PRINTED = auto()  # `RUN`, if code printed anything
    QUESTIONS = auto()  # `RUN`, for the questions of `rlm`
    LEDGER = auto()  # `rlm-batch report`, its page, and the artifacts in Prefect's UI
    USAGE = auto()  # `RUN` and `LEDGER` with `--usage`
    EXPORT = auto()  # CSV, Parquet and DataFrames
    REPEATS = auto()  # `EXPORT`, for runs with repeats
    PRUNED = auto()  # `EXPORT`, for runs with a pruned trial


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        name: The name in exports and in Prefect's artifact.
        type: int, float, bool, text, `list:` before the type of the items, or json for all else.
        get_value: A function that returns the value of an outcome, or None.
        tables: The tables that show the column.
        heading: The name in tables for people, if it is another one.
        format: The format of a number in tables for people.
        source: The source of the values.
    """

    name: str
    type: str
    get_value: Callable[[Outcome], Any]
    tables: Tables
    heading: str | None = None
    format: str = ""
    source: str = STANDARD

    @property
    def key(self) -> Key:
        """The source and the name."""
        return self.source, self.name


def get_values(outcome: Outcome, source: str) -> dict[str, Any]:
    """Return the variables of an execution, or its submitted fields."""
    if source == VARIABLES:
        return outcome.meta.variables
    return outcome.outputs if isinstance(outcome, Result) else {}


T = Tables
INDEX = Column("index", "int", lambda o: o.meta.index, T.RUN | T.LEDGER | T.EXPORT, "")
# A table sets the values of this column, because they depend on its objectives.
OUTCOME = Column("outcome", "text", lambda _: None, T.RUN | T.LEDGER, "", "{}")
COLUMNS = (  # variables and fields stand before `status`
    INDEX,
    Column("group", "int", lambda o: o.meta.group, T.REPEATS),
    Column(REPEAT, "int", lambda o: o.meta.repeat, T.REPEATS),
    Column("status", "text", get_status, T.EXPORT),
    Column("pruned", "bool", lambda o: o.meta.pruned, T.PRUNED),
    Column("error", "text", lambda o: type(o.error).__name__ if isinstance(o, Failure) else None, T.EXPORT),
    Column("message", "text", lambda o: str(o.error) if isinstance(o, Failure) else None, T.EXPORT),
    Column("printed_last", "text", lambda o: "".join(redraw_lines(o.meta.stdout)[-1:]), T.PRINTED, "printed last"),
    Column("seconds", "float", lambda o: float(o.meta.seconds), T.LEDGER | T.EXPORT, format="{:.3g}"),
    Column("cpu_seconds", "float", lambda o: o.meta.cpu_seconds, T.USAGE | T.EXPORT, "CPU seconds", "{:.3g}"),
    Column("peak_mib", "float", lambda o: o.meta.peak_mib, T.USAGE | T.EXPORT, "peak MiB", "{:,.1f}"),
    Column("attempt", "int", lambda o: o.meta.attempt, T.EXPORT),
    Column("provider", "text", lambda o: o.meta.provider, T.EXPORT),
    Column("sandbox_id", "text", lambda o: o.meta.sandbox_id, T.EXPORT),
    Column("model_calls", "int", lambda o: o.meta.queries.calls, T.QUESTIONS | T.EXPORT, "calls"),
    Column("model_tokens", "int", lambda o: o.meta.queries.prompt_tokens + o.meta.queries.completion_tokens, T.EXPORT),
    Column("model_cost", "float", lambda o: o.meta.queries.cost, T.QUESTIONS | T.EXPORT, "cost", "${:.4g}"),
    OUTCOME,
)
LEADING = 3  # columns before the variables and fields


class Columns:
    """The columns of a table: standard ones, and one for each variable and each submitted field."""

    def __init__(self, limit: int | None = None, always: Collection[str] = ()) -> None:
        """Begin without variables and fields.

        Args:
            limit: The number of variables, and also of fields, that have a column. Default None: all.
            always: Names that have a column beyond the limit.
        """
        self.is_cut = False  # True if a variable or field has no column because of the limit
        # The types of the values, by the name of the variable or field.
        self.types: dict[str, dict[str, set[str]]] = {VARIABLES: {}, OUTPUTS: {}}
        self._limit, self._always = limit, always

    def add(self, source: str, names: Iterable[str]) -> None:
        """Add columns for variables or fields."""
        known = self.types[source]
        for name in names:
            if name not in known:
                if self._limit is None or len(known) < self._limit or name in self._always:
                    known[name] = set()
                else:
                    self.is_cut = True

    def add_types(self, outcome: Outcome) -> None:
        """Add columns for the variables and fields of an outcome, and the types of their values."""
        for source, known in self.types.items():
            values = get_values(outcome, source)
            self.add(source, values)
            for name, value in values.items():
                if value is not None:
                    known[name].add(_name_type(value))

    def name_all(self, tables: Tables, *, for_people: bool = False) -> list[tuple[str, Column]]:
        """Return the columns of these tables, each with its name, or with its heading in a table for people.

        A variable or field whose name is taken gets its source as a prefix: if there is a variable `x`, the field `x`
        has the column `outputs.x`.
        """
        leading = [column for column in COLUMNS[:LEADING] if column.tables & tables]
        others = [column for column in COLUMNS[LEADING:] if column.tables & tables]
        names: dict[Key, str] = {}
        for column in (*leading, *others):
            names[column.key] = column.name
            if for_people and column.heading is not None:
                names[column.key] = column.heading
        own = self._list_own(tables)
        # Shorter names come first: the field `x` gets `outputs.x` even if code also submits a field of that name.
        used = set(names.values())
        for column in sorted(own, key=lambda column: (column.source == OUTPUTS, len(column.name))):
            name = column.name
            while name in used:
                name = f"{column.source}.{name}"
            names[column.key] = name
            used.add(name)
        return [(names[column.key], column) for column in (*leading, *own, *others)]

    def _list_own(self, tables: Tables) -> list[Column]:
        """Return the columns of variables and fields."""
        columns: list[Column] = []
        for source, known in self.types.items():
            for name, types in known.items():
                kind = _merge_types(types).replace(LONG, "int").replace(EMPTY, "text")
                columns.append(Column(name, kind, partial(_get_item, source, name), tables, source=source))
        return columns


def _get_item(source: str, name: str, outcome: Outcome) -> Any:
    return get_values(outcome, source).get(name)


def _merge_types(types: set[str]) -> str:
    """Return one type for a column: json for mixed values, and for floats beside integers too large for a float."""
    if len(types) == 1:
        (only,) = types
        return only
    if types and all(kind.startswith(LIST) for kind in types):
        return _name_list({kind.removeprefix(LIST) for kind in types})
    if LONG in types and types <= {"int", LONG}:
        return LONG
    return "float" if types <= {"int", "float"} else "json"


def _name_list(item_types: set[str]) -> str:
    """Return the type of a list with items of these types."""
    known = item_types - {EMPTY}
    item = _merge_types(known) if known else EMPTY
    return "json" if item == "json" else f"{LIST}{item}"


def _name_type(value: Any) -> str:
    if isinstance(value, list):
        items: list[Any] = value
        return _name_list({_name_type(item) for item in items if item is not None})
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "json"
    if type(value) is int and abs(value) > 2**53:
        return LONG
    return {bool: "bool", int: "int", float: "float", str: "text"}.get(type(value), "json")
