"""Code text from files and people: its encoding, its indent and its syntax tree."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from contextlib import suppress
from importlib.util import decode_source

from ..errors import ConfigurationError

INDENT = re.compile(r"(?:[ \t\f]*(?:#[^\r\n]*)?[\r\n])*([ \t]*)")  # group 1 is the first statement's indent
BETWEEN_STATEMENTS = ("NL", "COMMENT", "ENDMARKER")
# The name of another encoding in a comment (PEP 263).
DECLARATION = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)(?!utf-?8\b)[-\w.]+", re.ASCII | re.MULTILINE)


def decode_code(data: bytes, name: object) -> str:
    """Decode a file of code as Python would.

    The encoding is UTF-8, with or without a byte order mark, or the encoding that a comment in the first two lines
    declares (PEP 263). The comment in the returned text declares UTF-8, and lines end in a line feed.

    Args:
        data: The file's bytes.
        name: The file's name in messages.

    Raises:
        ConfigurationError: Python could not read the file.
    """
    try:
        return declare_utf8(decode_source(data))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the file {name} is not UTF-8 text ({error}): save it as UTF-8") from None


def declare_utf8(text: str) -> str:
    """Return the code with its encoding comment, if it has one, changed to UTF-8."""
    first_lines = "\n".join(text.split("\n", 2)[:2])
    return DECLARATION.sub(r"\1utf-8", first_lines, count=1) + text[len(first_lines) :]


def remove_indent(code: str) -> str:
    """Return the code without its first statement's indent. Lines that begin inside a string stay unchanged.

    If a later statement has less indent, the code stays unchanged, and Python refuses it.
    """
    first_statement = INDENT.match(code)
    assert first_statement is not None  # The pattern matches any text.
    indent = first_statement[1]
    if not indent:
        return code
    lines = io.StringIO(code, newline=None).readlines()
    lines_in_tokens: set[int] = set()  # numbers of lines that begin inside a token
    string_starts: list[int] = []  # lines of the f-strings around the current token
    level = 0  # Indented statements have a level of at least 1.
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            kind = tokenize.tok_name[token.type]
            if kind == "INDENT":
                level += 1
            elif kind == "DEDENT":
                level -= 1
            elif level == 0 and kind not in BETWEEN_STATEMENTS:
                return code
            start = token.start[0]
            if kind.endswith("STRING_START"):  # Since Python 3.12, an f-string is several tokens.
                string_starts.append(start)
            elif kind.endswith("STRING_END"):
                start = string_starts.pop()
            lines_in_tokens.update(range(start + 1, token.end[0] + 1))
    except IndentationError:
        return code
    except (tokenize.TokenError, SyntaxError, UnicodeError):
        pass  # Compiling reports the error.
    for index, line in enumerate(lines):
        if index + 1 not in lines_in_tokens:
            lines[index] = line.removeprefix(indent)
    return "".join(lines)


def parse_module(code: str) -> ast.Module:
    """Return the syntax tree of code. Raises SyntaxError, ValueError, MemoryError and RecursionError.

    Before 3.13, CPython adds up the tree depths of all threads that parse, and may raise a SystemError.
    """
    for _ in range(100):
        with suppress(SystemError):
            return ast.parse(code)
    return ast.parse(code)
