"""Every error survives being written down and being handed to another process."""

import copy
import json
import pickle
import traceback

import pytest

from rlm_batch import Failure, Result
from rlm_batch.sandbox import errors
from rlm_batch.sandbox.errors import RlmBatchError, error_from_json, error_to_json
from rlm_batch.sandbox.meta import Meta

META = Meta(index=3, variables={"lr": 0.1}, provider="local", sandbox_id="s", layers=("limits",), stdout="é\n")
CODE = {"type": "ValueError", "message": "bad", "traceback": "Traceback\n", "stdout": "out", "line": 4}


def every() -> list[RlmBatchError]:
    """One of each, with everything set."""
    failure = Failure(errors.CodeError("failed"), META)
    details = {
        errors.CodeError: CODE,
        errors.CodeSyntaxError: CODE,
        errors.CodeCrashed: {**CODE, "exit_code": 3, "signal": 9, "out_of_memory": True},
        errors.ExecutionTimeout: {"timeout": 2.5, "traceback": "Traceback\n", "stdout": "out"},
        errors.PrepareError: CODE,
        errors.QuotaExceeded: {"retry_after": 7.5},
        errors.SandboxesLeft: {"sandboxes": ["one", "two"]},
        errors.ExecutionsFailed: {
            "results": [Result({"x": 1}, META), failure], "failures": [failure], "results_path": "/r.jsonl"
        },
    }  # fmt: skip
    found = [kind(f"first line of {kind.__name__}\nsecond é", **details.get(kind, {})) for kind in kinds(RlmBatchError)]
    for error in found:
        error.meta = META
    return found


def kinds(kind: type[RlmBatchError]) -> list[type[RlmBatchError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in kinds(child))]


def told(error: RlmBatchError) -> dict[str, object]:
    return {"type": type(error), "text": str(error), **{name: getattr(error, name) for name in error.details}}


def name(error: RlmBatchError) -> str:
    return type(error).__name__


def test_there_is_one_for_each_line_of_the_table() -> None:
    assert {name(error) for error in every()} == {
        "RlmBatchError", "CodeError", "CodeSyntaxError", "CodeCrashed", "ExecutionTimeout", "SubmitError",
        "VolumeError", "StateLost", "SandboxStartError", "SandboxLost", "OutcomeUnknown", "QuotaExceeded",
        "ConfigurationError", "BudgetExceeded", "DepthExceeded", "DeadlineExceeded", "QueryError", "ExecutionsFailed",
        "NotRun", "SandboxesLeft", "PrepareError",
    }  # fmt: skip


@pytest.mark.parametrize("error", every(), ids=name)
def test_json_keeps_type_text_and_details(error: RlmBatchError) -> None:
    again = error_from_json(json.loads(json.dumps(error_to_json(error), allow_nan=False)))
    assert told(again) == told(error)


def copies(error: RlmBatchError) -> list[RlmBatchError]:
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


@pytest.mark.parametrize("error", every(), ids=name)
def test_pickling_and_copying_keep_type_text_and_details(error: RlmBatchError) -> None:
    assert [told(again) for again in copies(error)] == [told(error)] * 3


def test_pickling_and_copying_keep_what_is_known_of_the_execution() -> None:
    for error in every():
        assert [again.meta for again in copies(error)] == [META] * 3


def test_pickling_and_copying_keep_the_results_of_a_flow() -> None:
    (error,) = (error for error in every() if isinstance(error, errors.ExecutionsFailed))
    for again in copies(error):
        assert isinstance(again, errors.ExecutionsFailed)
        assert again.results[0] == error.results[0]
        assert [str(failure.error) for failure in again.failures] == ["failed"]


@pytest.mark.parametrize("error", every(), ids=name)
def test_the_summary_is_the_first_line(error: RlmBatchError) -> None:
    assert error.summary == f"first line of {name(error)}"


def test_an_error_can_be_shown_on_a_terminal_and_keeps_its_text_as_it_is() -> None:
    raw = "raised \x1b]0;owned\x07\x9b2J\x7f\u202e\n\tat \x1b[31mline 3\r"
    error = errors.CodeError(raw, message=raw, traceback=raw)
    shown = r"raised \x1b]0;owned\x07\x9b2J\x7f\u202e", r"at \x1b[31mline 3\r"
    assert str(error) == "\n\t".join(shown)
    assert error.summary == shown[0]
    assert shown[0] in "".join(traceback.format_exception(error))
    assert "\x1b" not in "".join(traceback.format_exception(error)) + repr(error)
    for again in (error, *copies(error), error_from_json(json.loads(json.dumps(error_to_json(error))))):
        assert isinstance(again, errors.CodeError)
        assert (again.text, again.message, again.traceback) == (raw, raw, raw)


def test_which_errors_are_tried_again() -> None:
    again = {name(error): error.retry_rule for error in every()}
    del again["RlmBatchError"]
    assert {key for key, value in again.items() if value == "always"} == {
        "SandboxStartError",
        "SandboxLost",
        "QuotaExceeded",
    }
    assert {key for key, value in again.items() if value == "if idempotent"} == {"OutcomeUnknown"}
    asked = {"CodeError", "CodeSyntaxError", "CodeCrashed", "ExecutionTimeout"}
    assert {key for key, value in again.items() if value == "if asked"} == asked


def test_the_kinds_of_code_errors_are_caught_as_code_errors() -> None:
    for kind in (errors.CodeSyntaxError, errors.CodeCrashed):
        assert issubclass(kind, errors.CodeError)
    assert not issubclass(errors.SubmitError, errors.CodeError)


def test_an_error_of_a_later_version_reads_as_the_nearest_of_ours() -> None:
    later = error_from_json({"error": "SandboxMelted", "text": "it melted", "degrees": 900})
    assert (type(later), str(later)) == (RlmBatchError, "it melted")
    earlier = error_from_json({"error": "CodeCrashed", "text": "gone", "new": 1})
    assert isinstance(earlier, errors.CodeCrashed)
    assert (earlier.exit_code, earlier.out_of_memory, earlier.stdout) == (None, False, "")
