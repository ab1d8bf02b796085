"""The type of a recursive model's answer: a Python type, a JSON schema, or a text such as "list[str]"."""

from __future__ import annotations

import ast
import inspect
import json
import types
import typing
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Literal, Union, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from ..caller import name_parameter
from ..errors import ConfigurationError
from ..model_reply import read_value
from ..requests.json_text import JSON

MAX_TEXT_CHARACTERS = 1000  # of a type's text
MAX_NUMBER_CHARACTERS = 1000  # longest number that keeps all digits
MAX_PROBLEM_CHARACTERS = 500  # of the problems that the model reads
NAMED_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, list, dict, tuple, set)},
    "Any": Any,
    "List": list,
    "Dict": dict,
    "Tuple": tuple,
    "Set": set,
    "None": None,
}
GENERICS = {list: 1, dict: 2, tuple: None, set: 1}  # numbers of their arguments
SCALARS = {"integer": TypeAdapter(int), "number": TypeAdapter(float), "boolean": TypeAdapter(bool)}
EXAMPLES = 'use a type such as int, "list[str]" or a pydantic model, or a JSON schema'


@dataclass(frozen=True, slots=True)
class AnswerType:
    """The type of an answer. Two types are equal if their JSON forms are.

    Attributes:
        text: The type as Python text, such as "list[str]"; "" if only the schema describes it.
        schema: The type as JSON schema.
    """

    text: str
    schema: dict[str, Any]
    _adapter: TypeAdapter[Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def read(cls, source: Any) -> AnswerType:
        """Return the type that a parameter names.

        Args:
            source: A type that pydantic can validate, a JSON schema as a dict or as text, or the text of a type made of
                builtins, such as "dict[str, list[int]]" or "Literal['yes', 'no']".

        Raises:
            ConfigurationError: It is none of them.
        """
        if isinstance(source, AnswerType):
            return source
        if isinstance(source, str):
            text = source.strip()
            if not text.startswith("{"):
                return cls._from_type(_read_type(text))
            try:
                source = JSON.decode(text)
            except ValueError as error:
                raise _make_error(text, f"not a JSON schema ({error})") from None
        if isinstance(source, dict):
            return cls("", _check_schema(cast("dict[str, Any]", source)))
        return cls._from_type(source)

    @classmethod
    def _from_type(cls, source: Any) -> AnswerType:
        if inspect.isroutine(source):
            raise _make_error(source, "a function and not a type")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(source)
            schema = adapter.json_schema()
        except (PydanticUserError, TypeError, ValueError) as error:
            raise _make_error(source, f"not a type whose values are JSON ({str(error).splitlines()[0]})") from None
        return cls(_write_type(source) or "", schema, adapter)

    def to_json(self) -> str | dict[str, Any]:
        """Return the type as JSON, for parameters and keys. `read` takes it, but a class is then only its schema."""
        return self.text or self.schema

    def describe(self) -> str:
        """Return the type in words for the model."""
        return self.text or f"JSON that matches this schema: {json.dumps(self.schema, ensure_ascii=False)}"

    def validate(self, value: Any) -> Any:
        """Return the value as the type has it, such as an instance of a class. A schema's values stay JSON.

        Like DSPy, it reads a text as JSON or as a Python literal if the type is no text, and converts numbers. Unlike
        DSPy, it does not repair JSON.

        Args:
            value: A JSON value.

        Raises:
            ValueError: The value does not have the type. The message has one line.
        """
        if self.text == "str":
            return str(value)
        problem = ""
        for reading in self._list_readings(value):
            try:
                return self._validate(reading)
            except ValueError as error:
                problem = problem or str(error)
        raise ValueError(problem)

    def restore(self, value: Any) -> Any:
        """Return a value of the type from the JSON of `to_jsonable`, or the JSON if the type cannot read it.

        A type cannot read its own JSON if it leaves fields out, or if its validators change values that they made. The
        answer was paid for, so its JSON is better than an error.
        """
        if self._adapter is None:
            return value
        try:
            restored = self._adapter.validate_python(value)
            return restored if self.to_jsonable(restored) == value else value
        except Exception:  # noqa: BLE001 - validators of the caller raise anything
            return value

    def to_jsonable(self, value: Any) -> Any:
        """Return a validated value as JSON that `validate` takes. Raises ValueError if JSON cannot hold it."""
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
        if self._has_text_option(value):  # "None", "42" or "1e5" is a text here.
            return [value, text]
        for read in (partial(json.loads, parse_float=_read_float), ast.literal_eval):
            try:
                return [read(text), value]
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
        return [value, text]

    def _has_text_option(self, text: str) -> bool:
        """Return whether the type has texts beside other values, such as `str | int`, or names this text."""
        kinds: list[Any] = [option.get("type") for option in _list_options(self.schema)]
        kinds += self.schema["type"] if isinstance(self.schema.get("type"), list) else []
        return "string" in kinds or text in self.schema.get("enum", ())

    def _validate(self, value: Any) -> Any:
        if self._adapter is not None:
            try:
                return self._adapter.validate_python(value)
            except ValidationError as error:
                problems = [_describe_problem(problem["loc"], problem["msg"]) for problem in error.errors()]
                raise ValueError("; ".join(problems)[:MAX_PROBLEM_CHARACTERS]) from None
            except Exception as error:  # noqa: BLE001 - validators of the caller raise anything
                raise ValueError(f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]) from None
        validator = _make_validator(self.schema)
        value = _coerce(value, self.schema, validator)
        problem = next(validator.iter_errors(value), None)
        if problem is not None:
            raise ValueError(_describe_problem(problem.absolute_path, problem.message)[:MAX_PROBLEM_CHARACTERS])
        return value


def _list_options(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a union's schema."""
    return [option for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())) if isinstance(option, dict)]


def _read_float(text: str) -> float | Decimal:
    """Return a number of JSON, as a Decimal if a float does not hold all of its digits."""
    number = float(text)
    # Arithmetic with a Decimal of a great exponent could take all memory.
    is_short = len(text) <= MAX_NUMBER_CHARACTERS and "e" not in text.lower()
    return Decimal(text) if is_short and Decimal(text) != Decimal(repr(number)) else number


def _make_error(source: Any, problem: str) -> ConfigurationError:
    shown = source if isinstance(source, str) else getattr(source, "__name__", None) or repr(source)
    return ConfigurationError(f"{name_parameter('output_type')} is {shown[:200]!s}, {problem}: {EXAMPLES}")


def _describe_problem(place: Any, problem: str) -> str:
    path = "".join(f"[{step!r}]" for step in place)
    return f"at {path}: {problem}" if path else problem


def _read_type(text: str) -> Any:
    """Return the type that a text names. It knows only the names of builtins. Raises ConfigurationError."""

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in NAMED_TYPES:
                return NAMED_TYPES[name]
            case ast.Constant(value=None):
                return None
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return Union[read(left), read(right)]  # noqa: UP007  # `None | None` is no type.
            case ast.Subscript(value=ast.Name(id=name), slice=part):
                parts = part.elts if isinstance(part, ast.Tuple) else [part]
                if name == "Literal":
                    return Literal[tuple(ast.literal_eval(item) for item in parts)]
                if name == "Optional" and len(parts) == 1:
                    return Union[read(parts[0]), None]  # noqa: UP007
                if name == "Union":
                    return Union[tuple(read(item) for item in parts)]  # noqa: UP007
                generic: Any = NAMED_TYPES.get(name)
                if generic in GENERICS and GENERICS[generic] in (None, len(parts)):
                    is_open = generic is tuple and len(parts) == 2 and ast.unparse(parts[1]) == "..."
                    arguments = [read(item) for item in (parts[:1] if is_open else parts)]
                    return types.GenericAlias(generic, (*arguments, *([...] if is_open else [])))
            case _:
                pass
        raise ValueError(f"{ast.unparse(node)} is not a type of builtins")

    try:
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError(f"longer than {MAX_TEXT_CHARACTERS:,} characters")
        return read(ast.parse(text, mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise _make_error(text, str(error) or "nested too deeply") from None


def _write_type(source: Any) -> str | None:
    """Return the text of a type that `_read_type` reads, or None if a part of it is none of builtins."""
    origin, arguments = typing.get_origin(source), typing.get_args(source)
    if origin is None:
        names = (name for name, kind in NAMED_TYPES.items() if kind is source)
        return "None" if source is type(None) else next(names, None)
    if origin is Literal:
        is_plain = all(type(item) in (str, int, bool, type(None)) for item in arguments)
        return f"Literal[{', '.join(map(repr, arguments))}]" if is_plain else None
    texts = ["..." if part is ... else _write_type(part) for part in arguments]
    if None in texts:
        return None
    if origin in (Union, types.UnionType):
        return " | ".join(cast("list[str]", texts))
    return f"{origin.__name__}[{', '.join(cast('list[str]', texts))}]" if origin in GENERICS else None


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Validate and return a JSON schema. Raises ConfigurationError."""
    from jsonschema.exceptions import SchemaError

    try:
        json.dumps(schema)
        validator = _make_validator(schema)
        validator.check_schema(schema)
        _check_references(schema, schema)
        validator.is_valid(None)  # RecursionError for a schema that refers to itself without end
    except SchemaError as error:
        raise _make_error(
            schema, f"not a JSON schema ({_describe_problem(error.absolute_path, error.message)})"
        ) from None
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise _make_error(schema, f"not a usable JSON schema ({error})") from None
    return schema


def _make_validator(schema: dict[str, Any]) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    # A registry of one's own: by default, jsonschema would fetch references to other documents.
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def _check_references(part: Any, root: dict[str, Any]) -> None:
    """Raise LookupError or ValueError if a part of the schema refers to a missing part or to another document."""
    children: Any = cast("Any", part) if isinstance(part, list) else ()
    if isinstance(part, dict):
        rules = cast("dict[str, Any]", part)
        children = rules.values()
        if isinstance(reference := rules.get("$ref"), str):
            _resolve(reference, root)
    for child in children:
        _check_references(child, root)


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"the reference {reference} is not of the form #/$defs/NAME")
    part: Any = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or key not in part:
            raise LookupError(f"the reference {reference} leads nowhere")
        part = cast("dict[str, Any]", part)[key]
    return part


def _coerce(value: Any, schema: Any, validator: Any) -> Any:
    """Return the value with its numbers and bools converted as pydantic converts them for a type of this schema.

    `validator` has the whole schema, which a part can refer to.
    """
    if not isinstance(schema, dict):
        return value
    rules = cast("dict[str, Any]", schema)
    if "$ref" in rules:
        return _coerce(value, _resolve(rules["$ref"], validator.schema), validator)
    # A text stays a text if an option takes it.
    for option in sorted(_list_options(rules), key=lambda option: option.get("type") != "string"):
        coerced = _coerce(value, option, validator)
        if validator.evolve(schema=option).is_valid(coerced):
            return coerced
    if isinstance(value, dict):
        fields, others = rules.get("properties", {}), rules.get("additionalProperties")
        items = cast("dict[str, Any]", value).items()
        return {name: _coerce(item, fields.get(name, others), validator) for name, item in items}
    if isinstance(value, list):
        first = rules.get("prefixItems", [])
        return [
            _coerce(item, first[place] if place < len(first) else rules.get("items"), validator)
            for place, item in enumerate(cast("list[Any]", value))
        ]
    kind = rules.get("type")
    if isinstance(kind, str) and kind in SCALARS:
        try:
            return SCALARS[kind].validate_python(value)
        except ValidationError:
            pass
    return value
