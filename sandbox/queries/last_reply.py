"""The calls of SUBMIT in a recursive model's last reply, whose text may be prose, and whose code may fail."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from ..model_reply import parse_python

CALL = re.compile(r"\bSUBMIT\s*\(")
JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_CALLS, MAX_CALL_CHARACTERS = 10, 100_000  # calls that are read in prose, and characters of each


def list_calls(text: str) -> list[str]:
    """Return the calls of SUBMIT in prose."""
    calls: list[str] = []
    for match in islice(CALL.finditer(text), MAX_CALLS):
        with suppress(SyntaxError, tokenize.TokenError):
            calls.append(_cut_call(text[match.start() : match.start() + MAX_CALL_CHARACTERS]))
    return calls


def find_literal_call(texts: Iterable[str]) -> str:
    """Return the first call of SUBMIT with a literal in Python or in prose, as Python, or "" without one.

    In Python, a call that depends on others, as below an `if`, does not count.
    """
    for text in texts:
        for code in list_calls(text) if parse_python(text) is None else [text]:
            for statement in getattr(parse_python(code), "body", ()):
                match statement:
                    case ast.Expr(ast.Call(ast.Name("SUBMIT"), [value], [])) | ast.Expr(
                        ast.Call(ast.Name("SUBMIT"), [], [ast.keyword("answer", value)])
                    ):
                        with suppress(ValueError, TypeError, RecursionError, MemoryError):
                            value = _JsonNames().visit(value)
                            ast.literal_eval(value)
                            return f"SUBMIT({ast.unparse(value)})"
                    case _:
                        pass
    return ""


class _JsonNames(ast.NodeTransformer):
    """A reader of JSON's constants, which models write in the place of Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant of a name of JSON."""
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _cut_call(text: str) -> str:
    """Return the call with which a text begins. Raises TokenError and SyntaxError if it has no end."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (token.string in {"(", "[", "{"}) - (token.string in {")", "]", "}"})
        if token.string == ")" and depth == 0:
            row, column = token.end
            *lines, last = text.split("\n")[:row]
            return "\n".join([*lines, last[:column]])
    raise SyntaxError("the call has no end")
