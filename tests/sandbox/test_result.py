"""A result's fields are items and attributes, and what is not there is said so in a way that helps."""

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


def test_fields_are_items_and_attributes() -> None:
    assert RESULT.loss == RESULT["loss"] == 0.5
    assert RESULT.keys == [3]
    assert "loss" in RESULT
    assert "gain" not in RESULT
    assert (len(RESULT), list(RESULT)) == (4, ["loss", "outputs", "meta", "keys"])


def test_only_outputs_and_meta_are_taken() -> None:
    assert RESULT.outputs is not RESULT["outputs"]
    assert RESULT["outputs"] == 1
    assert RESULT["meta"] == 2
    assert RESULT.meta is META


def test_a_field_that_is_not_there_says_which_are() -> None:
    with pytest.raises(AttributeError, match="no field 'gain': the code submitted loss, outputs, meta, keys"):
        _ = RESULT.gain
    with pytest.raises(KeyError, match="no field 'gain': the code submitted loss"):
        _ = RESULT["gain"]


def test_a_result_without_fields_says_whether_submit_was_called() -> None:
    with pytest.raises(AttributeError, match="the code ended without calling SUBMIT"):
        _ = Result({}, Meta()).loss
    with pytest.raises(AttributeError, match="SUBMIT was called without any"):
        _ = Result({}, Meta(submitted=True)).loss
    with pytest.raises(KeyError, match="without calling SUBMIT"):
        _ = Result({}, Meta())["loss"]


def test_a_result_without_fields_is_true() -> None:
    assert Result({}, Meta())


def test_questions_about_attributes_are_answered() -> None:
    assert hasattr(RESULT, "loss")
    assert not hasattr(RESULT, "gain")
    assert getattr(RESULT, "gain", None) is None
    assert not hasattr(RESULT, "__array__")


def test_a_result_prints_its_fields() -> None:
    assert repr(Result({"loss": 0.5, "name": "x"}, META)) == "Result(loss=0.5, name='x')"
    assert repr(Result({}, META)) == "Result()"


EVIL = "\x1b]0;owned\x07\x9b2J\x7f\u202e\u2028\r"


def is_safe(text: str) -> bool:
    return text == escape_text(text, keep="\n\t")


def test_what_code_chose_does_not_reach_a_terminal_as_a_command() -> None:
    result = Result({EVIL: {EVIL: [EVIL]}, "x": EVIL}, Meta(submitted=True))
    assert is_safe(repr(result))
    assert is_safe(str([result]))
    with pytest.raises(AttributeError) as missing:
        _ = result.gain
    assert is_safe(str(missing.value))
    failed = Failure(CodeError(f"the code raised E: {EVIL}\n\tline {EVIL}"), META)
    assert is_safe(f"{failed!r} {failed}")
    with pytest.raises(AttributeError) as missing:
        _ = failed.gain
    assert is_safe(str(missing.value))


def test_results_with_the_same_content_are_equal() -> None:
    assert Result({"x": 1}, META) == Result({"x": 1}, META)
    assert Result({"x": 1}, META) != Result({"x": 2}, META)
    assert Result({"x": 1}, META) != Result({"x": 1}, Meta())
    assert Result({"x": 1}, META) != {"x": 1}


def test_pickling_and_copying_keep_everything() -> None:
    for again in (pickle.loads(pickle.dumps(RESULT)), copy.copy(RESULT), copy.deepcopy(RESULT)):
        assert again == RESULT
        assert again.meta == META


def test_json_keeps_everything() -> None:
    again = outcome_from_json(json.loads(json.dumps(outcome_to_json(RESULT), allow_nan=False)))
    assert again == RESULT


def failure() -> Failure:
    return Failure(CodeError("the code raised ValueError: bad\nTraceback", type="ValueError", line=3), META)


def test_a_failure_stands_in_the_place_of_a_result_and_says_why() -> None:
    assert failure().meta is META
    with pytest.raises(AttributeError, match="no field 'loss': this execution failed: the code raised ValueError: bad"):
        _ = failure().loss
    with pytest.raises(KeyError, match="this execution failed"):
        _ = failure()["loss"]
    assert repr(failure()) == "Failure(CodeError: the code raised ValueError: bad)"


def test_a_failure_survives_pickling_copying_and_json() -> None:
    written = json.loads(json.dumps(outcome_to_json(failure())))
    for again in (pickle.loads(pickle.dumps(failure())), copy.deepcopy(failure()), outcome_from_json(written)):
        assert isinstance(again, Failure)
        assert again.meta == META
        assert isinstance(again.error, CodeError)
        assert (str(again.error), again.error.type, again.error.line) == (str(failure().error), "ValueError", 3)


def test_what_a_later_version_writes_is_read() -> None:
    data = outcome_to_json(RESULT)
    data["meta"] = {**data["meta"], "moons": 3}
    assert outcome_from_json(data) == RESULT
    del data["meta"]["stderr"], data["meta"]["layers"]
    again = outcome_from_json(data)
    assert (again.meta.stderr, again.meta.layers) == ("", ())
