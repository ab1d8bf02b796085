"""The text of code as files, people and models have it: encodings, Markdown fences, and indents."""

from __future__ import annotations

import codecs
import io
import re
import textwrap
import tokenize

from ..errors import ConfigurationError

# Outside of texts and comments no Python has such a mark. Words may stand before it.
FENCE_LINE = re.compile(r"^[^#'\"`\n]*(?P<mark>```+)[ \t]*(?P<tag>[^\s`]*)[^\n`]*$", re.MULTILINE)
PYTHON_TAGS = ("py", "py3", "python", "python3", "ipython", "ipython3", "repl")
QUOTES = ('"""', "'''")
DECLARATION = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+", re.ASCII | re.MULTILINE)  # as in PEP 263


def decode_code(data: bytes, name: object) -> str:
    """Return the text of a file of code in the encoding that Python would read it in.

    That is UTF-8, with or without a byte order mark, or what a comment in the first two lines declares (PEP 263). In
    the text that is returned the comment declares UTF-8, and lines end in a line feed.

    Raises:
        ConfigurationError: Python could not read the file, which the message calls `name`.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigurationError(
            f"the file {name} is UTF-16, which Python does not read: convert it, as with iconv -f UTF-16 -t UTF-8"
        )
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.StringIO(data.decode(encoding), newline=None).read()
    except (SyntaxError, UnicodeDecodeError) as error:
        if isinstance(error, SyntaxError) and "unknown encoding" in str(error):
            raise ConfigurationError(
                f"the file {name} declares an encoding that Python does not know: correct the line with coding: in it"
            ) from None
        raise ConfigurationError(
            f"the file {name} is not UTF-8 text: it should be Python code. Save it as UTF-8, or say what it is in its "
            "first line, as in # coding: latin-1"
        ) from None
    return text if encoding.startswith("utf-8") else declare_utf8(text)


def declare_utf8(text: str) -> str:
    """Return the code with UTF-8 as the encoding that it declares, if it declares one."""
    first_lines = "\n".join(text.split("\n", 2)[:2])
    return DECLARATION.sub(r"\1utf-8", first_lines, count=1) + text[len(first_lines) :]


def clean_code(code: str) -> str:
    """Return the code that a text has, without what is around it; lines keep their numbers.

    That is a byte order mark, Markdown with a fence around the code, and an indent of all lines. Of several fences the
    first is taken that is said to be Python, and otherwise the first without a language. A fence may be cut off.
    """
    code = code.removeprefix("\ufeff")
    if "```" in code:
        code = _take_fenced(code)
    if code[:1].isspace():
        first_line = code.lstrip().partition("\n")[0]
        dedented = textwrap.dedent(code)
        if dedented.lstrip("\n").startswith(first_line):  # or it is a comment that alone has an indent
            return dedented
    return code


def _take_fenced(code: str) -> str:
    """Return the code in the fence, with empty lines for those before it; the text itself if there is none.

    What follows triple quotes may be a text of the code's, which has a fence of its own.
    """
    texts = min((place for place in map(code.find, QUOTES) if place >= 0), default=len(code))
    found = None
    opening = FENCE_LINE.search(code)
    while opening is not None and opening.start() < texts:
        start = opening.end() + 1
        inner = FENCE_LINE.match(code, start)
        if inner is not None and inner["tag"]:  # a fence around a fence
            opening = inner
            continue
        end, after = _find_end(code, start)
        tag = opening["tag"].strip("{.}").lower()
        if code[start:end].strip() and (tag in PYTHON_TAGS or (not tag and found is None)):
            found = start, end
            if tag:
                break
        opening = FENCE_LINE.search(code, after)
    if found is None:
        return code
    start, end = found
    return "\n" * code.count("\n", 0, start) + code[start:end]


def _find_end(code: str, start: int) -> tuple[int, int]:
    """Return where the block ends that begins there, and where what follows its closing fence begins."""
    counts, place = [0] * len(QUOTES), start
    for closing in FENCE_LINE.finditer(code, start):
        counts = [
            count + code.count(quotes, place, closing.start()) for count, quotes in zip(counts, QUOTES, strict=True)
        ]
        place = closing.start()
        if not closing["tag"] and not any(count % 2 for count in counts):
            return closing.start("mark"), closing.end()
    return start + len(code[start:].rstrip().rstrip("`")), len(code)  # cut off
