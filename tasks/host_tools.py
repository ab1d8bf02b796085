"""Functions of the host that a flow run's code may call: import paths, or functions of this process."""

import asyncio
import functools
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..blocks.worker_consent import check_tool
from ..sandbox.errors import ConfigurationError
from ..sandbox.requests.execution_request import ToolValue, encode_variable
from ..sandbox.requests.function_code import PROVIDED_NAMES
from ..sandbox.requests.object_values import convert_value
from ..sandbox.thread_pool import ThreadPool
from ..sandbox.wire.context_shape import describe_shape
from ..sandbox.wire.strict_json import NotJsonError

TOOL_TIMEOUT_SECONDS: float = 60  # default seconds for one call; the end of the execution ends the call too
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Tool = Callable[..., Any]
_functions: dict[str, Tool] = {}  # This process's functions, by their names in a flow run's parameters.
_threads = ThreadPool()


def name_tools(tools: Mapping[str, Any]) -> dict[str, str]:
    """Return the tools as texts: import paths unchanged, a name in this process for each function, and values as JSON.

    Raises ConfigurationError for a name that code cannot use, and for a tool that `read_tool` refuses.
    """
    texts: dict[str, str] = {}
    for name, source in tools.items():
        check_tool_name(name)
        role = f"the tool {name!r}"
        tool = read_tool(role, source)
        texts[name] = tool.to_text() if isinstance(tool, ToolValue) else name_function(role, tool)
    return texts


def read_tool(role: str, source: Any) -> Any:
    """Return a function with its description as docstring, an import path unchanged, or a value as a `ToolValue`.

    The source may be a dict with the `tool` and its `description`. Raises ConfigurationError if JSON cannot hold the
    value. The message begins with `role`, such as "the tool 'search'".
    """
    tool, description = source, ""
    if isinstance(source, dict) and "tool" in source and source.keys() <= {"tool", "description"}:
        tool, description = source["tool"], source.get("description", "")
        if isinstance(tool, str) and IMPORT_PATH.fullmatch(tool):
            tool = load_function(role, tool)
    elif isinstance(source, str):
        return ToolValue.from_text(source) or source
    if callable(tool):
        if description:
            tool = functools.partial(tool)
            tool.__doc__ = description
        return tool
    try:
        encoded = encode_variable(convert_value(tool))
    except (NotJsonError, TypeError, ValueError, ConfigurationError) as error:
        raise ConfigurationError(f"{role} is neither a function nor a value that JSON can hold: {error}") from None
    return ToolValue(encoded.json, encoded.nonfinite, f"{describe_shape(tool)}. {description}".rstrip())


def name_function(role: str, function: Any) -> str:
    """Return a function as JSON: an import path unchanged, or a name in this process for a function.

    Raises ConfigurationError for another value. The message begins with `role`, such as "the tool 'search'".
    """
    if callable(function):
        qualname = getattr(function, "__qualname__", type(function).__qualname__)
        name = f"<{qualname} {id(function):#x} of this process>"
        _functions[name] = function
        return name
    if isinstance(function, str) and (IMPORT_PATH.fullmatch(function) or function in _functions):
        return function
    raise ConfigurationError(
        f"{role} is {function!r}: pass a function, or its import path, such as package.module:function; a text for the "
        "code is the `tool` of a dict with a `description`"
    )


def check_tool_name(name: Any, taken: Collection[str] = ()) -> None:
    """Raise ConfigurationError if code cannot call a tool by this name, or the name is that of something else."""
    is_identifier = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    if not is_identifier or name in PROVIDED_NAMES or name in taken:
        raise ConfigurationError(f"the tool {name!r} has a name that code cannot use, or has already: rename it")


def load_tools(tools: Any, timeout: float | None = TOOL_TIMEOUT_SECONDS, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the functions and values, each function with a time limit for a call in seconds.

    Raises ConfigurationError for what `name_tools` refuses, a name in `taken`, and a function that cannot be imported.
    """
    if not isinstance(tools, Mapping):
        raise ConfigurationError(f"`tools` is a {type(tools).__name__}: pass a dict of functions by name")
    loaded: dict[str, Any] = {}
    for name, source in tools.items():
        check_tool_name(name, taken)
        role = f"the tool {name!r}"
        tool = read_tool(role, source)
        if isinstance(tool, str):
            tool = load_function(role, name_function(role, tool))
        loaded[name] = _limit_seconds(name, tool, timeout) if callable(tool) else tool
    return loaded


def load_function(role: str, path: str) -> Tool:
    """Return the function for a path or a name that `name_function` returned.

    Raises ConfigurationError if it cannot be imported. The message begins with `role`, such as "the tool 'search'".
    """
    if path.startswith("<"):  # It is the name of a function of this process.
        return _functions[path]
    check_tool(path)
    module_name, _, attribute_path = path.partition(":")
    try:
        tool: Any = importlib.import_module(module_name)
        for attribute in attribute_path.split("."):
            tool = getattr(tool, attribute)
    except (ImportError, AttributeError) as error:
        remedy = "; add its directory to PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigurationError(f"{role}, {path}, cannot be imported on this host: {error}{remedy}") from None
    if not callable(tool):
        raise ConfigurationError(f"{role}, {path}, is no function but {type(tool).__name__}")
    return tool


def _limit_seconds(name: str, tool: Tool, seconds: float | None) -> Tool:
    """Return the tool with a time limit for calls. A call in a thread continues after the limit, but is ignored."""

    @functools.wraps(tool)  # A recursive model reads the signature and the docstring.
    async def call(*args: Any, **kwargs: Any) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                if inspect.iscoroutinefunction(tool):
                    return await tool(*args, **kwargs)
                value = await _threads.run_in_thread(lambda: tool(*args, **kwargs))
                return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"{name} took more than {seconds:g} s: ask it for less") from None

    return call
