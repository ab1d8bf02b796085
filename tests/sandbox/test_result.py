"""Tests that a result's fields are items and attributes, and that a missing field raises a helpful error."""

import copy
import json
import pickle

import pytest

from rlm_batch import CodeError, Failure, Result
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json
from rlm_batch.sandbox.outcomes.text_escape import escape_text

META = Meta(
    index=2, variables={"lr": 0.1, "tags": ["é"]}, provider="local", sandbox_id="s-1", isolation="landlock",
    layers=("landlock-7", "limits"), seconds=1.5, attempt=2, earlier_errors=("lost",), submitted=True, stdout="a\n",
    stderr="b",
)  # fmt: skip
RESULT = Result({"loss": 0.5, "outputs": 1, "meta": 2, "keys": [3]}, META)
FAILURE = Failure(CodeError("the code raised ValueError: bad\nTraceback", type="ValueError", line=3), META)
EVIL = "\x1b]0;owned\x07\x9b2J\x7f\u202e\u2028\r"


def test_fields_are_items_and_attributes_and_only_two_names_are_reserved() -> None:
    assert RESULT.loss == RESULT["loss"] == 0.5
    assert RESULT.keys == [3]
    assert "loss" in RESULT
    assert "gain" not in RESULT
    assert (len(RESULT), list(RESULT)) == (4, ["loss", "outputs", "meta", "keys"])
    assert (RESULT["outputs"], RESULT["meta"]) == (1, 2)
    assert RESULT.outputs == {"loss": 0.5, "outputs": 1, "meta": 2, "keys": [3]}
    assert RESULT.meta is META
    assert repr(Result({"loss": 0.5, "name": "x"}, META)) == "Result(loss=0.5, name='x')"


def test_a_missing_field_raises_an_error_that_lists_the_fields() -> None:
    assert not hasattr(RESULT, "gain")
    for result, message in (
        (RESULT, "no field 'gain': the code submitted loss, outputs, meta, keys"),
        (Result({}, Meta()), "the code ended before SUBMIT"),
        (Result({}, Meta(submitted=True)), "SUBMIT was called without fields"),
        (FAILURE, "no field 'gain': this execution failed: the code raised ValueError: bad"),
    ):
        with pytest.raises(AttributeError, match=message):
            _ = result.gain
        with pytest.raises(KeyError, match=message):
            _ = result["gain"]


def test_text_from_code_is_safe_on_a_terminal() -> None:
    result = Result({EVIL: {EVIL: [EVIL]}, "x": EVIL}, Meta(submitted=True))
    failure = Failure(CodeError(f"the code raised E: {EVIL}\n\tline {EVIL}"), META)
    for outcome in (result, failure):
        with pytest.raises(AttributeError) as missing:
            _ = outcome.gain
        shown = f"{outcome!r} {outcome} {[outcome]} {missing.value}"
        assert shown == escape_text(shown, keep="\n\t")


def test_pickle_copy_and_json_keep_results_and_failures() -> None:
    for outcome in (RESULT, FAILURE):
        written = json.loads(json.dumps(outcome_to_json(outcome), allow_nan=False))
        for again in (pickle.loads(pickle.dumps(outcome)), copy.copy(outcome), outcome_from_json(written)):
            assert again.meta == META
            if isinstance(outcome, Result):
                assert again == outcome
            else:
                assert isinstance(again.error, CodeError)
                assert (str(again.error), again.error.line) == (str(outcome.error), 3)
    assert Result({"x": 1}, META) != Result({"x": 2}, META)
    assert Result({"x": 1}, META) != Result({"x": 1}, Meta())
    assert Result({}, Meta())  # a result without fields is true
    assert repr(FAILURE) == "Failure(CodeError: the code raised ValueError: bad)"
