"""The conversion of Python callers' parameters to JSON, which Prefect needs: arrays, generators, paths and blocks."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, get_args

from pydantic import BeforeValidator

from ...blocks.host_files.mounts import locate_mounts
from ...blocks.host_files.python_path import locate_directories
from ...blocks.registry import name_provider
from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.requests.execution_request import check_patterns
from ...sandbox.requests.function_code import convert_code
from ...sandbox.wire.names import add_article
from ...sandbox.wire.strict_json import NotJsonError, convert_fields
from ..search.space import check_pairs
from .data_frames import list_table_rows
from .readers import normalize_chunk_ids

FILE_NAME = re.compile(r"[\w.~/\\-]+\.py")
DATA_SUFFIX = re.compile(r"\.(?:csv|tsv|jsonl|ndjson|json|parquet)(?:\.gz|\.zst)?$", re.IGNORECASE)
DATA_FILE_NAME = re.compile(r"[\w.~/\\*?\[\]-]+")
MAX_FILE_NAME = 250  # characters; a longer text is not a file's name
DATA_PARAMETERS = ("inputs", "points", "data")  # parameters that take files of data, one at most in each flow
NOT_ROWS = (list, tuple, str, int, float, type(None))  # types of items that are no dict of variables
NUMBERS = ("['low']", "['high']", "['step']")  # Numbers in the definition of a space.


class Content(Enum):
    """The content of a parameter. It decides how Python values become JSON, and which values may go to a file.

    A parameter's type names its content. The enum's value is the content's name in errors. Parameters go to a file if
    Prefect cannot hold them.
    """

    CODE = "code"
    STEP = "code after other code"  # A later step may look like a file's name, such as `x.py`.
    PREPARATION = "code that defines names"  # A function is refused, because its names are local.
    CONTEXT = "a text, a list or a dict"  # NAME_file names the file of a text that Prefect cannot hold.
    ROWS = "a list of dicts"
    ITEMS = "a list"
    GRID = "a dict of lists"
    SPACE = "a dict"
    DATA_BY_ID = "a dict of data by id"

    @property
    def is_code(self) -> bool:
        """True if a function becomes its source, and `@` before a path names a file of code."""
        return self in (Content.CODE, Content.STEP, Content.PREPARATION)


# The types of parameters. Type checkers see the values that callers may pass. At run time Prefect's checks, schemas and
# forms see the converted values.
if TYPE_CHECKING:
    from ...blocks.language_model.settings import LanguageModelSettings
    from ...blocks.provider import SandboxProvider
    from ...sandbox.queries.events import OnEvent

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
    Step = Code
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
    ToolsByName = Mapping[str, str | Callable[..., Any]] | None
    TurnFunction = str | OnEvent
    PathText = str | PurePath
    ProviderText = str | SandboxProvider
    ModelText = str | LanguageModelSettings
    ModelsByName = Mapping[str, str | LanguageModelSettings] | Sequence[str]
    AnswerTypeText = object  # a type or a JSON schema

else:
    # Python callers may pass None. Prefect's form has an editor for a dict, and none for a dict or None.
    _NoneAsEmpty = BeforeValidator(lambda value: {} if value is None else value)
    Items, PathText, ProviderText, ModelText = list, str, str, str
    ProviderOptions = Annotated[dict[str, Any], _NoneAsEmpty]
    Mounts = ToolsByName = Annotated[dict[str, str], _NoneAsEmpty]
    TurnFunction, AnswerTypeText, ModelsByName = str, dict[str, Any], dict[str, str] | list[str]
    Code, Step = Annotated[str, Content.CODE], Annotated[str, Content.STEP]
    PreparationCode = Annotated[str, Content.PREPARATION]
    ContextValue = Annotated[str | list[Any] | dict[str, Any], Content.CONTEXT]
    Variables, DataItem = Annotated[dict[str, Any], Content.ROWS], Annotated[Any, Content.ITEMS]
    GridValues = Annotated[dict[str, list[Any]], Content.GRID, _NoneAsEmpty]
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

    Args:
        parameters: The values by the parameters' names.
        contents: The contents of the parameters that have one.

    Raises:
        ConfigurationError: JSON cannot hold a value, a directory is missing, a block must be saved first, code is the
            name of a file, or a function cannot be sent.
    """
    converted: dict[str, Any] = {
        name: str(value) if isinstance(value, PurePath) else value for name, value in parameters.items()
    }
    if not isinstance(provider := converted.get("provider", ""), str) and hasattr(provider, "provider_name"):
        text, options = name_provider(provider, converted.get("provider_options"))
        converted |= {"provider": text, **({} if options is None else {"provider_options": options})}
    for name in ("language_model", "sub_model"):
        if name in converted:
            converted[name] = _name_model(converted[name])
    if isinstance(models := converted.get("models"), Mapping):
        converted["models"] = {name: _name_model(model) for name, model in models.items()}  # type: ignore[reportUnknownVariableType]
    if isinstance(paths := converted.get("python_path"), (list, tuple)):
        converted["python_path"] = [str(path) for path in locate_directories(paths)]
    if isinstance(mounts := converted.get("mounts"), Mapping):
        converted["mounts"] = {target: str(source) for target, source in locate_mounts(mounts).items()}
    if isinstance(tools := converted.get("tools"), Mapping):
        from ...tasks.host_tools import name_tools

        converted["tools"] = tools = name_tools(tools)  # type: ignore[reportUnknownArgumentType]
    if (on_turn := converted.get("on_turn")) is not None:
        from ...tasks.host_tools import name_function

        converted["on_turn"] = name_function("on_turn", on_turn)
    if isinstance(collect := converted.get("collect"), (list, tuple)):
        converted["collect"] = check_patterns(collect)  # type: ignore[reportUnknownArgumentType]
    for name, content in contents.items():
        if name in converted:
            source = next((other for other in DATA_PARAMETERS if other in contents), "")
            converted[name] = _convert_content(name, content, converted[name], tools or (), source)
    return converted


def _name_model(model: Any) -> Any:
    """Return the name of a `LanguageModel`, and any other value unchanged."""
    if isinstance(model, str) or not hasattr(model, "make_root_model"):
        return model
    from ...blocks.language_model.model_access import name_model

    return name_model(model)


def _convert_content(name: str, content: Content, value: Any, tools: Collection[str], source: str) -> Any:
    value = _list_items(value)
    if content in (Content.ROWS, Content.ITEMS) and (rows := list_table_rows(name, value)) is not None:
        value = rows
    if content is Content.PREPARATION and callable(value):
        raise ConfigurationError(
            f"{name_parameter('prepare')} takes text, not a function, because executions see its global "
            "names: pass the lines as text"
        )
    if content.is_code and isinstance(value, list):
        value = [convert_code(item, tools) for item in value]  # type: ignore[reportUnknownVariableType]
    elif content.is_code:
        value = convert_code(value, tools)
    if content is Content.SPACE:
        check_pairs(value)
    if not (value is None or isinstance(value, str)):  # Text is code, or the path of a file.
        value = _convert_values(name, content, value)
    texts: list[Any] = (value if isinstance(value, list) else [value]) if content.is_code else []
    for text in texts[:1] if content is Content.STEP else texts:  # A later `x.py` may be an attribute.
        if isinstance(text, str):
            check_code(text, source)
    if content is Content.DATA_BY_ID and isinstance(value, dict):
        return normalize_chunk_ids(value)  # type: ignore[reportUnknownArgumentType]
    return value


def _convert_values(name: str, content: Content, value: Any) -> Any:
    def convert(field: str, value: Any) -> Any:
        def expect(place: str, value: Any) -> str | None:
            return _name_shape(name, content, field, place, value)

        if content is Content.GRID and field != name and isinstance(value, (str, int, float)):
            kind, shown = add_article(type(value).__name__), escape_text(reprlib.repr(value))
            raise NotJsonError(f"{field} is {kind}, and must be a list: use [{shown}]")
        return convert_fields({field: _list_items(value)}, allow_nonfinite=True, expect=expect)[field]

    try:
        # A chunk's id may be a number, and a grid's values any list.
        if isinstance(value, dict) and content in (Content.GRID, Content.SPACE, Content.DATA_BY_ID):
            values: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
            places = {key: f"{name}[{key!r}]" for key in values}
            return {key: convert(places[key], item) for key, item in values.items()}
        return convert(name, value)
    except NotJsonError as error:
        text = str(error)
        if content is Content.ROWS and isinstance(value, list):
            for number, row in enumerate(value):  # type: ignore[reportUnknownArgumentType]
                if isinstance(row, NOT_ROWS):
                    found = f"{name}[{number}] is {escape_text(reprlib.repr(row))}, not a dict"
                    text = text.replace(f"{name} is a list, and must be {content.value}", found)
                    break
        raise ConfigurationError(text) from None


def _name_shape(name: str, content: Content, field: str, place: str, value: Any) -> str | None:
    """Return the kind that a value in a parameter must have. None if it has that kind, or if any kind is allowed.

    Args:
        name: The parameter.
        content: Its content.
        field: The part that is converted: the parameter's name, or an item of its dict, such as `grid['x']`.
        place: The place of the value, such as `space['x']['low']`.
        value: The value as JSON. None never has the required kind.
    """
    if place == name and content is Content.ROWS:
        is_table = isinstance(value, list) and not any(isinstance(row, NOT_ROWS) for row in value)  # type: ignore[reportUnknownVariableType]
        return None if is_table else content.value
    if place == name and content in (Content.GRID, Content.DATA_BY_ID):
        return None if isinstance(value, dict) else content.value
    if (place == name and content is Content.ITEMS) or (place == field and content is Content.GRID):
        return None if isinstance(value, list) else "a list"
    if content is Content.SPACE and place.endswith(NUMBERS):
        return None if isinstance(value, (int, float)) else "a number"
    return None


def _list_items(value: Any) -> Any:
    """Convert a generator, a range or a tuple to a list, and return any other value unchanged."""
    return list(value) if isinstance(value, (Iterator, range, tuple)) else value  # type: ignore[reportUnknownArgumentType]


def check_code(text: str, source: str = "") -> None:
    """Raise ConfigurationError if the code is surely a mistake: the name of a file, or lines of JSON.

    `source` is the flow's parameter for files of data, if it has one.
    """
    word = text.strip() if len(text) <= MAX_FILE_NAME else ""
    if DATA_SUFFIX.search(word) and DATA_FILE_NAME.fullmatch(word):
        advice = f"did you mean {name_parameter(source)}?" if source else "pass Python code"
        raise ConfigurationError(f"the code is {word!r}, the name of a file of data: {advice}")
    if len(text) <= MAX_FILE_NAME and FILE_NAME.fullmatch(text.strip()):
        raise ConfigurationError(
            f"the code is {text.strip()!r}, the name of a file: pass its text, as in Path({text.strip()!r}).read_text()"
        )
    if text.lstrip()[:1] in ("{", "[") and _is_json_lines(text):
        raise ConfigurationError(
            f"the code is lines of JSON, not Python: pass them with {name_parameter('inputs')}, "
            f"{name_parameter('points')} or {name_parameter('data')}"
        )


def _is_json_lines(text: str) -> bool:
    """Return whether the text has several lines, and each line is a JSON object or array."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), (dict, list)) for line in lines)
    except (ValueError, RecursionError):
        return False
