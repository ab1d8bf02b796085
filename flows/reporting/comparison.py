"""The comparison of two runs: their outcomes joined by variables, and the difference of each numeric field."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.result import Failure, Outcome
from ...tasks.ledger.run_record import ReportSpec
from ...tasks.repeats import REPEAT
from .groups import STATISTICS, aggregate_numbers, group_outcomes, read_number
from .ledger_reader import LedgerReader
from .summary import MAX_ROWS
from .table import describe_error, format_cell

UNFINISHED = "not run to the end in A or B"
# What pairs are counted as.
KINDS = ("in both", "only in A", "only in B", "failed only in A", "failed only in B", "failed in both", UNFINISHED)


@dataclass(frozen=True, slots=True)
class Side:
    """An execution of one run. `error` is empty if it succeeded, and `numbers` are its numeric fields."""

    index: int
    variables: dict[str, Any]
    status: str
    numbers: dict[str, float]
    error: str


@dataclass(frozen=True, slots=True)
class Pair:
    """The executions of two runs that have the same variables. One is None if its run has no such execution."""

    sides: tuple[Side | None, Side | None]

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of both executions."""
        return next(side.variables for side in self.sides if side is not None)

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
        counts: dict[str, int] = dict.fromkeys(KINDS, 0)
        for pair in self.pairs:
            if None in pair.sides:
                counts[f"only in {'B' if pair.sides[0] is None else 'A'}"] += 1
                continue
            counts["in both"] += 1
            failed = "".join(name for name, side in zip("AB", pair.sides, strict=True) if side and side.error)
            if any(side is not None and side.status == "unfinished" for side in pair.sides):
                counts[UNFINISHED] += 1
            elif failed:
                counts["failed in both" if failed == "AB" else f"failed only in {failed}"] += 1
        return counts

    def describe_field(self, name: str) -> str:
        """Return in a line how a field changed: its means where both runs have it, and the signs of the differences."""
        values = [pair.read_field(name) for pair in self.pairs]
        both = [(first, second) for first, second, _ in values if first is not None and second is not None]
        if not both:
            return "in no execution of both runs"
        first, second = (aggregate_numbers(values, "mean") for values in zip(*both, strict=True))
        less, more = sum(b < a for a, b in both), sum(b > a for a, b in both)
        means = f"mean {format_cell(first)} to {format_cell(second)}, difference {format_cell(second - first)}"
        return f"{means}; of {len(both):,}, {less:,} less in B, {more:,} more"

    def list_rows(self) -> list[list[str]]:
        """Return rows of text, the header first, of at most `MAX_ROWS` pairs.

        Pairs that failed in one run or are missing in one come first, then the greatest differences of the first field.
        """
        names = list(dict.fromkeys(name for pair in self.pairs for name in pair.variables))
        header = ["A", "B", *names]
        for name in self.fields:
            header += [f"{name} A", f"{name} B", "difference"]
        rows = [[*header, ""]]
        for pair in sorted(self.pairs, key=self._rank)[:MAX_ROWS]:
            row = ["" if side is None else str(side.index) for side in pair.sides]
            row += [format_cell(pair.variables.get(name, "")) for name in names]
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
        first, second = (
            None if side is None else {"index": side.index, "status": side.status, "error": side.error or None}
            for side in pair.sides
        )
        return {"variables": pair.variables, "a": first, "b": second, "fields": fields}


def compare_runs(first: LedgerReader, second: LedgerReader) -> Comparison:
    """Join the executions of two runs by their variables.

    Executions with the same variables are joined in their order. If a run has repeats, each group counts once in both
    runs, with the aggregate of its fields.
    """
    readers = (first, second)
    specs = [reader.records[-1].report_spec for reader in readers]
    left_out = REPEAT if any(spec.repeats is not None for spec in specs) else None
    first_sides, second_sides = (_read_sides(reader, left_out) for reader in readers)
    keys = dict.fromkeys([*first_sides, *second_sides])
    pairs = [Pair((first_sides.get(key), second_sides.get(key))) for key in keys]
    objectives = [item.name for spec in specs for item in spec.objectives]
    names = dict.fromkeys(name for pair in pairs for side in pair.sides if side is not None for name in side.numbers)
    return Comparison(pairs, [name for name in dict.fromkeys([*objectives, *names]) if name in names])


def _read_sides(reader: LedgerReader, left_out: str | None) -> dict[tuple[str, int], Side]:
    """Return the executions of a run by their variables and the number of earlier ones with the same variables.

    `left_out` is a variable that does not count.
    """
    spec = reader.records[-1].report_spec
    outcomes = group_outcomes(reader.read_outcomes(), spec)
    counts = Counter[str]()
    sides: dict[tuple[str, int], Side] = {}
    for outcome in outcomes if spec.repeats is None else sorted(outcomes, key=lambda group: group.meta.index or 0):
        variables = {name: value for name, value in outcome.meta.variables.items() if name != left_out}
        text = json.dumps(json.loads(json.dumps(variables), parse_float=_read_number), sort_keys=True)
        error = describe_error(outcome) if isinstance(outcome, Failure) else ""
        side = Side(outcome.meta.index or 0, variables, get_status(outcome), _list_numbers(outcome, spec), error)
        sides[text, counts[text]] = side
        counts[text] += 1
    return sides


def _read_number(text: str) -> float:
    """Return a whole float as an integer, so that 1 and 1.0 are the same variable."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _list_numbers(outcome: Outcome, spec: ReportSpec) -> dict[str, float]:
    """Return the numeric fields, but no variables and no statistics of a group. Bools count as 0 and 1."""
    if isinstance(outcome, Failure):
        return {}
    outputs, variables = outcome.outputs, outcome.meta.variables
    statistics = set[str]() if spec.repeats is None else {f"{name}.{key}" for name in outputs for key in STATISTICS}
    numbers: dict[str, float] = {}
    for name, value in outputs.items():
        number = read_number(value)
        is_variable = name in variables and variables[name] == value  # The field only repeats the variable.
        if number is not None and name not in statistics and not is_variable:
            numbers[name] = number
    return numbers
