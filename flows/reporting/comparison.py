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
    """An execution of one run."""

    index: int
    variables: dict[str, Any]
    status: str
    numbers: dict[str, float]  # its numeric fields
    error: str | None  # None if it succeeded


@dataclass(frozen=True, slots=True)
class Pair:
    """The executions of two runs, A and B, that have the same variables. A missing one is None."""

    variables: dict[str, Any]
    sides: tuple[Side | None, Side | None]

    def read_field(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return the values of a field in both runs, and the second minus the first. A missing value is None."""
        first, second = (side and side.numbers.get(name) for side in self.sides)
        difference = None if first is None or second is None else second - first
        return first, second, difference

    def list_kinds(self) -> list[str]:
        """Return those of `KINDS` that the pair counts as."""
        first, second = self.sides
        if first is None:
            return ["only in B"]
        if second is None:
            return ["only in A"]
        if "unfinished" in (first.status, second.status):
            return ["in both", UNFINISHED]
        if first.error and second.error:
            return ["in both", "failed in both"]
        if first.error:
            return ["in both", "failed only in A"]
        return ["in both", "failed only in B"] if second.error else ["in both"]

    def describe(self) -> str:
        """Return in words which execution failed or is missing."""
        names: dict[tuple[str, str], list[str]] = {}  # the runs by status and error
        for name, side in zip("AB", self.sides, strict=True):
            if side is not None and side.error:
                names.setdefault((side.status, side.error), []).append(name)
        parts = [kind for kind in self.list_kinds() if kind.startswith("only")]
        parts += [f"{status} in {' and '.join(runs)}: {error}" for (status, error), runs in names.items()]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs joined by variables, in the order of the first run, then what only the second has."""

    pairs: list[Pair]
    fields: list[str]  # numeric fields; the objective comes first

    def count_pairs(self) -> dict[str, int]:
        """Return how many pairs are of each of `KINDS`."""
        counts = Counter(kind for pair in self.pairs for kind in pair.list_kinds())
        return {kind: counts[kind] for kind in KINDS}

    def describe_field(self, name: str) -> str:
        """Return in a line how a field changed: its means where both runs have it, and the signs of the differences."""
        values = [pair.read_field(name) for pair in self.pairs]
        both = [(first, second) for first, second, _ in values if first is not None and second is not None]
        if not both:
            return "in no execution of both runs"
        first_mean = aggregate_numbers([first for first, _ in both], "mean")
        second_mean = aggregate_numbers([second for _, second in both], "mean")
        means = f"mean {format_cell(first_mean)} to {format_cell(second_mean)}"
        difference = format_cell(second_mean - first_mean)
        less, greater = sum(second < first for first, second in both), sum(second > first for first, second in both)
        return f"{means}, difference {difference}; of {len(both):,}, {less:,} less in B, {greater:,} more"

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
            row = [_format_number(side and side.index) for side in pair.sides]
            row += [format_cell(pair.variables.get(name, "")) for name in names]
            for name in self.fields:
                row += map(_format_number, pair.read_field(name))
            rows.append([*row, pair.describe()])
        return rows

    def _rank(self, pair: Pair) -> tuple[int, float]:
        """Return a sort key: pairs with a result in one run only, then the largest differences of the first field."""
        has_result = [side is not None and not side.error for side in pair.sides]
        if has_result[0] != has_result[1]:
            return 0, 0.0
        difference = None
        if self.fields:
            _, _, difference = pair.read_field(self.fields[0])
        if difference is None:
            return 2, 0.0
        return 1, -math.inf if math.isnan(difference) else -abs(difference)

    def to_json(self, pair: Pair) -> dict[str, Any]:
        """Return a pair as an object for JSON. NaN and infinities are null."""
        fields: dict[str, dict[str, float | None]] = {}
        for name in self.fields:
            first, second, difference = pair.read_field(name)
            if first is not None or second is not None:
                fields[name] = {"a": _keep_finite(first), "b": _keep_finite(second)}
                fields[name]["difference"] = _keep_finite(difference)
        line: dict[str, Any] = {"variables": pair.variables, "a": None, "b": None, "fields": fields}
        for name, side in zip("ab", pair.sides, strict=True):
            if side is not None:
                line[name] = {"index": side.index, "status": side.status, "error": side.error}
        return line


def _format_number(number: float | None) -> str:
    return "" if number is None else format_cell(number)


def _keep_finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def compare_runs(first: LedgerReader, second: LedgerReader) -> Comparison:
    """Join the executions of two runs by their variables.

    Executions with the same variables are joined in their order. If a run has repeats, each group counts once in both
    runs, with the aggregate of its fields.
    """
    specs = [reader.records[-1].report_spec for reader in (first, second)]
    has_repeats = any(spec.repeats is not None for spec in specs)
    first_sides, second_sides = (_read_sides(reader, has_repeats=has_repeats) for reader in (first, second))
    pairs = [Pair(side.variables, (side, second_sides.get(key))) for key, side in first_sides.items()]
    pairs += [Pair(side.variables, (None, side)) for key, side in second_sides.items() if key not in first_sides]
    submitted = dict.fromkeys(name for pair in pairs for side in pair.sides if side for name in side.numbers)
    objectives = [item.name for spec in specs for item in spec.objectives if item.name in submitted]
    fields = list(dict.fromkeys([*objectives, *submitted]))  # each name once
    return Comparison(pairs, fields)


def _read_sides(reader: LedgerReader, *, has_repeats: bool) -> dict[tuple[str, int], Side]:
    """Return the executions of a run by their variables and the number of earlier ones with the same variables.

    With `has_repeats`, one of the runs has repeats, and the variable with the number of the repeat does not count.
    """
    spec = reader.records[-1].report_spec
    sides: list[tuple[str, Side]] = []
    for outcome in group_outcomes(reader.read_outcomes(), spec):
        variables = dict(outcome.meta.variables)
        if has_repeats:
            variables.pop(REPEAT, None)
        normalized = json.loads(json.dumps(variables), parse_float=_parse_float)
        text = json.dumps(normalized, sort_keys=True)
        error = describe_error(outcome) if isinstance(outcome, Failure) else None
        numbers = _list_numbers(outcome, spec)
        sides.append((text, Side(outcome.meta.index or 0, variables, get_status(outcome), numbers, error)))
    counts = Counter[str]()
    numbered: dict[tuple[str, int], Side] = {}
    for text, side in sorted(sides, key=lambda item: item[1].index):
        numbered[text, counts[text]] = side
        counts[text] += 1
    return numbered


def _parse_float(text: str) -> float:
    """Return a whole float as an integer, so that 1 and 1.0 are the same variable."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _list_numbers(outcome: Outcome, spec: ReportSpec) -> dict[str, float]:
    """Return the numeric fields, except those that equal a variable, and except the statistics of repeats.

    Bools count as 0 and 1.
    """
    if isinstance(outcome, Failure):
        return {}
    outputs, variables = outcome.outputs, outcome.meta.variables
    hidden: set[str] = set()
    if spec.repeats is not None:
        hidden = {f"{name}.{key}" for name in outputs for key in STATISTICS}
    hidden |= {name for name, value in outputs.items() if name in variables and variables[name] == value}
    numbers: dict[str, float] = {}
    for name, value in outputs.items():
        number = read_number(value)
        if number is not None and name not in hidden:
            numbers[name] = number
    return numbers
