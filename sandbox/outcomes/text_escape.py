"""Text that code or a model chose, made safe for a person's terminal, a log or a page."""

import re

# Commands to a terminal (C0, DEL, C1), line ends that are none to a reader of lines, half letters, and what turns the
# rest of a line round.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LINE_CHARACTERS = "\n\t"  # that stay in a text of several lines


def escape_text(text: str, keep: str = "") -> str:
    """The text with control characters, those that reverse a line and lone surrogates written as Python's escapes.

    `keep` are characters that stay, such as line ends.
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)
