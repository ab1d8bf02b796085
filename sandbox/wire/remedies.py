"""Remedies for values that JSON cannot hold: expressions, each tried on the value before a message advises it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MAX_TRIED_ITEMS = 10_000  # of a longer value only the beginning is tried
MODULES = ("json", "dataclasses", "attrs", "msgspec")  # that expressions use
MISSING = ("NAType", "NaTType", "MaskedConstant")  # pandas' and numpy's words for a value that is not there
AS_TEXTS = "json.loads(json.dumps(?, default=str))"  # a text for each item that is not JSON
LISTED = "[str(item) for item in ?]"


def find_remedy(value: Any, place: str, check: Callable[[Any], Any]) -> str | None:
    """Return the first expression over `place` that makes the value JSON, or None where no conventional one does.

    Args:
        value: What JSON cannot hold.
        place: The value's name in messages, such as `loss['a'][1]`.
        check: Raises an exception unless its argument is what is asked for, such as JSON.
    """
    try:
        # These are not tried: an iterator can be used once, and a query may take long.
        if hasattr(value, "__next__"):
            return f"list({place})"
        if hasattr(value, "explain") and hasattr(value, "collect"):  # Polars' LazyFrame
            return AS_TEXTS.replace("?", f"{place}.collect().to_dict(as_series=False)")
        sample = _take_beginning(value)
        for template in _list_templates(value):
            if _works(template, sample, check):
                return template.replace("?", place)
    except Exception:  # noqa: BLE001 - the value's own class may do anything when it is asked
        pass
    return None


def _take_beginning(value: Any) -> Any:
    try:
        return value[:MAX_TRIED_ITEMS] if len(value) > MAX_TRIED_ITEMS else value
    except Exception:  # noqa: BLE001 - without a length or slices, or with ones that fail
        return value


def _works(template: str, value: Any, check: Callable[[Any], Any]) -> bool:
    try:
        names = {"value": value}
        for module in MODULES:
            if f"{module}." in template:
                names[module] = __import__(module)
        check(eval(template.replace("?", "value"), names))
    except Exception:  # noqa: BLE001 - this one does not work
        return False
    return True


def _list_templates(value: Any) -> Iterator[str]:
    """Yield the expressions to try, the one that keeps most first; `?` is the value."""
    if isinstance(value, type):
        return
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        are_distinct = len(set(map(str, value))) == len(value)  # type: ignore[reportUnknownArgumentType]
        texts = "{str(key): item for key, item in ?.items()}" if are_distinct else "list(?.items())"
        yield texts
        yield AS_TEXTS.replace("?", texts)
    if kind.__name__ in MISSING:
        yield "None"
    if hasattr(kind, "to_dict"):
        yield from _list_table_templates(value)
    if hasattr(kind, "tolist"):
        yield from _list_array_templates(value)
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
    elif isinstance(value, str):
        yield "[?]"
    elif hasattr(kind, "__iter__") and hasattr(kind, "__len__"):
        yield "list(?)"
        yield LISTED
    if kind.__str__ is not object.__str__:
        yield "str(?)"
    if getattr(value, "__dict__", None):  # type: ignore[reportUnknownArgumentType]
        yield "vars(?)"
    yield from _list_shape_templates(value)


# What classes of the standard library and of well-known ones have, and how their values become plain.
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
    """Yield those that make a number, a list, or a list of dicts, where JSON of another shape will not do."""
    if getattr(getattr(value, "dtype", None), "names", None):
        yield "[dict(zip(?.dtype.names, row)) for row in ?.tolist()]"
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
    """Yield those for data frames, for a Series with an index, and for what else has a `to_dict`."""
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
    elif not getattr(getattr(value, "columns", None), "is_unique", True):  # of equal names a dict has the last one
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
    """Yield those for arrays and their items."""
    dtype = getattr(value, "dtype", None)
    letter = getattr(dtype, "kind", "")
    dimensions = getattr(value, "ndim", 1)
    is_pandas = hasattr(value, "isna")
    texts = ("str(?)", LISTED)[dimensions] if dimensions < 2 else "?.astype(str).tolist()"
    if getattr(dtype, "names", None):
        yield "{name: ?[name] for name in ?.dtype.names}"
        dates = "?[name].astype(str) if ?[name].dtype.kind in 'mM' else ?[name]"
        yield f"{{name: ({dates}).tolist() for name in ?.dtype.names}}"
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
        if is_pandas and str(dtype) != "object":  # periods, intervals and their kind
            yield texts
        yield AS_TEXTS.replace("?", "?.tolist()")
    yield texts


def is_default_index(index: Any) -> bool:
    """Return whether pandas has made the index itself, which says no more than each item's place."""
    return getattr(index, "start", None) == 0 and getattr(index, "step", None) == 1
