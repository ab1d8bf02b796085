"""The description of a name, as a recursive model and its code see it. Sandboxes run the source of this module."""

import inspect
import re
from typing import Any

QUOTED_TYPE = re.compile(r"(: |-> )(['\"])(.*?)\2")  # an annotation in a signature that is a text


def describe_tool(name: str, tool: Any, *, hides_defaults: bool = True) -> str:
    """Return a function's signature and docstring, or the type of a value.

    With `hides_defaults`, defaults other than numbers and None are `...`, because a `partial` may hold a secret.
    """
    if not callable(tool):
        return f"`{name}`: {type(tool).__name__}"
    try:
        signature = inspect.signature(tool)
    except (TypeError, ValueError):
        shown = "(...)"
    else:
        parameters = list(signature.parameters.values())
        for index, parameter in enumerate(parameters):
            is_shown = parameter.default is parameter.empty or isinstance(parameter.default, (int, float, type(None)))
            if hides_defaults and not is_shown:
                parameters[index] = parameter.replace(default=...)
        shown = str(signature.replace(parameters=parameters)).replace("Ellipsis", "...")
        shown = QUOTED_TYPE.sub(r"\1\3", shown)
    doc = inspect.getdoc(tool)
    return f"`{name}{shown}`: {doc}" if doc else f"`{name}{shown}`"
