"""The description of a tool, as a recursive model and its code see it."""

import inspect
import re
from typing import Any

QUOTED_TYPE = re.compile(r"(: |-> )(['\"])(.*?)\2")  # an annotation in a signature that is a text


def describe_tool(name: str, tool: Any) -> str:
    """Return a function's signature and docstring, or the description of a value.

    Defaults other than numbers and None are `...`, because a `partial` may hold a secret.
    """
    if not callable(tool):
        return f"`{name}`: {tool.description}"
    shown = "(...)"
    try:
        signature = inspect.signature(tool)
    except (TypeError, ValueError):
        pass
    else:
        parameters = list(signature.parameters.values())
        for index, parameter in enumerate(parameters):
            if not isinstance(parameter.default, (int, float, type(None))) and parameter.default is not parameter.empty:
                parameters[index] = parameter.replace(default=...)
        shown = str(signature.replace(parameters=parameters)).replace("Ellipsis", "...")
        shown = QUOTED_TYPE.sub(r"\1\3", shown)
    doc = inspect.getdoc(tool)
    return f"`{name}{shown}`: {doc}" if doc else f"`{name}{shown}`"
