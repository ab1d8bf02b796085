"""Text that code or a model chose, made safe for a person's terminal, a log or a page."""

import functools
import re

# Commands to a terminal (C0, DEL, C1), line ends that are none to a reader of lines, half letters, and what turns the
# rest of a line round.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LINE_CHARACTERS = "\n\t"  # that stay in a text of several lines


def escape_text(text: str, keep: str = "") -> str:
    """The text with control characters, those that reverse a line and lone surrogates written as Python's escapes.

    `keep` are characters that stay, such as line ends.
    """
    return text if _UNSAFE.search(text) is None else text.translate(_build_escapes(keep))


def escape_json(text: str) -> str:
    """Return JSON in which the same characters are JSON's escapes, and a lone surrogate is a question mark."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def _build_escapes(keep: str) -> dict[int, str]:
    """The escapes of all unsafe characters but those to keep: a look at each letter takes ten times as long."""
    unsafe = (chr(number) for number in range(0xE000) if _UNSAFE.match(chr(number)))
    return {ord(character): ascii(character)[1:-1] for character in unsafe if character not in keep}
