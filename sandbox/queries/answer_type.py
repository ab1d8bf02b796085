"""The type of a recursive model's answer: a Python type or a JSON schema."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from ..errors import ConfigurationError
from ..model_reply import read_value

MAX_NUMBER_CHARACTERS = 1000  # longest number that keeps all digits
MAX_PROBLEM_CHARACTERS = 500  # longest text of problems that the model reads
TEXT = {"type": "string"}  # schema of a text
EXAMPLES = "use a type such as int, list[str] or a pydantic model, or a JSON schema"


@dataclass(frozen=True, slots=True)
class AnswerType:
    """The type of an answer. Two types are equal if their schemas are."""

    schema: dict[str, Any]  # the type as JSON schema, which parameters and keys have
    _adapter: TypeAdapter[Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def read(cls, source: Any) -> AnswerType:
        """Return the type of a JSON schema, or of a type that pydantic can validate. Raises ConfigurationError."""
        if isinstance(source, AnswerType):
            return source
        if isinstance(source, dict):
            return cls(_check_schema(cast("dict[str, Any]", source)))
        if isinstance(source, str) or inspect.isroutine(source):
            raise _make_error(source, f"a {type(source).__name__} and not a type")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(source)
            schema = adapter.json_schema()
        except (PydanticUserError, TypeError, ValueError) as error:
            raise _make_error(source, f"not a type whose values are JSON ({str(error).splitlines()[0]})") from None
        return cls(schema, adapter)

    def describe(self) -> str:
        """Return the type in words for the model."""
        return f"JSON that matches this schema: {json.dumps(self.schema, ensure_ascii=False)}"

    def validate(self, value: Any) -> Any:
        """Convert a JSON value to the type, for example to an instance of a class. With a schema it stays JSON.

        If the type has no texts, a text is read as JSON or as a Python literal, as in DSPy. Unlike DSPy, this does not
        repair JSON. Only a type converts numbers.

        Raises:
            ValueError: The value does not have the type. The message is one line.
        """
        if self.schema == TEXT:
            return str(value)
        first_reading, *others = self._list_readings(value)
        try:
            return self._validate(first_reading)
        except ValueError as error:
            for reading in others:
                with suppress(ValueError):
                    return self._validate(reading)
            raise error from None

    def restore(self, value: Any) -> Any:
        """Convert the JSON of `to_jsonable` back to the type. Return the JSON unchanged if the type cannot read it.

        A type that leaves fields out, or whose validators change values again, cannot read its own JSON. The answer was
        paid for, so its JSON is better than an error.
        """
        if self._adapter is None:
            return value
        try:
            restored = self._adapter.validate_python(value)
            return restored if self.to_jsonable(restored) == value else value
        except Exception:  # noqa: BLE001 - validators of the caller raise anything
            return value

    def to_jsonable(self, value: Any) -> Any:
        """Return a validated value as JSON. Raises ValueError if JSON cannot hold it."""
        if self._adapter is None:
            return value
        try:
            return self._adapter.dump_python(value, mode="json", by_alias=True, round_trip=True)
        except PydanticSerializationError as error:
            raise ValueError(str(error)) from None

    def _list_readings(self, value: Any) -> list[Any]:
        """Return the values that a submitted value can mean, the likeliest first."""
        if not isinstance(value, str):
            return [value]
        text = read_value(value)
        if self._allows_text(value):  # "None", "42" or "1e5" is a text here.
            return [value, text]
        for read in (partial(json.loads, parse_float=_read_float), ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                return [read(text), value]
        return [value, text]

    def _allows_text(self, text: str) -> bool:
        """Return True if the type has texts beside other values, such as `str | int`, or names this text."""
        if text in self.schema.get("enum", ()):
            return True
        types = self.schema.get("type")
        if isinstance(types, list) and "string" in types:
            return True
        options: list[Any] = [*self.schema.get("anyOf", ()), *self.schema.get("oneOf", ())]
        return any(isinstance(option, dict) and option.get("type") == "string" for option in options)  # type: ignore[reportUnknownMemberType]

    def _validate(self, value: Any) -> Any:
        """Convert one reading of a value to the type. Raises ValueError with one line."""
        if self._adapter is not None:
            try:
                return self._adapter.validate_python(value)
            except ValidationError as error:
                problems = [_describe_problem(problem["loc"], problem["msg"]) for problem in error.errors()]
                raise ValueError("; ".join(problems)[:MAX_PROBLEM_CHARACTERS]) from None
            except Exception as error:  # noqa: BLE001 - validators of the caller raise anything
                raise ValueError(f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]) from None
        from referencing.exceptions import Unresolvable

        try:
            for problem in _make_validator(self.schema).iter_errors(value):  # The first problem is enough.
                raise ValueError(_describe_problem(problem.absolute_path, problem.message)[:MAX_PROBLEM_CHARACTERS])
        except Unresolvable as error:
            raise _make_error(self.schema, f"not a usable JSON schema ({error})") from None
        return json.loads(json.dumps(value, default=float))  # A Decimal becomes a float.


def _read_float(text: str) -> float | Decimal:
    """Return a number of JSON, as a Decimal if a float does not hold all of its digits."""
    number = float(text)
    has_exponent = "e" in text.lower()  # Arithmetic with a Decimal of a great exponent could take all memory.
    if has_exponent or len(text) > MAX_NUMBER_CHARACTERS or Decimal(text) == Decimal(repr(number)):
        return number
    return Decimal(text)


def _make_error(source: Any, problem: str) -> ConfigurationError:
    shown = source if isinstance(source, str) else getattr(source, "__name__", None) or repr(source)
    return ConfigurationError(f"`output_type` is {shown[:200]!s}, {problem}: {EXAMPLES}")


def _describe_problem(location: Iterable[Any], problem: str) -> str:
    path = "".join(f"[{step!r}]" for step in location)
    return f"at {path}: {problem}" if path else problem


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Validate and return a JSON schema. Raises ConfigurationError."""
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable

    try:
        json.dumps(schema)
        validator = _make_validator(schema)
        validator.check_schema(schema)
        validator.is_valid(None)  # RecursionError for a schema that refers to itself without end
    except SchemaError as error:
        problem = _describe_problem(error.absolute_path, error.message)
        raise _make_error(schema, f"not a JSON schema ({problem})") from None
    except (Unresolvable, TypeError, ValueError, RecursionError) as error:
        raise _make_error(schema, f"not a usable JSON schema ({error})") from None
    return schema


def _make_validator(schema: dict[str, Any]) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    # An empty registry: by default, jsonschema would fetch references to other documents.
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
