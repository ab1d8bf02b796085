"""The global names that code reads."""

import symtable
import warnings
from collections.abc import Iterator

from ..model_reply import read_program
from .function_code import find_parameters


def reads_global(code: str, name: str) -> bool:
    """Return whether the code reads a global name that it does not import or define as a function or class.

    The code of a function reads its parameters. Code that Python cannot compile reads nothing.
    """
    if name not in code:
        return False
    parameters = find_parameters(code)
    if parameters is not None:
        return name in parameters.names
    table = _build_table(code)
    if table is None:
        return False
    top = table.lookup(name) if name in table.get_identifiers() else None
    if top is not None and (top.is_imported() or top.is_namespace()):
        return False
    return any(_reads(inner, name, is_top=inner is table) for inner in _walk(table))


def defines_global(code: str, name: str) -> bool:
    """Return whether the code assigns, imports or defines a global name."""
    table = _build_table(code) if name in code else None
    if table is None or name not in table.get_identifiers():
        return False
    symbol = table.lookup(name)
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _build_table(code: str) -> symtable.SymbolTable | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return symtable.symtable(read_program(code), "<code>", "exec")
    except (SyntaxError, ValueError):
        return None


def _walk(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _walk(inner)


def _reads(table: symtable.SymbolTable, name: str, *, is_top: bool) -> bool:
    if name not in table.get_identifiers():
        return False
    symbol = table.lookup(name)
    return symbol.is_referenced() and (is_top or symbol.is_global())
