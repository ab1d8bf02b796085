"""Tests that every error survives JSON, pickling and copying, and that its text is safe on a terminal."""

import copy
import json
import pickle
import traceback
import unicodedata

import pytest

import rlm_batch
from rlm_batch import Failure, Result
from rlm_batch.sandbox import errors
from rlm_batch.sandbox.errors import RlmBatchError, error_from_json, error_to_json
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.outcomes.text_escape import escape_text

META = Meta(index=3, variables={"lr": 0.1}, provider="local", sandbox_id="s", layers=("limits",), stdout="é\n")
CODE = {"type": "ValueError", "message": "bad", "traceback": "Traceback\n", "stdout": "out", "line": 4}


def list_kinds(kind: type[RlmBatchError] = RlmBatchError) -> list[type[RlmBatchError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in list_kinds(child))]


def make_error(kind: type[RlmBatchError]) -> RlmBatchError:
    """Return an error with all of its fields set."""
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
    error = kind(f"first line of {kind.__name__}\nsecond é", **details.get(kind, {}))
    error.meta = META
    return error


def describe(error: RlmBatchError) -> dict[str, object]:
    return {"type": type(error), "text": str(error), **{name: getattr(error, name) for name in error.details}}


def make_copies(error: RlmBatchError) -> list[RlmBatchError]:
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


@pytest.mark.parametrize("kind", list_kinds(), ids=lambda kind: kind.__name__)
def test_json_pickle_and_copy_keep_an_error(kind: type[RlmBatchError]) -> None:
    error = make_error(kind)
    assert error.summary == f"first line of {kind.__name__}"
    again = error_from_json(json.loads(json.dumps(error_to_json(error), allow_nan=False)))
    assert describe(again) == describe(error)
    for again in make_copies(error):
        assert describe(again) == describe(error)
        assert again.meta == META
        if isinstance(error, errors.ExecutionsFailed):
            assert isinstance(again, errors.ExecutionsFailed)
            assert again.results[0] == error.results[0]
            assert [str(failure.error) for failure in again.failures] == ["failed"]


def test_an_error_is_safe_on_a_terminal_and_keeps_its_text() -> None:
    raw = "raised \x1b]0;owned\x07\x9b2J\x7f\u202e\n\tat \x1b[31mline 3\r"
    error = errors.CodeError(raw, message=raw, traceback=raw)
    shown = r"raised \x1b]0;owned\x07\x9b2J\x7f\u202e", r"at \x1b[31mline 3\r"
    assert str(error) == "\n\t".join(shown)
    assert error.summary == shown[0]
    assert shown[0] in "".join(traceback.format_exception(error))
    assert "\x1b" not in "".join(traceback.format_exception(error)) + repr(error)
    for again in (error, *make_copies(error), error_from_json(json.loads(json.dumps(error_to_json(error))))):
        assert isinstance(again, errors.CodeError)
        assert (again.text, again.message, again.traceback) == (raw, raw, raw)


def test_only_the_listed_errors_are_retried() -> None:
    rules: dict[str, set[str]] = {}
    for kind in list_kinds()[1:]:
        rules.setdefault(make_error(kind).retry_rule, set()).add(kind.__name__)
    assert rules["always"] == {"SandboxStartError", "SandboxLost", "QuotaExceeded"}
    assert rules["if idempotent"] == {"OutcomeUnknown"}
    assert rules["if asked"] == {"CodeError", "CodeSyntaxError", "CodeCrashed", "ExecutionTimeout"}


def test_every_error_is_public() -> None:
    kinds = {kind.__name__ for kind in list_kinds()[1:] if kind.__module__ == errors.__name__}
    assert kinds - {*rlm_batch.__all__} == set()


def test_an_error_of_an_unknown_class_keeps_its_text() -> None:
    error = error_from_json({"error": "SandboxMelted", "text": "it melted", "degrees": 900})
    assert (type(error), str(error)) == (RlmBatchError, "it melted")


BIDIRECTIONAL = ("ALM", "LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
# Unicode names of marks whose bidirectional class is not in the list above.
MARKS = ("LEFT-TO-RIGHT MARK", "RIGHT-TO-LEFT MARK", "ARABIC LETTER MARK")


def test_characters_that_reverse_a_line_are_escaped() -> None:
    turning = [letter for letter in map(chr, range(0x110000)) if unicodedata.bidirectional(letter) in BIDIRECTIONAL]
    turning += map(unicodedata.lookup, MARKS)
    assert len(turning) == 12
    for letter in turning:
        assert escape_text(f"if a{letter}b") == f"if a\\u{ord(letter):04x}b"


def test_a_summary_is_one_line_for_a_text_of_any_length() -> None:
    error = errors.CodeError("\x7f" * 1_000_000 + "\nmore")
    assert error.summary == "\\x7f" * 500 + "..."
    assert errors.CodeError("é" * 500 + "\nmore").summary == "é" * 500


def test_ordinary_text_in_any_language_is_unchanged() -> None:
    for text in ("שלום", "مرحبا", "naïve 数 🙂 a\tb"):
        assert escape_text(text, keep="\t") == text
