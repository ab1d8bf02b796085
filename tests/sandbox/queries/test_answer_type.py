"""Types of answers: how they are described and read, and which values they take."""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from dspy.adapters.utils import parse_value
from pydantic import AfterValidator, BaseModel

from rlm_batch import ConfigurationError
from rlm_batch.sandbox.queries.answer_type import AnswerType


class Place(BaseModel):
    name: str
    size: int
    within: "Place | None" = None


@dataclass
class Visit:
    day: date
    hours: float


TYPES: list[Any] = [
    *(int, float, bool, str, list, dict, Any, list[str], list[int], dict[str, float], tuple[int, str], Place),
    *(list[Place], int | None, str | None, int | str, Literal["yes", "no"]),
]
VALUES: list[Any] = [
    *("42", 42, 42.0, 42.5, "42.5", "true", True, "True", "yes", '"yes"', 0, 1, None, "hello", "", [1, 2], ["1", "2"]),
    *("[1, 2]", "['a', 'b']", '["a"]', {"1": 2}, '{"a": 1}', {"name": "x", "size": "3"}, '{"name": "x", "size": 3}'),
    *([{"name": "x", "size": 3}], [1, "a"], "nan", 1e3, "1e3", "```json\n[1]\n```"),
]


def read(kind: Any, value: Any) -> Any:
    """Return the value, or "refused"."""
    try:
        return AnswerType.read(kind).validate(value)
    except ValueError:
        return "refused"


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_values_are_converted_as_dspy_converts_them(kind: Any) -> None:
    for value in VALUES:
        try:
            expected = parse_value(value, kind)
        except ValueError:  # pydantic's error is one
            expected = "refused"
        ours = read(kind, value)
        # DSPy reads a text as JSON, even if the type has texts.
        if kind == int | str and isinstance(value, str):
            expected = value
        if kind is Any and value == "```json\n[1]\n```":
            expected = [1]
        assert (type(ours), repr(ours)) == (type(expected), repr(expected)), value


NUMBERS = ["1234e5", "12345678901234567.89", "007", "1_000", "NaN", "true", "null", "1e5", "42", "9007199254740993"]


@pytest.mark.parametrize(
    "kind",
    [int | str, str | float, str | bool, str | int | None, str | list[int], Literal["a", 1] | str, date | str,
     {"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"type": ["integer", "string"]}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("text", [*NUMBERS, "[1, 2]", '"a"'])
def test_a_text_stays_a_text_where_the_type_has_texts(kind: Any, text: str) -> None:
    assert read(kind, text) == text
    assert read({"type": "array", "items": AnswerType.read(kind).schema}, [text]) == [text]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Decimal, "12345678901234567.89", Decimal("12345678901234567.89")),
        (
            list[Decimal],
            "[12345678901234567.89, 0.1, 5]",
            [Decimal("12345678901234567.89"), Decimal("0.1"), Decimal(5)],
        ),
        (list[Decimal], ["12345678901234567.89"], [Decimal("12345678901234567.89")]),
        (int, "12345678901234567.89", "refused"),
        ({"type": "integer"}, "12345678901234567.89", "refused"),
        (int, "1e3", 1000),
        (float | int, "9007199254740993", 9007199254740993),
        (list[float], "[0.12345678901234567890123]", [0.12345678901234568]),
        (Literal["1", 1], "1", "1"),
        (date, "2026-01-02", date(2026, 1, 2)),
    ],
)
def test_a_number_keeps_the_digits_that_were_submitted(kind: Any, text: Any, value: Any) -> None:
    assert (type(read(kind, text)), read(kind, text)) == (type(value), value)


@pytest.mark.parametrize(
    ("kind", "submitted", "value"),
    [
        (Visit, {"day": "2026-01-02", "hours": 3}, Visit(date(2026, 1, 2), 3.0)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (set[int], [1, 1], {1}),
    ],
)
def test_a_value_goes_through_json_and_back(kind: Any, submitted: Any, value: Any) -> None:
    answer_type = AnswerType.read(kind)
    assert answer_type.validate(submitted) == value
    sent = answer_type.to_jsonable(value)
    assert AnswerType.read(answer_type.schema).validate(sent) is not None
    assert answer_type.validate(sent) == value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__import__('os').abort()", "a str and not a type"),
        (print, "a builtin_function_or_method and not a type"),
        (5, "not a type whose values are JSON"),
        (object(), "not a type whose values are JSON"),
        ({"type": "nothing"}, r"not a JSON schema \(at \['type'\]"),
        ({"$ref": "#"}, "not a usable JSON schema"),
        ({"$ref": "#/$defs/gone"}, "does not exist within"),
        ({"$ref": "http://127.0.0.1:1/x"}, "not a usable JSON schema"),
        ({"default": {1, 2}}, "not a usable JSON schema"),
    ],
)
def test_what_is_not_a_type_is_refused_with_one_sentence(source: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        AnswerType.read(source)
    assert "use a type such as int, list[str]" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_reference_to_another_document_is_not_read() -> None:
    with pytest.raises(ConfigurationError, match="not a usable JSON schema"):
        AnswerType.read({"properties": {"a": {"$ref": "file:///etc/passwd"}}}).validate({"a": 1})


def test_a_problem_names_the_place_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^at \[1\]\['size'\]: Field required$"):
        AnswerType.read(list[Place]).validate([{"name": "x", "size": 1}, {"name": "y"}])
    with pytest.raises(ValueError, match=r"^at \['a'\]: 'x' is not of type 'integer'$"):
        AnswerType.read({"properties": {"a": {"type": "integer"}}}).validate({"a": "x"})


def test_an_answer_that_its_type_cannot_read_again_stays_json() -> None:
    doubled = AnswerType.read(Annotated[int, AfterValidator(lambda value: value * 2)])
    assert doubled.restore(doubled.to_jsonable(doubled.validate(3))) == 6

    def refuse(_value: Any) -> Any:
        raise RuntimeError("boom")

    with pytest.raises(ValueError, match="RuntimeError: boom"):
        AnswerType.read(Annotated[int, AfterValidator(refuse)]).validate(3)
