"""The calls of SUBMIT in a recursive model's last reply, whose text may be prose, and whose code may fail."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ..model_reply import parse_python

CALL = re.compile(r"\bSUBMIT\s*\(")
JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_CALLS, MAX_CALL_CHARACTERS = 10, 100_000  # calls that are read in prose, and characters of each


def list_calls(text: str) -> list[str]:
    """Return the calls of SUBMIT in prose, without those that have no end."""
    calls: list[str] = []
    for match in islice(CALL.finditer(text), MAX_CALLS):
        with suppress(SyntaxError, tokenize.TokenError):
            calls.append(_cut_call(text[match.start() : match.start() + MAX_CALL_CHARACTERS]))
    return calls


def find_literal_call(texts: Iterable[str]) -> str | None:
    """Return the first call of SUBMIT with a literal in Python or in prose, as Python, or None.

    In Python only statements of the outermost level count. A call below an `if`, for example, may never run.
    """
    for text in texts:
        for statement in _list_statements(text):
            argument = _find_argument(statement)
            if argument is None:
                continue
            with suppress(ValueError, TypeError, RecursionError, MemoryError):
                literal = _JsonNames().visit(argument)
                ast.literal_eval(literal)
                return f"SUBMIT({ast.unparse(literal)})"
    return None


def _list_statements(text: str) -> Iterator[ast.stmt]:
    """Yield the statements of Python, or the calls of SUBMIT in prose."""
    tree = parse_python(text)
    if tree is not None:
        yield from tree.body
        return
    for call in list_calls(text):
        tree = parse_python(call)
        if tree is not None:
            yield from tree.body


def _find_argument(statement: ast.stmt) -> ast.expr | None:
    """Return the argument of SUBMIT(value) or SUBMIT(answer=value), or None for another statement."""
    match statement:
        case ast.Expr(ast.Call(ast.Name("SUBMIT"), [value], [])):
            return value
        case ast.Expr(ast.Call(ast.Name("SUBMIT"), [], [ast.keyword("answer", value)])):
            return value
        case _:
            return None


class _JsonNames(ast.NodeTransformer):
    """A transformer that replaces true, false and null, which models write instead of Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _cut_call(text: str) -> str:
    """Return the call with which a text begins. Raises TokenError and SyntaxError if it has no end."""
    depth = 0  # number of open brackets
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string in ("(", "[", "{"):
            depth += 1
        elif token.string in (")", "]", "}"):
            depth -= 1
            if depth == 0 and token.string == ")":
                row, column = token.end
                lines = text.split("\n")[:row]
                lines[-1] = lines[-1][:column]
                return "\n".join(lines)
    raise SyntaxError("the call has no end")
