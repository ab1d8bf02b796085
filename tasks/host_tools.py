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
from ..sandbox.requests.function_code import PROVIDED_NAMES
from ..sandbox.thread_pool import ThreadPool

TOOL_TIMEOUT_SECONDS: float = 60  # default seconds for one call; the end of the execution ends the call too
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Tool = Callable[..., Any]
_functions: dict[str, Tool] = {}  # This process's functions, by their names in a flow run's parameters.
_threads = ThreadPool()


def name_tools(tools: Mapping[str, Any]) -> dict[str, str]:
    """Return the tools as JSON: import paths unchanged, and a name in this process for each function.

    Raises ConfigurationError for a name that code cannot call, and for a value that is neither a path nor a function.
    """
    tools_as_json: dict[str, str] = {}
    for name, tool in tools.items():
        check_tool_name(name)
        tools_as_json[name] = name_function(f"the tool {name!r}", tool)
    return tools_as_json


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
        f"{role} is {function!r}: pass a function, or its import path, such as package.module:function"
    )


def check_tool_name(name: str, taken: Collection[str] = ()) -> None:
    """Raise ConfigurationError if code cannot call a tool by this name, or the name is that of something else."""
    is_identifier = name.isidentifier() and not keyword.iskeyword(name)
    if not is_identifier or name in PROVIDED_NAMES or name in taken:
        raise ConfigurationError(f"the tool {name!r} has a name that code cannot use, or has already: rename it")


def load_tools(tools: Mapping[str, str], timeout: float | None = TOOL_TIMEOUT_SECONDS) -> dict[str, Tool]:
    """Return the functions, each with a time limit for a call in seconds.

    Raises ConfigurationError if one cannot be imported.
    """
    functions: dict[str, Tool] = {}
    for name, path in name_tools(tools).items():
        functions[name] = _limit_seconds(name, load_function(f"the tool {name!r}", path), timeout)
    return functions


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
