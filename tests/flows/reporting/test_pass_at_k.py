"""The estimate of pass@k of a run's outcomes."""

import inspect
import itertools
import json
import re
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result, TrialsReport, pass_at_k, pass_hat_k
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.sandbox import errors
from rlm_batch.sandbox.meta import Meta, QuerySummary
from rlm_batch.sandbox.outcomes.outcome_json import get_status, outcome_from_json, outcome_to_json
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.run_record import ReportSpec


def samples(*verdicts: str) -> list[Outcome]:
    """Return a sample for each character: `+` passed, `-` did not pass, `!` failed, `?` was lost, `0` has no fields.

    Each text is one input.
    """
    outcomes: list[Outcome] = []
    for task, text in enumerate(verdicts):
        for repeat, verdict in enumerate(text):
            meta = Meta(index=len(outcomes), variables={"task": task, "repeat": repeat})
            error = errors.SandboxLost("gone") if verdict == "?" else CodeError("no")
            fields = {} if verdict == "0" else {"passed": verdict == "+"}
            outcomes.append(Failure(error, meta) if verdict in "!?" else Result(fields, meta))
    return outcomes


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_estimate_is_the_share_of_all_choices_of_k_samples_with_a_pass(k):
    # The definition: of all sets of k of the five samples, count those with a sample that passed.
    expected = [
        sum("+" in choice for choice in itertools.combinations(text, k)) / len([*itertools.combinations(text, k)])
        for text in ("+----", "++---", "-----")
    ]
    estimate = pass_at_k(samples("+----", "++---", "-----"), k)
    assert estimate.value == pytest.approx(sum(expected) / 3)
    assert (estimate.inputs, estimate.samples, estimate.failures) == (3, 15, 0)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_hat_k_is_the_share_of_all_choices_of_k_samples_that_all_pass(k):
    verdicts = ("++++-", "++---", "+++++")
    shares: list[float] = []
    for text in verdicts:
        choices = [*itertools.combinations(text, k)]
        shares.append(sum(set(choice) == {"+"} for choice in choices) / len(choices))
    estimate = pass_hat_k(samples(*verdicts), k)
    assert estimate.value == pytest.approx(sum(shares) / 3)
    assert estimate.low < estimate.value < estimate.high
    assert str(estimate).startswith(f"pass^{k} = {estimate.value:.3f} (95 %: ")
    with pytest.raises(ConfigurationError, match=r"pass\^6 needs 6 samples"):
        pass_hat_k(samples(*verdicts), 6)


def test_inputs_are_told_apart_by_all_variables_but_repeat_or_by_those_that_are_named():
    outcomes = samples("+-", "--")
    for outcome in outcomes:
        outcome.meta.variables["solution"] = f"solution {outcome.meta.index}"
    assert pass_at_k(outcomes, 2, by="task").value == 0.5
    assert pass_at_k(outcomes, 2, by=["task"]).inputs == 2
    with pytest.raises(ConfigurationError, match=r"needs 2 samples of each input, and .* has 1: .*by='task'"):
        pass_at_k(outcomes, 2)


def test_failures_count_as_samples_that_did_not_pass():
    estimate = pass_at_k(samples("+!", "!!"), 1)
    assert estimate.value == 0.25
    assert str(estimate).endswith("2 inputs, 4 samples, 3 failed)")


def test_samples_whose_failure_a_check_judged_count_as_failed():
    judged: dict[str, Any] = {"outputs": {}, "error": {"type": "CodeCrashed", "text": "gone"}}
    fine = Result({"passed": True}, Meta(index=1, judged={"outputs": {"y": 1}, "error": None}))
    estimate = pass_at_k([Result({"passed": False}, Meta(index=0, judged=judged)), fine, *samples("!")], 1, by=[])
    assert (estimate.samples, estimate.failures) == (3, 2)


def test_both_estimates_describe_the_same_arguments():
    for first, second in ((pass_at_k, pass_hat_k), (TrialsReport.pass_at_k, TrialsReport.pass_hat_k)):
        sections = [(inspect.getdoc(function) or "").partition("Args:")[2] for function in (first, second)]
        assert sections[0] == sections[1]
        assert "field: The field that says whether a sample passed" in sections[0]


def test_what_did_not_run_to_the_end_is_left_out_and_the_number_is_said():
    estimate = pass_at_k(samples("+?", "??", "+0"), 1)
    assert (estimate.value, estimate.inputs, estimate.samples, estimate.unfinished) == (0.75, 2, 3, 3)
    assert str(estimate).endswith("2 inputs, 3 samples, without 3 that did not run to the end)")
    with pytest.raises(ConfigurationError, match=r"has 1, without 3 that did not run to the end: run more samples"):
        pass_at_k(samples("+?", "??", "+0"), 2)
    with pytest.raises(ConfigurationError, match="no samples, without 2 that did not run to the end"):
        pass_at_k(samples("??"), 1)


CODE_FAILURES = {"CodeError", "CodeSyntaxError", "CodeCrashed", "ExecutionTimeout", "SubmitError"}


@pytest.mark.parametrize("name", sorted(errors.RlmBatchError._kinds))
def test_the_type_of_an_error_says_whether_rates_count_it(name: str) -> None:
    failure = Failure(errors.RlmBatchError._kinds[name]("text"), Meta(index=0))
    assert get_status(failure) == ("failed" if name in CODE_FAILURES else "unfinished")
    summary = RunSummary(ReportSpec())
    summary.add(failure)
    assert summary.unfinished == (name not in CODE_FAILURES)


@pytest.mark.parametrize(("is_of_code", "status"), [(True, "failed"), (False, "unfinished")])
def test_an_error_of_a_volume_or_a_model_says_whether_the_code_is_its_cause(is_of_code, status):
    for kind in (errors.QueryError, errors.VolumeError):
        failure = Failure(kind("text", is_failure_of_code=is_of_code), Meta(index=0))
        for outcome in (failure, outcome_from_json(json.loads(json.dumps(outcome_to_json(failure))))):
            assert get_status(outcome) == status


def test_code_whose_model_did_not_answer_is_left_out():
    asked = Meta(index=0, queries=QuerySummary(asked=1, failed=1))
    refused = [Failure(CodeError("no", type=name), asked) for name in ("QueryError", "BudgetExceeded")]
    own = Failure(CodeError("no", type="QueryError"), Meta(index=0))  # a class of the code with the same name
    estimate = pass_at_k([*samples("+"), *refused, own], 1, by=[])
    assert (estimate.value, estimate.unfinished) == (0.5, 2)
    # The recursive model answered, but submitted nothing.
    unsolved = Meta(index=0, queries=QuerySummary(asked=1, failed=1, unsolved=1))
    assert get_status(Failure(CodeError("no", type="QueryError"), unsolved)) == "failed"


@pytest.mark.parametrize(
    ("verdicts", "low", "high"),
    [
        (["+"] * 20, 0.839, 1.0),  # Wilson's interval of 20 of 20
        (["-"] * 20, 0.0, 0.161),
        (["+"] * 5 + ["-"] * 15, 0.110, 0.475),  # Wilson's interval of 25 % of 19 inputs
        (["+-"] * 20, 0.299, 0.701),
    ],
)
def test_the_interval_is_wilsons_and_has_a_width_at_its_ends(verdicts, low, high):
    estimate = pass_at_k(samples(*verdicts), 1)
    assert (round(estimate.low, 3), round(estimate.high, 3)) == (low, high)


@pytest.mark.parametrize(
    ("outcomes", "options", "reason"),
    [
        ([], {}, "there are no samples"),
        (samples("+"), {"k": 0}, "k is 0"),
        (samples("+"), {"field": "right"}, "execution 0 has no field 'right': it has 'passed'"),
        (samples("+"), {"by": "name"}, "execution 0 has no variable 'name'"),
        ([Result({"passed": 0.5}, Meta(index=4))], {}, "execution 4 has passed=0.5"),
    ],
)
def test_what_cannot_be_estimated_is_refused(outcomes, options, reason):
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        pass_at_k(outcomes, **{"k": 1, **options})
