"""A compiler of code that keeps the value of the last statement if that is an expression."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT: changes only code that awaits
# Beginnings of lines that continue the statement before them.
CONTINUATIONS = (" ", "\t", "\r", ")", "]", "}", "#", "else", "elif", "except", "finally", "'''", '"""')


def compile_code(source: str, file_name: str) -> tuple[list[CodeType], CodeType | None]:
    """Compile code into parts to run in order, and the expression that is its last statement.

    Return (parts, None) if the last statement is of another kind. Raises the exceptions of `compile`.
    """
    start = _find_last_statement(source)
    if "__future__" not in source:  # a `__future__` import must start the code and applies to all of it
        try:
            # Building a tree takes as long as compiling, so only the last statement gets one. If both parts compile,
            # they mean the same as the whole: no bracket, string or block spans the cut.
            parts, expression = _compile_tree("\n" * source.count("\n", 0, start) + source[start:], file_name)
            return [*([_compile(source[:start], file_name)] if start else []), *parts], expression
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # the code is wrong, or was cut in the wrong place
    whole = _compile(source, file_name)
    try:
        parts, expression = _compile_tree(source, file_name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [whole], None  # compiling by a tree reaches the depth limit sooner
    return ([whole], None) if expression is None else (parts, expression)


def _find_last_statement(source: str) -> int:
    """Return the start of the last line that looks like the beginning of a statement."""
    end = len(source.rstrip())
    while True:
        start = source.rfind("\n", 0, end) + 1
        if not start or not (start == end or source.startswith(CONTINUATIONS, start)):
            return start
        end = start - 1


def _compile_tree(source: str, file_name: str) -> tuple[list[CodeType], CodeType | None]:
    tree: Any = _compile(source, file_name, flags=ONLY_AST)
    expression: CodeType | None = None
    if tree.body and type(tree.body[-1]).__name__ == "Expr":
        whole: Any = _compile("0", file_name, "eval", ONLY_AST)
        whole.body = tree.body.pop().value
        expression = _compile(whole, file_name, "eval")
    return [_compile(tree, file_name)] if tree.body else [], expression


def _compile(source: Any, file_name: str, mode: str = "exec", flags: int = 0) -> Any:
    return compile(source, file_name, mode, flags | TOP_LEVEL_AWAIT, dont_inherit=True)
