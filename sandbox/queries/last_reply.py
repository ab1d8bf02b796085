"""The answer in a recursive model's last reply, whose code is not run: a call of SUBMIT with a literal value."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ..requests.code_text import parse_module
from ..wire.submission import check_limits
from .model_python import Submission

CALL = re.compile(r"\bSUBMIT\s*\(")
JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_CALLS, MAX_CALL_CHARACTERS = 10, 100_000  # calls that are read in prose, and characters of each
UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, tokenize.TokenError)


def read_submission(texts: Iterable[str]) -> Submission | None:
    """Return the value of the first call of SUBMIT whose value is a literal, or None. Run nothing.

    Args:
        texts: Python, or prose with calls in it. In Python, a call that depends on others, as below an `if`, does not
            count.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The parser warns of escapes such as "\d".
        for text in texts:
            for call in _list_calls(text):
                match call:
                    case ast.Call(ast.Name("SUBMIT"), [value], []) | ast.Call(
                        ast.Name("SUBMIT"), [], [ast.keyword("answer", value)]
                    ):
                        with suppress(*UNREADABLE):
                            answer = ast.literal_eval(_JsonNames().visit(value))
                            body = json.dumps({"answer": answer}, ensure_ascii=False)
                            fields = json.loads(encoded := body.encode("utf-8", "replace"))
                            check_limits(fields, encoded)
                            return Submission(fields["answer"])
                    case _:
                        pass
    return None


class _JsonNames(ast.NodeTransformer):
    """A reader of JSON's constants, which models write in the place of Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant of a name of JSON."""
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _list_calls(text: str) -> Iterator[ast.expr]:
    """Yield the expressions at the top level of Python, or the calls of SUBMIT in prose."""
    statements: list[ast.stmt] = []
    try:
        statements = parse_module(text).body
    except UNREADABLE:
        for match in islice(CALL.finditer(text), MAX_CALLS):
            with suppress(*UNREADABLE):
                statements += parse_module(_cut_call(text[match.start() : match.start() + MAX_CALL_CHARACTERS])).body
    yield from (statement.value for statement in statements if isinstance(statement, ast.Expr))


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
