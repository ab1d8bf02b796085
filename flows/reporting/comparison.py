"""The comparison of two runs: their outcomes joined by variables, and the difference of each numeric field."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure, Outcome
from ...tasks.ledger.run_record import Objective, ReportSpec
from ...tasks.repeats import REPEAT
from ..reports import Report
from .groups import PASSED, STATISTICS, aggregate_numbers, describe_numbers, group_outcomes, read_number
from .ledger_reader import LedgerReader, open_run_ledger
from .pass_at_k import Z_95
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
        """The pairs that failed only in B, or whose first field is worse in B."""
        return [pair for pair in self.pairs if self.is_worse(pair)]

    def is_worse(self, pair: Pair) -> bool:
        """Return whether a pair failed only in B, or its first field is worse in B."""
        difference = pair.read_field(self.fields[0])[2] if self.fields else None
        has_worse_field = difference is not None and difference * self.worse_sign > 0
        return has_worse_field or "failed only in B" in pair.list_kinds()

    def compute_interval(self, name: str) -> tuple[float, float] | None:
        """Return the interval of 95 % of the mean difference of a field, B minus A, by Student's t.

        Args:
            name: The name of a numeric field.

        Returns:
            Both ends; or None if fewer than three pairs have the field in both runs, or all differences are equal.
        """
        values = [pair.read_field(name)[2] for pair in self.pairs]
        differences = [value for value in values if value is not None]
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
        values = [pair.read_field(name) for pair in self.pairs]
        both = [(first, second) for first, second, _ in values if first is not None and second is not None]
        if not both:
            return "in no execution of both runs"
        first_mean = aggregate_numbers([first for first, _ in both], "mean")
        second_mean = aggregate_numbers([second for _, second in both], "mean")
        means = f"mean {format_cell(first_mean)} to {format_cell(second_mean)}"
        difference = format_cell(second_mean - first_mean)
        interval = self.compute_interval(name)
        if interval is not None:
            difference += f" (95 %: {format_cell(interval[0])} to {format_cell(interval[1])})"
        less, greater = sum(second < first for first, second in both), sum(second > first for first, second in both)
        return f"{means}, difference {difference}; of {len(both):,}, {less:,} less in B, {greater:,} more"

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
        line["worse"] = self.is_worse(pair)
        for name, side in zip("ab", pair.sides, strict=True):
            if side is not None:
                line[name] = {"index": side.index, "status": side.status, "error": side.error}
        return line


def _keep_finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


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
    """Join the executions of two runs by their variables.

    Executions with the same variables are joined in their order. If a run has repeats, each group counts once in both
    runs, with the aggregate of its fields. If the readers have `by`, each of their rows counts once.

    Raises ConfigurationError if an execution lacks a variable of `by`.
    """
    specs = [reader.spec for reader in (first, second)]
    has_repeats = any(spec.repeats is not None for spec in specs)
    sides: list[dict[tuple[str, int], Side]] = []
    for reader in (first, second):
        try:
            sides.append(_read_sides(reader, has_repeats=has_repeats))
        except ConfigurationError as error:
            raise ConfigurationError(f"{reader.ledger.path}: {error.text}") from None
    first_sides, second_sides = sides
    pairs = [Pair(side.variables, (side, second_sides.get(key))) for key, side in first_sides.items()]
    pairs += [Pair(side.variables, (None, side)) for key, side in second_sides.items() if key not in first_sides]
    submitted = dict.fromkeys(name for pair in pairs for side in pair.sides if side for name in side.numbers)
    objectives = [item for spec in specs for item in spec.objectives] or [Objective(PASSED, "maximize")]
    goals = [item for item in objectives if item.name in submitted]
    fields = list(dict.fromkeys([*(item.name for item in goals), *submitted]))  # each name once
    signs = [1 if item.direction == "minimize" else -1 for item in goals]
    return Comparison(pairs, fields, signs[0] if signs else 0)


def _read_sides(reader: LedgerReader, *, has_repeats: bool) -> dict[tuple[str, int], Side]:
    """Return the executions of a run by their variables and the number of earlier ones with the same variables.

    With `has_repeats`, one of the runs has repeats, and the variable with the number of the repeat does not count.
    """
    spec = reader.spec
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
    if spec.repeats is not None or spec.by:
        hidden = {f"{name}.{key}" for name in outputs for key in (*STATISTICS, "sum")}
        hidden |= {name for name in outputs if name.startswith("pass@")}
    hidden |= {name for name, value in outputs.items() if name in variables and variables[name] == value}
    numbers: dict[str, float] = {}
    for name, value in outputs.items():
        number = read_number(value)
        if number is not None and name not in hidden:
            numbers[name] = number
    return numbers
