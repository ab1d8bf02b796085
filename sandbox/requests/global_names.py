"""The global names that code reads."""

import ast

from ..model_reply import parse_python, read_program
from .function_code import find_parameters


def reads_global(code: str, name: str) -> bool:
    """Return whether the code reads a name that it does not import or define as a function or class.

    The code of a function reads its parameters. Code that Python cannot compile reads nothing.
    """
    if name not in code:
        return False
    parameters = find_parameters(code)
    if parameters is not None:
        return name in parameters.names
    return name in _list_names(code, ast.Load) and name not in _list_definitions(code)


def defines_global(code: str, name: str) -> bool:
    """Return whether the code assigns, imports or defines a name."""
    return name in code and name in _list_names(code, ast.Store) | _list_definitions(code)


def _list_names(code: str, context: type[ast.expr_context]) -> set[str]:
    tree = parse_python(read_program(code))
    nodes = () if tree is None else ast.walk(tree)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _list_definitions(code: str) -> set[str]:
    """Return the names that the top level of the code imports or defines as a function or class."""
    names: set[str] = set()
    tree = parse_python(read_program(code))
    for node in () if tree is None else tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names
