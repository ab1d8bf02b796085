"""Docstrings that people read as help, also under `python -OO`, which strips them."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any


def read_docstring(function: Callable[..., Any]) -> str:
    """Return the function's docstring or an empty text. Read it from the source if Python stripped docstrings."""
    if function.__doc__ is not None or sys.flags.optimize < 2:
        return function.__doc__ or ""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return ""
    return ast.get_docstring(definition, clean=False) or ""  # type: ignore[arg-type]
