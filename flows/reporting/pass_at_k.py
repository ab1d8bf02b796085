"""The estimates of pass@k and pass^k: the chances that one, or each, of k samples of an input passes."""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.result import Outcome, Result
from ...tasks.repeats import REPEAT

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Z_95 = 1.959963984540054  # the quantile of the normal distribution for an interval of 95 %


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The estimate of pass@k, or of pass^k, of a run. It prints as a line.

    Attributes:
        k: The number of samples of which one, or each, must pass.
        value: The mean of the inputs' estimates, from 0 to 1.
        low: The lower end of the interval of 95 %.
        high: The upper end of the interval of 95 %.
        inputs: The number of inputs.
        samples: The number of samples of all inputs.
        failures: The number of samples whose code failed. They did not pass, unless a check says so.
        unfinished: The number of executions that did not run to the end, for example because a sandbox was lost. They
            are no samples.
        is_hat: True for pass^k, where each sample must pass.
    """

    k: int
    value: float
    low: float
    high: float
    inputs: int
    samples: int
    failures: int
    unfinished: int = 0
    is_hat: bool = False

    def __str__(self) -> str:
        failed = f", {self.failures} failed" if self.failures else ""
        return (
            f"{_name_estimate(self.k, self.is_hat)} = {self.value:.3f} (95 %: {self.low:.3f} to {self.high:.3f}; "
            f"{self.inputs} inputs, {self.samples} samples{failed}{_describe_unfinished(self.unfinished)})"
        )


def share_sections(source: Callable[..., Any]) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that appends a docstring's sections, from `Args` on, to the docstring of a function."""

    def append(function: FunctionT) -> FunctionT:
        _, _, sections = inspect.cleandoc(source.__doc__ or "").partition("\n\nArgs:\n")
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nArgs:\n{sections}"
        return function

    return append


def pass_at_k(
    outcomes: Iterable[Outcome], k: int, field: str = "passed", by: str | Sequence[str] | None = None
) -> PassAtK:
    """Return the estimate of pass@k over the inputs of a run.

    An input with n samples, of which c passed, has the unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374). The value is the mean over the inputs.

    The interval of 95 % is Wilson's. Its effective number of inputs is p (1 - p) / v: p is the value, and v is the
    variance of the mean over the inputs. The method is from Dean and Pagano 2015, "Evaluating Confidence Interval
    Methods for Binomial Proportions in Clustered Surveys". Unlike a bootstrap's interval, it has a width if all inputs
    pass or all fail.

    A sample is an execution that ran to the end. It did not pass if its code failed, or ended without fields.
    Executions that did not run to the end, for example because of a lost sandbox or the deadline, are left out.

    Args:
        outcomes: The outcomes of all executions.
        k: The number of samples of which one, or for pass^k each, must pass.
        field: The field that says whether a sample passed: true or false, or 1 or 0.
        by: The variable, or the variables, that name the input of a sample. By default, all variables but `repeat`; in
            a run with `repeats`, each input is one.

    Returns:
        The estimate.

    Raises:
        ConfigurationError: An input has fewer than k samples, or a sample lacks the field or a variable.
    """
    return _estimate(outcomes, k, field, by, is_hat=False)


@share_sections(pass_at_k)
def pass_hat_k(
    outcomes: Iterable[Outcome], k: int, field: str = "passed", by: str | Sequence[str] | None = None
) -> PassAtK:
    """Return the estimate of pass^k over the inputs of a run: the chance that each of k samples of an input passes.

    An input with n samples, of which c passed, has the unbiased estimate C(c, k) / C(n, k) of Yao et al. 2024,
    "tau-bench" (arXiv:2406.12045). Samples and the interval are those of `pass_at_k`.
    """
    return _estimate(outcomes, k, field, by, is_hat=True)


def _estimate(
    outcomes: Iterable[Outcome], k: int, field: str, by: str | Sequence[str] | None, *, is_hat: bool
) -> PassAtK:
    if k < 1:
        raise ConfigurationError(f"k is {k}: it must be 1 or more")
    names = [by] if isinstance(by, str) else by
    verdicts: dict[str, list[bool]] = {}  # verdicts on each input's samples
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        status = get_status(outcome)
        if status == "unfinished":
            counts["unfinished"] += 1
            continue
        counts["failed"] += status == "failed" or bool((outcome.meta.judged or {}).get("error"))
        verdicts.setdefault(name_input(outcome, names), []).append(_has_passed(outcome, field))
    unfinished = _describe_unfinished(counts["unfinished"])
    if not verdicts:
        raise ConfigurationError(f"there are no samples{unfinished}: run at least k for each input")
    estimates: list[float] = []
    for name, samples in verdicts.items():
        count, passed = len(samples), sum(samples)
        if count < k:
            raise ConfigurationError(
                f"{_name_estimate(k, is_hat)} needs {k} samples of each input, and {name[:200]} has "
                f"{count}{unfinished}: run more samples, or name the variables that the samples of an input share, as "
                "in by='task'"
            )
        if is_hat:
            estimates.append(math.comb(passed, k) / math.comb(count, k))
        else:
            estimates.append(estimate_pass_at_k(count, passed, k))
    value = math.fsum(estimates) / len(estimates)
    low, high = _compute_interval(estimates, value)
    sample_count = sum(map(len, verdicts.values()))
    return PassAtK(k, value, low, high, len(verdicts), sample_count, counts["failed"], counts["unfinished"], is_hat)


def estimate_pass_at_k(count: int, passed: int, k: int) -> float:
    """Return the estimate of pass@k for an input with `count` samples, at least k, of which some passed."""
    return 1.0 - math.comb(count - passed, k) / math.comb(count, k)


def _name_estimate(k: int, is_hat: bool) -> str:
    return f"pass^{k}" if is_hat else f"pass@{k}"


def _describe_unfinished(count: int) -> str:
    return f", without {count} that did not run to the end" if count else ""


def name_input(outcome: Outcome, names: Sequence[str] | None) -> str:
    """Return a text that names the input of a sample. Raises ConfigurationError if the sample lacks a variable."""
    variables = outcome.meta.variables
    if names is None and outcome.meta.group is not None:
        return f"input {outcome.meta.group}"
    if names is None:
        names = [name for name in variables if name != REPEAT]
    for name in names:
        if name not in variables:
            raise ConfigurationError(
                f"execution {outcome.meta.index} has no variable {name!r}: it has {', '.join(variables) or 'none'}"
            )
    return format_key({name: variables[name] for name in names})


def format_key(variables: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal variables. 1 and 1.0 are equal."""
    parsed = json.loads(json.dumps(variables), parse_float=_parse_float)
    return json.dumps(parsed, sort_keys=True)


def _parse_float(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _has_passed(outcome: Outcome, field: str) -> bool:
    """Return whether a sample passed. Raises ConfigurationError if its field is missing, or is not true or false."""
    if not isinstance(outcome, Result) or not outcome.outputs:
        return False
    if field not in outcome.outputs:
        has = ", ".join(map(repr, outcome.outputs))
        raise ConfigurationError(f"execution {outcome.meta.index} has no field {field!r}: it has {has}. Pass field=")
    value: Any = outcome.outputs[field]
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ConfigurationError(f"execution {outcome.meta.index} has {field}={value!r}: it must be true or false")
    return bool(value)


def _compute_interval(estimates: list[float], value: float) -> tuple[float, float]:
    """Return the interval of 95 % of the mean `value` of the estimates."""
    count: float = len(estimates)  # the effective number of inputs
    squares = math.fsum((estimate - value) ** 2 for estimate in estimates)
    is_constant = squares <= 1e-12 * count  # All inputs have the same estimate, except for rounding errors.
    if not is_constant:
        variance = squares / ((count - 1) * count)
        count = value * (1 - value) / variance
    centre = (value + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
    half = Z_95 * math.sqrt(value * (1 - value) / count + Z_95**2 / (4 * count**2)) / (1 + Z_95**2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)
