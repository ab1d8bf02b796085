"""The comparison of two runs: their outcomes joined by variables, and the difference of each numeric field."""

import json
import math
from dataclasses import dataclass
from typing import Any

from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.result import Failure, Result
from ...tasks.ledger.run_record import ReportSpec
from ...tasks.repeats import REPEAT
from .columns import VARIABLES, Columns, Tables, list_standard
from .groups import STATISTICS, aggregate_numbers, group_outcomes, read_number
from .ledger_reader import LedgerReader
from .summary import MAX_ROWS
from .table import describe_error, format_cell


@dataclass(frozen=True, slots=True)
class Side:
    """An execution of one run: its number, its status, its numeric fields, and the text of its error."""

    index: int
    status: str
    numbers: dict[str, float]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """The executions of two runs with the same variables. One of them is None if its run lacks them."""

    variables: dict[str, Any]
    sides: tuple[Side | None, Side | None]

    def read_field(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return the values of a field in both runs, and the second minus the first. None for what is missing."""
        first, second = (None if side is None else side.numbers.get(name) for side in self.sides)
        return first, second, None if first is None or second is None else second - first

    def describe(self) -> str:
        """Return in words which execution failed or is missing."""
        names: dict[tuple[str, str], list[str]] = {}  # the runs by status and error
        for name, side in zip("AB", self.sides, strict=True):
            if side is not None and side.error:
                names.setdefault((side.status, side.error), []).append(name)
        failures = [f"{status} in {' and '.join(runs)}: {error}" for (status, error), runs in names.items()]
        missing = [f"only in {'A' if self.sides[1] is None else 'B'}"] if None in self.sides else []
        return "; ".join([*missing, *failures])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs joined by variables, in the order of the first run, then what only the second has."""

    pairs: list[Pair]
    fields: list[str]  # numeric fields; the objective comes first

    def count_pairs(self) -> dict[str, int]:
        """Return how many executions are in both runs or in one, and how many failed in one or in both.

        Executions that did not run to the end in one of the runs are apart.
        """
        only, failed = ("only in A", "only in B"), ("failed only in A", "failed only in B", "failed in both")
        counts = dict.fromkeys(("in both", *only, *failed, "not run to the end in A or B"), 0)
        for pair in self.pairs:
            if None in pair.sides:
                counts[only[pair.sides[0] is None]] += 1
                continue
            counts["in both"] += 1
            statuses = [side.status for side in pair.sides if side is not None]
            if "unfinished" in statuses:
                counts["not run to the end in A or B"] += 1
            elif "failed" in statuses:
                counts[failed[2 if statuses[0] == statuses[1] else statuses.index("failed")]] += 1
        return counts

    def describe_field(self, name: str) -> str:
        """Return in a line how a field changed: its means where both runs have it, and the signs of the differences."""
        values = [pair.read_field(name) for pair in self.pairs]
        both = [(first, second) for first, second, _ in values if first is not None and second is not None]
        if not both:
            return "in no execution of both runs"
        first, second = (aggregate_numbers(values, "mean") for values in zip(*both, strict=True))
        less, more = (sum(sign * (b - a) > 0 for a, b in both) for sign in (-1, 1))
        means = f"mean {format_cell(first)} to {format_cell(second)}, difference {format_cell(second - first)}"
        return f"{means}; of {len(both):,}, {less:,} less in B, {more:,} more"

    def list_rows(self) -> list[list[str]]:
        """Return rows of text, the header first, of at most `MAX_ROWS` pairs.

        Pairs that failed in one run or are missing in one come first, then the greatest differences of the first field.
        """
        variables = Columns()
        variables.add(VARIABLES, (name for pair in self.pairs for name in pair.variables))
        columns = variables.name_all(Tables(0), taken=("A", "B"))
        header = ["A", "B", *(name for name, _ in columns)]
        for name in self.fields:
            header += [f"{name} A", f"{name} B", "difference"]
        rows = [[*header, ""]]
        for pair in sorted(self.pairs, key=self._rank)[:MAX_ROWS]:
            row = ["" if side is None else str(side.index) for side in pair.sides]
            row += [format_cell(pair.variables.get(column.name, "")) for _, column in columns]
            for name in self.fields:
                row += ["" if number is None else format_cell(number) for number in pair.read_field(name)]
            rows.append([*row, pair.describe()])
        return rows

    def _rank(self, pair: Pair) -> tuple[int, float]:
        failed = [side is None or bool(side.error) for side in pair.sides]
        if failed[0] != failed[1]:
            return 0, 0.0
        difference = pair.read_field(self.fields[0])[2] if self.fields else None
        if difference is None:
            return 2, 0.0
        return 1, -math.inf if math.isnan(difference) else -abs(difference)

    def to_json(self, pair: Pair) -> dict[str, Any]:
        """Return a pair as an object for JSON. NaN and infinities are null."""
        fields: dict[str, dict[str, float | None]] = {}
        for name in self.fields:
            values = pair.read_field(name)
            if any(value is not None for value in values):
                finite = (value if value is not None and math.isfinite(value) else None for value in values)
                fields[name] = dict(zip(("a", "b", "difference"), finite, strict=True))
        described = [
            None if side is None else {"index": side.index, "status": side.status, "error": side.error or None}
            for side in pair.sides
        ]
        return {"variables": pair.variables, "a": described[0], "b": described[1], "fields": fields}


def compare_runs(first: LedgerReader, second: LedgerReader) -> Comparison:
    """Join the executions of two runs by their variables.

    Executions with the same variables are joined in their order. If a run has repeats, each group counts once in both
    runs, with the aggregate of its fields.
    """
    specs = [reader.records[-1].report_spec for reader in (first, second)]
    has_repeats = any(spec.repeats is not None for spec in specs)
    first_sides, second_sides = (
        _read_sides(reader, spec, has_repeats) for reader, spec in zip((first, second), specs, strict=True)
    )
    pairs: list[Pair] = []
    for key in dict.fromkeys([*first_sides, *second_sides]):
        sides = first_sides.get(key), second_sides.get(key)
        variables = next(side[0] for side in sides if side is not None)
        pairs.append(Pair(variables, (sides[0] and sides[0][1], sides[1] and sides[1][1])))
    objectives = [item.name for spec in specs for item in spec.objectives]
    names = dict.fromkeys(name for pair in pairs for side in pair.sides if side is not None for name in side.numbers)
    return Comparison(pairs, [name for name in dict.fromkeys([*objectives, *names]) if name in names])


Key = tuple[str, int]


def _read_sides(reader: LedgerReader, spec: ReportSpec, has_repeats: bool) -> dict[Key, tuple[dict[str, Any], Side]]:
    """Return the executions of a run by their variables and the number of earlier ones with the same variables."""
    counts: dict[str, int] = {}
    sides: dict[Key, tuple[dict[str, Any], Side]] = {}
    outcomes = group_outcomes(reader.read_outcomes(), spec)
    for outcome in outcomes if spec.repeats is None else sorted(outcomes, key=lambda group: group.meta.index or 0):
        variables = outcome.meta.variables
        if has_repeats:
            variables = {name: value for name, value in variables.items() if name != REPEAT}
        text = json.dumps(_normalize(variables), sort_keys=True)
        number = counts.get(text, 0)
        counts[text] = number + 1
        error = describe_error(outcome) if isinstance(outcome, Failure) else ""
        numbers = {} if isinstance(outcome, Failure) else _read_numbers(outcome, spec)
        sides[text, number] = variables, Side(outcome.meta.index or 0, get_status(outcome), numbers, error)
    return sides


def _read_numbers(result: Result, spec: ReportSpec) -> dict[str, float]:
    """Return the numbers of the standard columns, and the numeric fields without the statistics of a group.

    Bools count as 0 and 1.
    """
    outputs = result.outputs
    statistics = {f"{name}.{key}" for name in outputs for key in STATISTICS} if spec.repeats is not None else set[str]()
    values = {column.name: column.get_value(result) for column in list_standard(Tables.COMPARISON)}
    numbers = {name: number for name, value in values.items() if (number := read_number(value)) is not None}
    for name, value in outputs.items():
        number = read_number(value)
        variables = result.meta.variables
        is_variable = name in variables and variables[name] == value  # The field only repeats the variable.
        if number is not None and name not in statistics and not is_variable:
            numbers[name] = number
    return numbers


def _normalize(value: Any) -> Any:
    """Return a value in which whole floats are integers, so that 1 and 1.0 are the same variable."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        items: dict[str, Any] = value
        return {name: _normalize(item) for name, item in items.items()}
    if isinstance(value, list):
        elements: list[Any] = value
        return [_normalize(item) for item in elements]
    return value
