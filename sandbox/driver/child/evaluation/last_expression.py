"""Compiles code so that the value of its last statement is known, where that is an expression."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT: code that awaits is a coroutine's, and other code as ever
# How a line at the margin begins that goes on with the statement before it.
CONTINUATIONS = (" ", "\t", "\r", ")", "]", "}", "#", "else", "elif", "except", "finally", "'''", '"""')
MARKS = frozenset("()[]{}'\"#;\\\n")  # with which a line may be more than one statement, or less


def compile_code(source: str, file_name: str) -> tuple[list[CodeType], CodeType | None]:
    """The code in the parts that are to be run one after the other, and the expression that is its last statement.

    The expression is None where the last statement is another one. Raises what `compile` raises.
    """
    start = _find_last_statement(source)
    last = source[start:].rstrip()
    # Most code ends so, and in a new process a tree takes longer than the compiling.
    if _is_assignment(last) or _is_submission(last):
        return [compile(source, file_name, "exec", TOP_LEVEL_AWAIT, dont_inherit=True)], None
    if "__future__" not in source:  # which is said at the beginning, and is for the whole
        try:
            return _compile_in_two(source, start, file_name)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # it is wrong, or was cut in a wrong place
    whole = _compile(source, file_name)
    try:
        parts, expression = _compile_tree(source, file_name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [whole], None  # the way by a tree is more easily too deep than the one without
    return ([whole], None) if expression is None else (parts, expression)


def _find_last_statement(source: str) -> int:
    """Where the last line begins that looks like the beginning of a statement."""
    end = len(source.rstrip())
    while True:
        start = source.rfind("\n", 0, end) + 1
        if not start or not (start == end or source.startswith(CONTINUATIONS, start)):
            return start
        end = start - 1


def _is_assignment(line: str) -> bool:
    """Whether the line certainly is one to a name."""
    name, _, value = line.partition("=")
    name = name.rstrip(" ").rstrip("+-*/%&|^@").rstrip(" ")
    return name.isidentifier() and value != "" and value[0] != "=" and MARKS.isdisjoint(line)


def _is_submission(lines: str) -> bool:
    """Whether it is a call that does not return, and no line in the middle of a text."""
    return lines.startswith("SUBMIT(") and "'''" not in lines and '"""' not in lines


def _compile_in_two(source: str, start: int, file_name: str) -> tuple[list[CodeType], CodeType | None]:
    """The same, with a tree for what begins there only. Raises SyntaxError where that cuts something in two.

    Where both parts are programs they are what the whole is, for no bracket, string or block goes on from one to the
    other.
    """
    lines = source.count("\n", 0, start)
    parts, expression = _compile_tree("\n" * lines + source[start:], file_name)
    if start:
        parts.insert(0, _compile(source[:start], file_name))
    return parts, expression


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
