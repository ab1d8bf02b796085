"""The conversion of Python callers' parameters to JSON, which Prefect needs: arrays, generators, paths and blocks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, get_args

from annotated_types import MinLen
from pydantic import BeforeValidator

from ...blocks.host_files.mounts import locate_mounts
from ...blocks.host_files.python_path import locate_directories
from ...blocks.registry import name_provider
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.data_frames import list_table_rows
from ...sandbox.requests.execution_request import check_patterns
from ...sandbox.requests.function_code import convert_code
from ...sandbox.wire.strict_json import NotJsonError, convert_fields
from ...tasks.host_tools import name_function, name_tools
from ..search.space import check_pairs
from .readers import normalize_chunk_ids

DATA_SUFFIX = re.compile(r"\.(?:csv|tsv|jsonl|ndjson|json|parquet)(?:\.gz|\.zst)?$", re.IGNORECASE)
FILE_NAME = re.compile(rf"[\w.~/\\*?\[\]-]+(?:\.py|{DATA_SUFFIX.pattern})", re.IGNORECASE)
MAX_FILE_NAME = 250  # characters; a longer text is not a file's name


class Content(Enum):
    """The content of a parameter, which its type names, and which decides how values become JSON."""

    CODE = "code"
    PREPARATION = "prepare"  # A function is refused, because its names are local.
    CONTEXT = "context"
    ITEMS = "items"  # rows of a table, or other items
    GRID = "grid"
    SPACE = "space"
    DATA_BY_ID = "data by id"

    @property
    def is_code(self) -> bool:
        """True if a function becomes its source, and `@` before a path names a file of code."""
        return self in (Content.CODE, Content.PREPARATION)

    @property
    def is_path_if_text(self) -> bool:
        """True if a text is the path of a file with the values."""
        return not self.is_code and self is not Content.CONTEXT


# The types of parameters. Type checkers see the values that callers may pass. At run time Prefect's checks, schemas and
# forms see the converted values.
if TYPE_CHECKING:
    from ...blocks.language_model.settings import LanguageModelSettings
    from ...blocks.provider import SandboxProvider
    from ...sandbox.queries.records import OnEvent

    T = TypeVar("T")

    class Array(Protocol):
        """An array of numpy, pandas or `array`."""

        def tolist(self) -> Any: ...

    class DataFrame(Protocol):
        """A DataFrame of pandas or polars."""

        def to_dict(self, *args: Any, **kwargs: Any) -> Any: ...

    class ArrowTable(Protocol):
        """A table or a record batch of pyarrow."""

        def to_pylist(self, *args: Any, **kwargs: Any) -> Any: ...

    Items = Sequence[T] | Iterator[T] | Array | DataFrame | ArrowTable
    Code = str | Callable[..., object]  # A function's source is sent.
    PreparationCode = str
    ContextValue = str | PurePath | Sequence[object] | Mapping[str, object]
    # `object`, because mypy infers list[object] for [{"x": 1}, {"x": "one"}], and dict[str, object] for a grid whose
    # values have different types.
    Variables = object
    DataItem = Any
    GridValues = Mapping[str, object] | None
    SpaceValues = Mapping[str, object] | Sequence[Mapping[str, object]]
    ProviderOptions = dict[str, Any] | None
    DataById = Mapping[Any, object]
    Mounts = Mapping[str, str | PurePath] | None
    ToolsByName = Mapping[str, object] | None  # functions, import paths and values, and dicts of these
    TurnFunction = str | OnEvent
    PrunerText = str | Mapping[str, object]
    PathText = str | PurePath
    BudgetText = str | os.PathLike[str]
    ProviderText = str | SandboxProvider
    ModelText = str | LanguageModelSettings
    ModelsByName = Mapping[str, str | LanguageModelSettings] | Sequence[str]
    AnswerTypeText = object  # a type or a JSON schema

else:
    # Python callers may pass None. Prefect's form has an editor for a dict, and none for a dict or None.
    _NoneAsEmpty = BeforeValidator(lambda value: {} if value is None else value)
    Items, PathText, BudgetText, ProviderText, ModelText, PrunerText = list, str, str, str, str, str
    ProviderOptions = ToolsByName = Annotated[dict[str, Any], _NoneAsEmpty]
    Mounts = Annotated[dict[str, str], _NoneAsEmpty]
    TurnFunction, AnswerTypeText, ModelsByName = str, dict[str, Any], dict[str, str] | list[str]
    Code = Annotated[str, Content.CODE]
    PreparationCode = Annotated[str, Content.PREPARATION]
    ContextValue = Annotated[str | list[Any] | dict[str, Any], Content.CONTEXT]
    Variables, DataItem = Annotated[dict[str, Any], Content.ITEMS], Annotated[Any, Content.ITEMS]
    GridValues = Annotated[dict[str, Annotated[list[Any], MinLen(1)]], Content.GRID, _NoneAsEmpty]
    SpaceValues = Annotated[dict[str, Any] | list[dict[str, Any]], Content.SPACE]
    DataById = Annotated[dict[str, Any], Content.DATA_BY_ID]


def find_content(annotation: Any) -> Content | None:
    """Return the content that a parameter's type names, or None."""
    for item in get_args(annotation):
        content = item if isinstance(item, Content) else find_content(item)
        if content is not None:
            return content
    return None


def convert_parameters(parameters: dict[str, Any], contents: Mapping[str, Content]) -> dict[str, Any]:
    """Convert generators, arrays and tables to lists, and paths, blocks, models and functions to text.

    Raises ConfigurationError if JSON cannot hold a value, a directory is missing, a block must be saved first, code is
    the name of a file, or a function cannot be sent.
    """
    converted: dict[str, Any] = {}
    for name, value in parameters.items():
        converted[name] = _convert_parameter(name, value)
    provider: Any = converted.get("provider")
    tools = converted.get("tools")
    if hasattr(provider, "provider_name"):
        converted["provider"], options = name_provider(provider, converted.get("provider_options"))
        if options is not None:
            converted["provider_options"] = options
    for name, content in contents.items():
        if name in converted:
            converted[name] = _convert_content(name, content, converted[name], tools or ())
    return converted


def _convert_parameter(name: str, value: Any) -> Any:
    """Return the text or JSON of a parameter whose name says how it is converted, and any other value unchanged."""
    if isinstance(value, PurePath) and name != "on_turn":
        return str(value)
    match name, value:
        case "language_model" | "sub_model", _:
            return _name_model(value)
        case "budget", os.PathLike():
            return os.fspath(value)
        case "models", Mapping():
            return {key: _name_model(model) for key, model in value.items()}
        case "python_path", list() | tuple():
            return [str(path) for path in locate_directories(value)]
        case "mounts", Mapping():
            return {target: str(source) for target, source in locate_mounts(value).items()}
        case "tools", Mapping():
            return name_tools(value)
        case "on_turn", value if value is not None:
            return name_function("on_turn", value)
        case "pruner", Mapping():
            settings = [f"{key}={item!r}" for key, item in value.items() if key != "name"]
            return f"{value.get('name')}({', '.join(settings)})"
        case "collect", list() | tuple():
            return check_patterns(value)
        case _:
            return value


def _name_model(model: Any) -> Any:
    """Return the name of a `LanguageModel`, and any other value unchanged."""
    if isinstance(model, str) or not hasattr(model, "make_root_model"):
        return model
    from ...blocks.language_model.model_access import name_model

    return name_model(model)


def _convert_content(name: str, content: Content, value: Any, tools: Collection[str]) -> Any:
    value = _list_items(value)
    if content.is_code:
        return _convert_code(content, value, tools)
    if content is Content.SPACE:
        check_pairs(value)
    if value is None or isinstance(value, str):  # Text is the path of a file.
        return value
    if content is Content.ITEMS:
        rows = list_table_rows(name, value)
        if rows is not None:
            value = rows
    try:
        if isinstance(value, dict):  # A chunk's id may be a number, and a grid's values may be any iterable.
            items: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
            value = {key: _convert_value(f"{name}[{key!r}]", item) for key, item in items.items()}
        else:
            value = _convert_value(name, value)
    except NotJsonError as error:
        raise ConfigurationError(str(error)) from None
    if content is Content.DATA_BY_ID and isinstance(value, dict):
        return normalize_chunk_ids(value)  # type: ignore[reportUnknownArgumentType]
    return value


def _convert_code(content: Content, value: Any, tools: Collection[str]) -> Any:
    """Return code, or a list of code, as text."""
    if content is Content.PREPARATION and callable(value):
        raise ConfigurationError(
            "`prepare` takes text, not a function, because executions see its global names: pass the lines as text"
        )
    codes: list[Any] = value if isinstance(value, list) else [value]
    texts = [convert_code(code, tools) for code in codes]
    for text in texts:
        if isinstance(text, str):
            check_code(text)
    return texts if isinstance(value, list) else texts[0]


def _convert_value(place: str, value: Any) -> Any:
    return convert_fields({place: _list_items(value)}, allow_nonfinite=True)[place]


def _list_items(value: Any) -> Any:
    """Convert a generator, a range or a tuple to a list, and return any other value unchanged."""
    return list(value) if isinstance(value, (Iterator, range, tuple)) else value  # type: ignore[reportUnknownArgumentType]


def check_code(text: str) -> None:
    """Raise ConfigurationError if the code is the name of a file."""
    word = text.strip()
    if len(text) <= MAX_FILE_NAME and FILE_NAME.fullmatch(word):
        raise ConfigurationError(
            f"the code is {word!r}, the name of a file: pass the text of a program, as in Path({word!r}).read_text()"
        )
