"""Functions of the host that a flow run's code may call: import paths, or functions of this process."""

import asyncio
import functools
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..blocks.worker_consent import check_tool
from ..sandbox.errors import ConfigurationError
from ..sandbox.requests.execution_request import ToolValue, encode_variable
from ..sandbox.requests.function_code import PROVIDED_NAMES
from ..sandbox.requests.object_values import convert_value
from ..sandbox.thread_pool import ThreadPool
from ..sandbox.wire.context_shape import describe_shape
from ..sandbox.wire.strict_json import NotJsonError, convert_fields

TOOL_TIMEOUT_SECONDS: float = 60  # default seconds for one call; the end of the execution ends the call too
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Tool = Callable[..., Any]
_functions: dict[str, Tool] = {}  # This process's functions, by their names in a flow run's parameters.
_threads = ThreadPool()


def name_tools(tools: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tools as JSON: a name in this process for each function, and import paths and values unchanged.

    Raises ConfigurationError for what `read_tools` refuses.
    """
    named: dict[str, Any] = {}
    for name, tool, description in read_tools(tools):
        text = name_function(name, tool) if callable(tool) else tool
        named[name] = text if description is None else {"tool": text, "description": description}
    return named


def read_tools(tools: Any, taken: Collection[str] = ()) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the name of each tool, its function, import path or value as JSON, and its description.

    A tool may be a dict with the `tool` and its `description`. Raises ConfigurationError for a name that code cannot
    use, a name in `taken`, a text that is no import path, and a value that JSON cannot hold.
    """
    if not isinstance(tools, Mapping):
        raise ConfigurationError(f"`tools` is a {type(tools).__name__}: pass a dict of functions by name")
    for name, tool in tools.items():
        check_tool_name(name, taken)
        role, description = f"the tool {name!r}", None
        if isinstance(tool, dict) and "tool" in tool and tool.keys() <= {"tool", "description"}:
            tool, description = tool["tool"], str(tool.get("description", ""))
        elif isinstance(tool, str):
            name_function(role, tool)
        if not (callable(tool) or is_function_text(tool)):
            try:
                tool = convert_fields({"value": convert_value(tool)}, allow_nonfinite=True)["value"]
            except (NotJsonError, TypeError, ValueError, ConfigurationError) as error:
                problem = f"is neither a function nor a value that JSON can hold: {error}"
                raise ConfigurationError(f"{role} {problem}") from None
        yield name, tool, description


def name_function(role: str, function: Any) -> str:
    """Return a function as JSON: an import path unchanged, or a name in this process for a function.

    Raises ConfigurationError for another value. The message begins with `role`, such as "the tool 'search'".
    """
    if callable(function):
        qualname = getattr(function, "__qualname__", type(function).__qualname__)
        name = f"<{qualname} {id(function):#x} of this process>"
        _functions[name] = function
        return name
    if is_function_text(function):
        return function
    raise ConfigurationError(
        f"{role} is {function!r}: pass a function, or its import path, such as package.module:function; a text for the "
        "code is the `tool` of a dict with a `description`"
    )


def is_function_text(value: Any) -> bool:
    """Return True for an import path, and for the name of a function of this process."""
    return isinstance(value, str) and (IMPORT_PATH.fullmatch(value) is not None or value in _functions)


def check_tool_name(name: Any, taken: Collection[str] = ()) -> None:
    """Raise ConfigurationError if code cannot call a tool by this name, or the name is that of something else."""
    is_identifier = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    if not is_identifier or name in PROVIDED_NAMES or name in taken:
        raise ConfigurationError(f"the tool {name!r} has a name that code cannot use, or has already: rename it")


def load_tools(tools: Any, timeout: float | None = TOOL_TIMEOUT_SECONDS, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the functions and values, each function with a time limit for a call in seconds.

    Raises ConfigurationError for what `read_tools` refuses, and a function that cannot be imported.
    """
    loaded: dict[str, Any] = {}
    for name, tool, description in read_tools(tools, taken):
        if is_function_text(tool):
            tool = load_function(f"the tool {name!r}", tool)
        if callable(tool):
            loaded[name] = _limit_seconds(name, tool, timeout, description)
        else:
            encoded = encode_variable(tool)
            about = f"{describe_shape(tool)}. {description or ''}".rstrip()
            loaded[name] = ToolValue(encoded.json, encoded.nonfinite, about)
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


def _limit_seconds(name: str, tool: Tool, seconds: float | None, description: str | None) -> Tool:
    """Return the tool with a time limit for calls, and with the description as its docstring, unless it is empty.

    A call in a thread continues after the limit, but is ignored.
    """

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

    plain = tool.func if isinstance(tool, functools.partial) else tool  # The docstring of a partial is `partial`'s own.
    call.__doc__ = description or plain.__doc__
    return call
