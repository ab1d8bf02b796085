"""The format of a model's answer, which is a JSON schema or a type. The code gets a value instead of a text."""

# The values are JSON or types of any kind, which only checks at run time can tell apart.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false

from __future__ import annotations

from ...wire.strict_json import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SHOWN_CHARACTERS = 200  # characters of an answer in an error
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_JSON_TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "object": dict,
    "array": list,
}  # fmt: skip
_COMPARISONS = (
    ("minimum", lambda value, bound: value >= bound),
    ("maximum", lambda value, bound: value <= bound),
    ("exclusiveMinimum", lambda value, bound: value > bound),
    ("exclusiveMaximum", lambda value, bound: value < bound),
)


class AnswerFormat:
    """The JSON schema of an answer, and the conversion of an answer's text to a value.

    `schema` describes an object, because model servers take no other schema. Any other answer is
    wrapped in one: `{"value": answer}`.
    """

    def __init__(self, source: Any) -> None:
        """Read a JSON schema as a dict, or a type. Raises TypeError."""
        self._is_schema = isinstance(source, dict)
        self._type = source
        schema = source if self._is_schema else _describe_whole_type(source)
        self._is_wrapped = schema.get("type") != "object"
        # The answer is checked against this schema, in which fields with defaults are optional.
        self._schema = _wrap(schema) if self._is_wrapped else schema
        self.schema: dict[str, Any] = self._schema if self._is_schema else _close(self._schema)

    def read(self, text: str) -> Any:
        """Return the value in an answer's text. Raises ValueError if it does not fit."""
        try:
            return self._read(text)
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"{error}. The answer: {_shorten(text)}"
            raise ValueError(f"the model's answer does not fit response_format: {problem}") from None

    def _read(self, text: str) -> Any:
        try:
            value = loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
        is_wrapped_value = isinstance(value, dict) and value.keys() == {"value"}
        if self._is_wrapped and not is_wrapped_value:
            value = {"value": value}  # Some models leave the object out.
        checks_itself = hasattr(self._type, "model_validate")  # a model of pydantic
        if not checks_itself:
            _check(value, self._schema, self._schema, "it")
        if self._is_wrapped:
            value = value["value"]
        return value if self._is_schema else _build(self._type, value)


def _wrap(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with the field `value`, which fits a schema. Definitions stay at the top."""
    definitions = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
    inner = {keyword: content for keyword, content in schema.items() if keyword not in definitions}
    return {
        "type": "object", "properties": {"value": inner}, "required": ["value"], "additionalProperties": False,
        **definitions,
    }  # fmt: skip


def _describe_whole_type(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type with the definitions that it refers to. Raises TypeError."""
    definitions: dict[str, Any] = {}
    schema = _describe_type(kind, definitions)
    if schema.keys() == {"$ref"}:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return {**schema, "$defs": definitions} if definitions else schema


def _describe_type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a type. Add the schemas of its classes to `definitions`. Raises TypeError."""
    import typing

    if kind is typing.Any:
        return {}
    kind = type(None) if kind is None else kind
    if kind in (list, dict):
        return {"type": "array" if kind is list else "object"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(origin):
        return {"anyOf": [_describe_type(member, definitions) for member in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    is_tuple_of_any_length = origin is tuple and arguments[1:] == (...,)
    if is_tuple_of_any_length or origin in (list, set, frozenset):
        return {"type": "array", "items": _describe_type(arguments[0], definitions)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], definitions)}
    schema = _describe_class(kind, definitions) if isinstance(kind, type) else None
    if schema is None:
        raise TypeError(
            f"response_format cannot be {kind!r}: use a JSON schema, a pydantic model, a dataclass, or a type such as "
            "int or list[str]"
        )
    return schema


def _describe_class(kind: Any, definitions: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of a class, or None for a class of an unknown kind."""
    import dataclasses
    import enum

    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        definitions.update(schema.pop("$defs", {}))
        return schema
    if not dataclasses.is_dataclass(kind) and not _is_typed_dict(kind):
        return None
    class_name: str = kind.__name__  # type: ignore[reportAttributeAccessIssue]
    if class_name not in definitions:
        definitions[class_name] = {}  # The class may contain itself.
        properties: dict[str, Any] = {}
        required: list[str] = []
        for name, (field_type, is_required) in _list_fields(kind).items():
            properties[name] = _describe_type(field_type, definitions)
            if is_required:
                required.append(name)
        definitions[class_name] = {"type": "object", "properties": properties, "required": required}
    return {"$ref": f"#/$defs/{class_name}"}


def _is_typed_dict(kind: type) -> bool:
    return issubclass(kind, dict) and hasattr(kind, "__total__")


def _list_fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the types of the fields of a dataclass or TypedDict by name, and whether they are required."""
    import dataclasses
    import typing

    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return {name: (hint, name in kind.__required_keys__) for name, hint in hints.items()}
    fields: dict[str, tuple[Any, bool]] = {}
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.init:
            fields[field.name] = hints[field.name], not has_default
    return fields


def _is_union(origin: Any) -> bool:
    import types
    import typing

    kinds = [typing.Union, getattr(types, "UnionType", typing.Union)]  # `int | str`, from Python 3.10 on
    return origin in kinds


def _close(schema: Any) -> Any:
    """Return the schema, but each object must have all its fields and no others, as OpenAI's strict mode requires."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _close(value) for name, value in schema.items() if name != "default"}
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, dict):
        closed["properties"] = {name: _close(value) for name, value in properties.items()}
        closed["required"] = list(properties)
        closed.setdefault("additionalProperties", False)
    return closed


def _check(value: Any, schema: Any, root: dict[str, Any], place: str) -> None:
    """Check a JSON value against a schema. Raises ValueError, which calls the value `place`.

    `root` has the definitions. Keywords that do not occur here are ignored.
    """
    if schema is False:
        raise ValueError(f"{place} must not be there")
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        _check(value, _find_definition(schema["$ref"], root), root, place)
    for inner in schema.get("allOf", ()):
        _check(value, inner, root, place)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_fits(value, inner, root) for inner in schema[keyword]):
            raise ValueError(f"{place} is {_show(value)} and fits none of {keyword}")
    if "enum" in schema and not any(_are_equal(value, item) for item in schema["enum"]):
        raise ValueError(f"{place} is {_show(value)} and must be one of {_show(schema['enum'])}")
    if "const" in schema and not _are_equal(value, schema["const"]):
        raise ValueError(f"{place} is {_show(value)} and must be {_show(schema['const'])}")
    types = schema.get("type", [])
    if isinstance(types, str):
        types = [types]
    if types and not any(_has_type(value, name) for name in types):
        raise ValueError(f"{place} is {_show(value)} and must be of the type {' or '.join(types)}")
    if isinstance(value, dict):
        _check_fields(value, schema, root, place)
    elif isinstance(value, list):
        _check_items(value, schema, root, place)
    elif isinstance(value, str):
        _check_length(value, schema, "Length", place)
        if "pattern" in schema:
            import re

            if re.search(schema["pattern"], value) is None:
                raise ValueError(f"{place} is {_show(value)} and must match {schema['pattern']}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        for keyword, holds in _COMPARISONS:
            if keyword in schema and not holds(value, schema[keyword]):
                raise ValueError(f"{place} is {value} and its {keyword} is {schema[keyword]}")


def _check_fields(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], place: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise ValueError(f"{place} has no {name!r}")
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    for name, item in value.items():
        field_schema = properties.get(name, other)
        if field_schema is False:
            raise ValueError(f"{place} has a field {name!r} that the schema does not have")
        _check(item, field_schema, root, f"{place}[{name!r}]")


def _check_items(value: list[Any], schema: dict[str, Any], root: dict[str, Any], place: str) -> None:
    _check_length(value, schema, "Items", place)
    first_schemas = schema.get("prefixItems", ())
    for i, item in enumerate(value):
        item_schema = first_schemas[i] if i < len(first_schemas) else schema.get("items", True)
        _check(item, item_schema, root, f"{place}[{i}]")


def _check_length(value: Any, schema: dict[str, Any], unit: str, place: str) -> None:
    shortest, longest = schema.get(f"min{unit}", 0), schema.get(f"max{unit}", len(value))
    if not shortest <= len(value) <= longest:
        raise ValueError(f"{place} has the length {len(value)}, outside of min{unit} and max{unit}")


def _fits(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    try:
        _check(value, schema, root, "it")
    except ValueError:
        return False
    return True


def _find_definition(reference: str, root: dict[str, Any]) -> Any:
    """Return the part of the schema that a reference like "#/$defs/Point" names. Raises ValueError."""
    part: Any = root
    for name in reference.lstrip("#").split("/")[1:]:
        if not isinstance(part, dict) or name not in part:
            raise ValueError(f"the schema has no {reference}")
        part = part[name]
    return part


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer() and abs(value) < 2**53  # A larger float may have lost digits.
    return isinstance(value, _JSON_TYPES.get(kind, object))


def _are_equal(value: Any, other: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _show(value: Any) -> str:
    return _shorten(repr(value))


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _build(kind: Any, value: Any) -> Any:
    """Convert a JSON value that fits a type's schema to the type. Raises ValueError and TypeError."""
    import enum
    import typing

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(origin):
        for member in arguments:
            definitions: dict[str, Any] = {}
            if _fits(value, _describe_type(member, definitions), {"$defs": definitions}):
                return _build(member, value)
        raise ValueError(f"{_show(value)} fits no type of {kind}")
    if origin in (list, set, frozenset, tuple):
        return origin(_build(arguments[0], item) for item in value)
    if origin is dict:
        return {name: _build(arguments[1], item) for name, item in value.items()}
    if not isinstance(kind, type):
        return value
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)  # type: ignore[reportAttributeAccessIssue]
    if kind in (int, float) or issubclass(kind, enum.Enum):
        return kind(value)
    if _is_typed_dict(kind) or hasattr(kind, "__dataclass_fields__"):
        arguments_by_name: dict[str, Any] = {}
        for name, (field_type, _is_required) in _list_fields(kind).items():
            if name in value:
                arguments_by_name[name] = _build(field_type, value[name])
        return kind(**arguments_by_name)
    return value
