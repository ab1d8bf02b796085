"""Remedies for values that JSON cannot hold: expressions that convert them, tried before a message advises one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MAX_TRIED_ITEMS = 10_000  # longer values are tried only with their first items
MODULES = ("json", "dataclasses", "attrs", "msgspec")  # modules in the expressions
MISSING = ("NAType", "NaTType", "MaskedConstant")  # types of missing values in pandas and numpy
AS_TEXTS = "json.loads(json.dumps(?, default=str))"  # converts each item that is not JSON to text
LISTED = "[str(item) for item in ?]"
BYTES_FUNCTIONS = ("bytes.decode", "bytes.hex")  # used for bytes, because `str` would return "b'...'"


def find_remedy(value: Any, place: str, check: Callable[[Any], Any]) -> str | None:
    """Return the first expression over `place` that converts the value to JSON, or None if none works.

    Args:
        value: The value that JSON cannot hold.
        place: The value's name in messages, such as `loss['a'][1]`.
        check: Function that raises if the converted value is not acceptable, for example not JSON.
    """
    try:
        # Do not try these: an iterator can be used only once, and a query may take long.
        if hasattr(value, "__next__"):
            return f"list({place})"
        if hasattr(value, "explain") and hasattr(value, "collect"):  # Polars' LazyFrame
            return AS_TEXTS.replace("?", f"{place}.collect().to_dict(as_series=False)")
        sample = _take_beginning(value)
        for template in _list_templates(value):
            for variant in dict.fromkeys(_replace_str(template, name) for name in ("str", *BYTES_FUNCTIONS)):
                if _works(variant, sample, check):
                    return variant.replace("?", place)
    except Exception:  # noqa: BLE001 - methods of the value's class may raise anything
        pass
    return None


def _take_beginning(value: Any) -> Any:
    try:
        return value[:MAX_TRIED_ITEMS] if len(value) > MAX_TRIED_ITEMS else value
    except Exception:  # noqa: BLE001 - the value has no length or slices, or they fail
        return value


def _replace_str(template: str, function: str) -> str:
    """Return the template with another function in place of `str`."""
    for use in ("{}(item)", "{}(key)", "default={}", "map({}, row)"):
        template = template.replace(use.format("str"), use.format(function))
    return template


def _write_text(item: Any) -> str:
    if isinstance(item, bytes):
        raise TypeError("str() makes no text of bytes")
    return str(item)


def _works(template: str, value: Any, check: Callable[[Any], Any]) -> bool:
    try:
        names = {"value": value, "write_text": _write_text}
        for module in MODULES:
            if f"{module}." in template:
                names[module] = __import__(module)
        check(eval(_replace_str(template, "write_text").replace("?", "value"), names))
    except Exception:  # noqa: BLE001 - the expression does not work
        return False
    return True


def _list_templates(value: Any) -> Iterator[str]:
    """Yield the expressions to try, in order of the information that they lose. `?` marks the value."""
    if isinstance(value, type):
        return
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        texts = "{str(key): item for key, item in ?.items()}" if _are_distinct(value) else "list(?.items())"  # type: ignore[reportUnknownArgumentType]
        yield texts
        yield AS_TEXTS.replace("?", texts)
    if kind.__name__ in MISSING:
        yield "None"
    if hasattr(kind, "to_dict"):
        yield from _list_table_templates(value)
    if hasattr(kind, "tolist"):
        yield from _list_array_templates(value)
    names: Any = getattr(value, "column_names", ())  # type: ignore[reportUnknownArgumentType]
    if hasattr(kind, "to_pydict") and not _are_distinct(names):  # a dict would keep only the last column of each name
        columns = "[[name, column.to_pylist()] for name, column in zip(?.column_names, ?.columns)]"
        yield columns
        yield AS_TEXTS.replace("?", columns)
        return
    for attribute, template in _BY_ATTRIBUTE.items():
        if hasattr(kind, attribute):
            yield template
            yield AS_TEXTS.replace("?", template)
    if isinstance(value, complex):
        yield "[?.real, ?.imag]"
    if isinstance(value, (set, frozenset)):
        yield "sorted(?)"
    if hasattr(kind, "keys"):
        yield "dict(?)"
        yield AS_TEXTS.replace("?", "dict(?)")
        yield "list(?.items())"
    elif isinstance(value, str):
        yield "[?]"
    elif hasattr(kind, "__iter__") and hasattr(kind, "__len__"):
        if _finds_by_items(value):
            return
        yield "list(?)"
        yield LISTED
    if kind.__str__ is not object.__str__:
        yield "str(?) or float(?)" if hasattr(kind, "as_integer_ratio") else "str(?)"
    if getattr(value, "__dict__", None):  # type: ignore[reportUnknownArgumentType]
        yield "vars(?)"
    yield from _list_shape_templates(value)


# Attributes of classes in the standard library and well-known packages, and expressions that convert their values.
_BY_ATTRIBUTE = {
    "__members__": "?.value",  # an enumeration
    "__dataclass_fields__": "dataclasses.asdict(?)",
    "__attrs_attrs__": "attrs.asdict(?)",
    "__struct_fields__": "msgspec.to_builtins(?)",
    "model_dump": "?.model_dump(mode='json')",  # pydantic
    "to_dense": "?.to_dense().tolist()",  # sparse tensors of PyTorch
    "toarray": "?.toarray().tolist()",  # sparse arrays of SciPy
    "todense": "?.todense().tolist()",
    "numpy": "?.numpy().tolist()",  # TensorFlow
    "to_list": "?.to_list()",  # Polars
    "to_pydict": "?.to_pydict()",  # PyArrow
    "to_pylist": "?.to_pylist()",
    "as_py": "?.as_py()",
    "isoformat": "?.isoformat()",
    "total_seconds": "?.total_seconds()",
    "decode": "?.decode()",
    "hex": "?.hex()",
}


def _list_shape_templates(value: Any) -> Iterator[str]:
    """Yield expressions that give a number, a list or a list of dicts, in case `check` requires such a value."""
    dtype: Any = getattr(value, "dtype", None)
    if getattr(dtype, "names", None):
        if not _has_dates(dtype):  # `tolist` converts some dates to numbers
            yield "[dict(zip(?.dtype.names, row)) for row in ?.tolist()]"
        yield "[dict(zip(?.dtype.names, map(str, row))) for row in ?]"
    elif hasattr(value, "as_integer_ratio"):
        yield "float(?)"
    if isinstance(value, dict):
        if all(isinstance(column, (list, tuple)) for column in value.values()):  # type: ignore[reportUnknownVariableType]
            yield "[dict(zip(?, row)) for row in zip(*?.values())]"
    elif isinstance(value, (int, float)):
        yield "[?]"
    else:
        yield "[row._asdict() for row in ?]"
        yield "[row.to_dict() for _, row in ?]"
        yield "[{'x': item} for item in ?]"


def _list_table_templates(value: Any) -> Iterator[str]:
    """Yield expressions for data frames, a Series with an index, and other classes with `to_dict`."""
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    index = getattr(value, "index", None)
    is_plain = index is None or callable(index) or is_default_index(index)
    tables = ["?.to_dict()"]
    if hasattr(kind, "tolist"):
        if is_plain:
            return
        if getattr(index, "is_unique", False):
            yield "?.to_dict()"
        tables = ["?.reset_index(name='value').to_dict('list')"]
    elif hasattr(value, "columns") and not _are_distinct(value.columns):
        tables = []
    elif hasattr(value, "columns"):
        table = "?" if is_plain else "?.reset_index()"
        calls = ("to_dict('list')", "to_dict('records')", "to_dict(as_series=False)", "to_dicts()")
        tables = [f"{table}.{call}" for call in calls]
    yield from tables
    for template in tables:
        yield AS_TEXTS.replace("?", template)
    if hasattr(kind, "to_csv"):
        yield "?.to_csv()"


def _list_array_templates(value: Any) -> Iterator[str]:
    """Yield expressions for arrays and their items."""
    dtype: Any = getattr(value, "dtype", None)
    letter = getattr(dtype, "kind", "")
    dimensions = getattr(value, "ndim", 1)
    is_pandas = hasattr(value, "isna")
    is_masked = hasattr(value, "filled")  # `astype` converts masked items to None, `str` to "--"
    texts = ("str(?)", LISTED)[dimensions] if dimensions < 2 and not is_masked else "?.astype(str).tolist()"
    unit = find_unit(value)
    if unit is not None:
        for number in ("?", "?.value", "?.magnitude"):
            yield f"{{'value': {number}.tolist(), 'unit': str(?.{unit})}}"
    if getattr(dtype, "names", None):
        yield "{name: ?[name] for name in ?.dtype.names}"
        texts_of_fields = "?[name].astype(str) if ?[name].dtype.kind in 'mMS' else ?[name]"
        if not any(_has_dates(dtype[name]) for name in dtype.names if dtype[name].base.names):
            yield f"{{name: ({texts_of_fields}).tolist() for name in ?.dtype.names}}"
        yield "{name: [str(item) for item in ?[name]] for name in ?.dtype.names}"
    elif letter in ("m", "M"):
        yield texts
    elif letter == "c":
        yield "[?.real.tolist(), ?.imag.tolist()]"
    elif letter == "S" and dimensions:
        yield "?.astype(str).tolist()"
        yield "[item.hex() for item in ?]"
    else:
        yield "?.tolist()"
        if is_pandas:
            yield "?.to_numpy(object, na_value=None).tolist()"
        if letter == "f":
            yield "?.astype(float).tolist()" if dimensions else "float(?)"
            yield "[item if abs(item) < float('inf') else None for item in ?]"
        if is_pandas and str(dtype) != "object":  # periods, intervals and similar types
            yield texts
        yield AS_TEXTS.replace("?", "?.tolist()")
        if is_pandas:
            yield AS_TEXTS.replace("?", "?.to_numpy(object, na_value=None).tolist()")
    yield texts


def _has_dates(dtype: Any) -> bool:
    """Return True if the type, or one of its fields at any depth, holds dates or durations."""
    return dtype.base.kind in "mM" or any(_has_dates(dtype.base[name]) for name in dtype.base.names or ())


def _are_distinct(names: Any) -> bool:
    """Return True if the names stay distinct as text, like the keys of a JSON object."""
    return len(set(map(str, names))) == len(names)


def _finds_by_items(value: Any) -> bool:
    """Return True if a container maps its items to values, as graphs map nodes. A list would lose these values."""
    try:
        first = next(iter(value))
        value[first]
    except Exception:  # noqa: BLE001 - the container is empty, or its items are not keys
        return False
    try:
        return bool(value[0] != first)
    except Exception:  # noqa: BLE001 - the container is not a sequence
        return True


def find_unit(array: Any) -> str | None:
    """Return the name of the attribute with the array's unit, or None if it has no unit."""
    for name in ("unit", "units"):
        unit = getattr(array, name, None)
        # Skip functions and methods: they have a `__name__`. Some units are callable, such as magnitudes.
        if unit is None or hasattr(unit, "__name__") or str(unit) in ("", "dimensionless"):
            continue
        # On a Series this attribute may be an item, and on a structured array a field.
        return None if hasattr(array, "isna") or getattr(getattr(array, "dtype", None), "names", None) else name
    return None


def is_default_index(index: Any) -> bool:
    """Return True if this is pandas' default index, which only numbers the items."""
    return getattr(index, "start", None) == 0 and getattr(index, "step", None) == 1
