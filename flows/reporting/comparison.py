"""The comparison of two runs: their outcomes joined by variables, and the difference of each numeric field."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure, Outcome
from ...sandbox.wire.nonfinite import replace_nonfinite
from ...tasks.ledger.run_record import Objective
from ..reports import Report
from .groups import PASSED, aggregate_numbers, describe_numbers, group_outcomes, read_number
from .ledger_reader import LedgerReader, open_run_ledger
from .pass_at_k import Z_95, format_key
from .summary import MAX_ROWS
from .table import MAX_SHOWN_ROWS, MAX_VARIABLES, align_rows, describe_error, format_cell, format_variables

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
        if first is None or second is None:
            return ["only in B" if first is None else "only in A"]
        if "unfinished" in (first.status, second.status):
            return ["in both", UNFINISHED]
        if first.error and second.error:
            return ["in both", "failed in both"]
        if first.error or second.error:
            return ["in both", "failed only in A" if first.error else "failed only in B"]
        return ["in both"]

    def describe(self) -> str:
        """Return in words which execution failed or is missing."""
        parts = [kind for kind in self.list_kinds() if kind.startswith("only")]
        for name, side in zip("AB", self.sides, strict=True):
            if side is not None and side.error:
                parts.append(f"{side.status} in {name}: {side.error}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, A and B, joined by variables. It prints as a table.

    Attributes:
        pairs: The executions or inputs with the same variables, in the order of A, and then those that only B has.
        fields: The numeric fields. The objectives, or else `passed`, come first.
        worse_sign: 1 if a greater first field is worse, -1 if a less one is worse, and 0 if that is unknown.
    """

    pairs: list[Pair]
    fields: list[str]
    worse_sign: int = 0

    @property
    def worse(self) -> list[Pair]:
        """The pairs that failed only in B, or whose first field is worse or NaN in B."""
        return [pair for pair in self.pairs if self.is_worse(pair)]

    def is_worse(self, pair: Pair) -> bool:
        """Return whether a pair failed only in B, or its first field is worse or NaN in B."""
        has_failed = "failed only in B" in pair.list_kinds()
        if has_failed or not self.worse_sign:
            return has_failed
        first, second, _ = pair.read_field(self.fields[0])
        if first is None or second is None:
            return False
        became_nan = math.isnan(second) and not math.isnan(first)
        return became_nan or (second - first) * self.worse_sign > 0

    def compute_interval(self, name: str) -> tuple[float, float] | None:
        """Return the interval of 95 % of the mean difference of a field, B minus A, by Student's t.

        Args:
            name: The name of a numeric field.

        Returns:
            Both ends; or None if fewer than three pairs have the field in both runs, or all differences are equal.
        """
        differences = [second - first for first, second in self._list_both(name)]
        if len(differences) < 3:
            return None
        statistics = describe_numbers(differences)
        if not statistics["se"] > 1e-12:  # Equal differences can differ by rounding errors.
            return None
        freedom = len(differences) - 1
        # The quantile of Student's t by Wallace 1959, "Bounds on Normal Approximations". It is at most 4 % too large.
        z = Z_95 * (8 * freedom + 3) / (8 * freedom + 1)
        half = math.sqrt(freedom * math.expm1(z**2 / freedom)) * statistics["se"]
        return statistics["mean"] - half, statistics["mean"] + half

    def describe(self) -> list[list[str]]:
        """Return rows of a name and a text: the counts of pairs, the pairs that got worse, and each field."""
        counts = Counter(kind for pair in self.pairs for kind in pair.list_kinds())
        texts = [f"{counts[kind]:,} {kind}" for kind in KINDS if counts[kind]]
        rows = [["Pairs", ", ".join(texts) or "no executions"]]
        worse = [format_variables(pair.variables, MAX_VARIABLES) for pair in self.worse]
        if len(worse) > MAX_VARIABLES:
            worse[MAX_VARIABLES:] = [f"{len(worse) - MAX_VARIABLES:,} more"]
        if self.worse_sign or worse:
            rows.append(["Worse in B", "; ".join(worse) or "none"])
        return rows + [[name, self.describe_field(name)] for name in self.fields]

    def describe_field(self, name: str) -> str:
        """Return in a line how a field changed: its means where both runs have it, and the signs of the differences."""
        both = self._list_both(name)
        if not both:
            return "in no execution of both runs"
        first_mean, second_mean = (aggregate_numbers(numbers, "mean") for numbers in zip(*both, strict=True))
        means = f"mean {format_cell(first_mean)} to {format_cell(second_mean)}"
        difference = format_cell(second_mean - first_mean)
        interval = self.compute_interval(name)
        if interval is not None:
            difference += f" (95 %: {format_cell(interval[0])} to {format_cell(interval[1])})"
        less, greater = sum(second < first for first, second in both), sum(second > first for first, second in both)
        return f"{means}, difference {difference}; of {len(both):,}, {less:,} less in B, {greater:,} more"

    def _list_both(self, name: str) -> list[tuple[float, float]]:
        """Return the values of a field in A and B, for the pairs that have both."""
        values = [pair.read_field(name) for pair in self.pairs]
        return [(first, second) for first, second, _ in values if first is not None and second is not None]

    def list_values(self) -> list[list[Any]]:
        """Return rows with whole values, the header first.

        Pairs that failed in one run or are missing in one come first, then the greatest differences of the first field.
        """
        names = list(dict.fromkeys(name for pair in self.pairs for name in pair.variables))
        titles = [f"{name} {part}" for name in self.fields for part in ("A", "B", "difference")]
        taken = {"A", "B", "outcome", *titles}
        variables = [f"variables.{name}" if name in taken else name for name in names]
        rows: list[list[Any]] = [["A", "B", *variables, *titles, "outcome"]]
        for pair in sorted(self.pairs, key=self._rank):
            row: list[Any] = [None if side is None else side.index for side in pair.sides]
            row += [pair.variables.get(name) for name in names]
            for name in self.fields:
                row += pair.read_field(name)
            notes = ["worse" if self.is_worse(pair) else "", pair.describe()]
            rows.append([*row, "; ".join(filter(None, notes))])
        return rows

    def list_rows(self, limit: int = MAX_ROWS) -> list[list[str]]:
        """Return the rows of `list_values` as text: the header, and at most `limit` pairs."""
        rows: list[list[str]] = []
        for *values, note in self.list_values()[: limit + 1]:
            rows.append([*("" if value is None else format_cell(value) for value in values), note])
        return rows

    def __str__(self) -> str:
        lines = [escape_text(f"{name}: {text}") for name, text in self.describe()]
        rows = [[escape_text(cell) for cell in row] for row in self.list_rows(MAX_SHOWN_ROWS)]
        return "\n".join([*lines, align_rows(rows)])

    def _rank(self, pair: Pair) -> tuple[int, float]:
        """Return a sort key: pairs with a result in one run only, then the largest differences of the first field."""
        has_result = [side is not None and not side.error for side in pair.sides]
        if has_result[0] != has_result[1]:
            return 0, 0.0
        difference = pair.read_field(self.fields[0])[2] if self.fields else None
        if difference is None:
            return 2, 0.0
        return 1, -math.inf if math.isnan(difference) else -abs(difference)

    def to_json(self, pair: Pair) -> dict[str, Any]:
        """Return a pair as an object for JSON. NaN and infinities are null."""
        line: dict[str, Any] = {"variables": pair.variables}
        for name, side in zip("ab", pair.sides, strict=True):
            line[name] = side and {"index": side.index, "status": side.status, "error": side.error}
        line |= {"fields": {}, "worse": self.is_worse(pair)}
        for name in self.fields:
            first, second, difference = pair.read_field(name)
            if first is not None or second is not None:
                line["fields"][name] = {"a": first, "b": second, "difference": difference}
        return replace_nonfinite(line)[0]


def compare(a: str | Report[Any], b: str | Report[Any], by: str | Sequence[str] | None = None) -> Comparison:
    """Compare two runs, whose executions are joined by their variables. This needs no server.

    Args:
        a: The report of the first run, or the run's id, its name, or the path or location of its results.
        b: The second run.
        by: The variable, or the variables, whose values name an input. The samples of an input are combined, and other
            variables may differ. Default: the executions with the same variables are joined.

    Returns:
        The comparison.

    Raises:
        ConfigurationError: There is no such run, or an execution lacks a variable.
    """
    paths = [run.results_path if isinstance(run, Report) else run for run in (a, b)]
    first, second = (replace(open_run_ledger(path), by=by) for path in paths)
    return compare_runs(first, second)


def compare_runs(first: LedgerReader, second: LedgerReader) -> Comparison:
    """Join the rows of two runs by their variables: executions, groups of repeats, or inputs if the readers have `by`.

    Rows with the same variables are joined in their order.

    Raises ConfigurationError if an execution lacks a variable of `by`.
    """
    first_sides, second_sides = _read_sides(first), _read_sides(second)
    pairs = [Pair(side.variables, (side, second_sides.get(key))) for key, side in first_sides.items()]
    pairs += [Pair(side.variables, (None, side)) for key, side in second_sides.items() if key not in first_sides]
    submitted = dict.fromkeys(name for pair in pairs for side in pair.sides if side for name in side.numbers)
    objectives = [*first.spec.objectives, *second.spec.objectives] or [Objective(PASSED, "maximize")]
    goals = [item for item in objectives if item.name in submitted]
    fields = list(dict.fromkeys([*(item.name for item in goals), *submitted]))  # each name once
    signs = [1 if item.direction == "minimize" else -1 for item in goals]
    return Comparison(pairs, fields, signs[0] if signs else 0)


def _read_sides(reader: LedgerReader) -> dict[tuple[str, int], Side]:
    """Return the rows of a run by their variables and the number of earlier rows with the same variables."""
    sides: list[Side] = []
    try:
        for row in group_outcomes(reader.read_outcomes(), reader.spec):
            error = describe_error(row) if isinstance(row, Failure) else None
            sides.append(Side(row.meta.index or 0, row.meta.variables, get_status(row), _list_numbers(row), error))
    except ConfigurationError as reason:
        raise ConfigurationError(f"{reader.ledger.path}: {reason.text}") from None
    counts = Counter[str]()
    numbered: dict[tuple[str, int], Side] = {}
    for side in sorted(sides, key=lambda side: side.index):
        text = format_key(side.variables)
        numbered[text, counts[text]] = side
        counts[text] += 1
    return numbered


def _list_numbers(row: Outcome) -> dict[str, float]:
    """Return the numeric fields, except those that equal a variable. Of a group, return only the aggregates.

    Bools count as 0 and 1.
    """
    if isinstance(row, Failure):
        return {}
    variables, numbers = row.meta.variables, dict[str, float]()
    for name, value in row.outputs.items():
        number = read_number(value)
        is_aggregate = f"{name}.count" in row.outputs
        equals_variable = name in variables and variables[name] == value
        if number is not None and not equals_variable and (is_aggregate or row.meta.group is None):
            numbers[name] = number
    return numbers
