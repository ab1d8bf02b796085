"""Groups of executions: one outcome for each input, with the statistics of its fields over repeats or samples."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from ...sandbox.meta import NOTHING_ASKED, Meta
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.ledger.run_record import Aggregate, ReportSpec
from ...tasks.repeats import REPEAT
from .pass_at_k import estimate_pass_at_k, name_input

STATISTICS = ("count", "mean", "std", "se", "min", "max")  # fields of a group, as in `loss.std`
PASSED = "passed"  # the field with the verdict on a sample
SAMPLE_COUNTS = (1, 2, 5, 10, 20, 50, 100)  # k of the estimates of pass@k that a group has
MAX_FULL_FIELDS = 2  # numeric fields whose statistics all have a column in a table


def aggregate_group(
    outcomes: Sequence[Outcome], group: int, spec: ReportSpec, *, is_evaluation: bool = False
) -> Outcome:
    """Return one outcome for a group of repeats, or of samples of an input.

    Each numeric field has the aggregate of the results that submitted a number, and `STATISTICS` in further fields
    such as `loss.std`. Bools count as 0 and 1, and None does not count. Another field has its value if all results
    agree, otherwise the list of their values. The meta has the group's number as its index, the aggregates of the
    seconds, and the greatest peak of memory. If all repeats failed, the outcome is a failure with the first error.
    Repeats that did not run to the end are left out, unless none did, and the last reports of pruned trials always.

    If each `passed` is true or false, repeats without it did not pass. `passed.sum` is the number of those that passed,
    and `pass@1`, `pass@2` and so on are the estimates of pass@k. With `is_evaluation`, they are there even if all
    repeats failed.
    """
    finished = [outcome for outcome in outcomes if get_status(outcome) != "unfinished"]
    counted = finished or outcomes
    meta = _merge_metas([outcome.meta for outcome in counted], group, spec)
    results = [outcome for outcome in counted if isinstance(outcome, Result) and not outcome.meta.pruned]
    is_evaluation = is_evaluation and bool(finished)
    if isinstance(counted[0], Failure) and not results and not is_evaluation:
        return Failure(counted[0].error, meta)
    submitted: dict[str, list[Any]] = {}  # the values of each field
    for result in results:
        for name, value in result.outputs.items():
            submitted.setdefault(name, []).append(value)
    outputs: dict[str, Any] = {}
    for name, values in submitted.items():
        outputs |= _aggregate_field(name, values, spec.aggregate)
    given = [value for value in submitted.get(PASSED, ()) if value is not None]
    if (given or is_evaluation) and all(value in (False, True) for value in given):
        verdicts = [has_verdict(outcome) and bool(outcome[PASSED]) for outcome in finished]
        passed, count = sum(verdicts), len(verdicts)
        # These replace fields of the same names that code made.
        outputs |= {**_aggregate_field(PASSED, verdicts, spec.aggregate), f"{PASSED}.sum": passed}
        outputs |= {f"pass@{k}": estimate_pass_at_k(count, passed, k) for k in SAMPLE_COUNTS if k <= count}
    return Result(outputs, meta)


def has_verdict(outcome: Outcome) -> TypeGuard[Result]:
    """Return whether an execution submitted `passed` as true or false. 0 and 1 count, too."""
    return isinstance(outcome, Result) and outcome.outputs.get(PASSED) in (False, True)


def _aggregate_field(name: str, values: list[Any], aggregate: Aggregate) -> dict[str, Any]:
    """Return a submitted field with its value for the group, and the statistics if the values are numbers."""
    numbers = read_numbers(value for value in values if value is not None)
    if numbers:
        further_fields = {f"{name}.{key}": value for key, value in describe_numbers(numbers).items()}
        return {name: aggregate_numbers(numbers, aggregate), **further_fields}
    has_one_value = all(value == values[0] for value in values)
    return {name: values[0] if has_one_value else values}


def read_number(value: Any) -> float | None:
    """Return a bool or a number as a float, or None for anything else."""
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def read_numbers(values: Iterable[Any]) -> list[float] | None:
    """Return the values as floats, or None if one of them is neither a bool nor a number."""
    numbers = [read_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def describe_numbers(numbers: Sequence[float]) -> dict[str, Any]:
    """Return the count, mean, standard deviation, standard error, least and greatest of at least one number.

    The standard deviation is the sample's, with `count - 1` in its denominator. It is undefined for one number.
    """
    count = len(numbers)
    std = None
    if count > 1:
        std = statistics.stdev(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return {
        "count": count,
        "mean": aggregate_numbers(numbers, "mean"),
        "std": std,
        "se": None if std is None else std / math.sqrt(count),
        "min": aggregate_numbers(numbers, "min"),
        "max": aggregate_numbers(numbers, "max"),
    }


def aggregate_numbers(numbers: Sequence[float], aggregate: Aggregate) -> float:
    """Return the mean, median, least or greatest of at least one number. It is NaN if a number is."""
    if any(map(math.isnan, numbers)):
        return math.nan
    functions: dict[Aggregate, Callable[[Sequence[float]], float]] = {
        "mean": statistics.mean, "median": statistics.median, "min": min, "max": max
    }  # fmt: skip
    return functions[aggregate](numbers)


def _merge_metas(metas: Sequence[Meta], group: int, spec: ReportSpec) -> Meta:
    cpu_seconds = [meta.cpu_seconds for meta in metas if meta.cpu_seconds is not None]
    peaks = [meta.peak_mib for meta in metas if meta.peak_mib is not None]
    ended_times = [meta.ended_at for meta in metas if meta.ended_at is not None]
    names = spec.by or [name for name in metas[0].variables if name != REPEAT]
    return Meta(
        index=group,
        group=group,
        variables={name: metas[0].variables[name] for name in names},
        provider=metas[0].provider,
        isolation=metas[0].isolation,
        seconds=aggregate_numbers([meta.seconds for meta in metas], spec.aggregate),
        queries=sum((meta.queries for meta in metas), NOTHING_ASKED),
        submitted=any(meta.submitted for meta in metas),
        cpu_seconds=aggregate_numbers(cpu_seconds, spec.aggregate) if cpu_seconds else None,
        peak_mib=max(peaks) if peaks else None,
        exited=all(meta.exited for meta in metas),
        pruned=all(meta.pruned for meta in metas),
        ended_at=max(ended_times, default=None),
    )


class GroupCollector:
    """A collector of outcomes, in any order, which returns each group's outcome once the group is complete.

    Only incomplete groups take memory. An outcome outside of a group is returned as it is. Groups by variables are
    complete at the end.
    """

    def __init__(self, spec: ReportSpec) -> None:
        self._spec = spec
        self._open: dict[int, dict[int, Outcome]] = {}  # the outcomes of a group by their repeats
        self._numbers: dict[str, int] = {}  # the numbers of groups by their variables
        self._is_evaluation = False

    def add(self, outcome: Outcome) -> Outcome | None:
        """Add an outcome. Return the outcome of its group if the group is complete, otherwise None.

        Raises ConfigurationError if the outcome lacks a variable that names its group.
        """
        if self._spec.by:
            number = self._numbers.setdefault(name_input(outcome, self._spec.by), len(self._numbers))
            members = self._open.setdefault(number, {})
            members[len(members)] = outcome
            self._is_evaluation |= has_verdict(outcome)
            return None
        group, repeats = outcome.meta.group, self._spec.repeats
        if group is None or repeats is None:
            return outcome
        members = self._open.setdefault(group, {})
        members[outcome.meta.repeat or 0] = outcome
        return self._close(group) if len(members) >= repeats.count else None

    def close_rest(self) -> Iterator[Outcome]:
        """Yield the outcomes of the groups by variables, and of those that lack repeats, as in an interrupted run."""
        for group in sorted(self._open):
            yield self._close(group)

    def _close(self, group: int) -> Outcome:
        members = self._open.pop(group)
        outcomes = [members[repeat] for repeat in sorted(members)]
        return aggregate_group(outcomes, group, self._spec, is_evaluation=self._is_evaluation)


def group_outcomes(outcomes: Iterable[Outcome], spec: ReportSpec) -> Iterator[Outcome]:
    """Yield the outcome of each group once the group is complete. Without groups, yield every outcome."""
    collector = GroupCollector(spec)
    for outcome in outcomes:
        group = collector.add(outcome)
        if group is not None:
            yield group
    yield from collector.close_rest()


def list_hidden_fields(group: Outcome, spec: ReportSpec) -> set[str]:
    """Return the statistics that a table omits. With many numeric fields, it shows only those of objectives.

    Of verdicts, a table shows how many samples passed, and the estimates of pass@k.
    """
    if (spec.repeats is None and not spec.by) or not isinstance(group, Result):
        return set()
    numeric = [name for name in group.outputs if f"{name}.count" in group.outputs]
    hidden = {f"{name}.mean" for name in numeric if spec.aggregate == "mean"}  # The field itself is the mean.
    if len(numeric) > MAX_FULL_FIELDS:
        objectives = [item.name for item in spec.objectives]
        hidden |= {f"{name}.{key}" for name in numeric if name not in objectives for key in STATISTICS}
    if f"{PASSED}.sum" in group.outputs:
        hidden |= {f"{PASSED}.{key}" for key in (*STATISTICS, "sum")}
    return hidden


def is_incomplete(group: Outcome, spec: ReportSpec) -> bool:
    """Return whether a numeric field of a group comes from fewer repeats than the run has."""
    if spec.repeats is None or not isinstance(group, Result):
        return False
    counts = (read_number(group.outputs.get(f"{name}.count")) for name in group.outputs)
    return any(count is not None and count < spec.repeats.count for count in counts)


def describe_repeats(spec: ReportSpec, incomplete: int) -> str:
    """Return sentences about the rows of a table of groups, or an empty text without groups.

    `incomplete` is the number of rows whose numbers are from fewer repeats than the run has.
    """
    if spec.by:
        return f"Each row is the {spec.aggregate} of the {spec.noun}s with the same {' and '.join(spec.by)}."
    if spec.repeats is None:
        return ""
    text = f"Each row is the {spec.aggregate} of {spec.repeats.count:,} repeats; se is the standard error of the mean."
    if not incomplete:
        return text
    rows = "1 row has" if incomplete == 1 else f"{incomplete:,} rows have"
    return f"{text} {rows} numbers of fewer repeats, because others submitted none."
