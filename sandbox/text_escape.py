"""Text that code or a model chose, on a person's terminal, in a log or on a page."""

from __future__ import annotations

from unicodedata import category

TURNING = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # the rest of a line round


def escape_text(text: str, keep: str = "") -> str:
    """The text, in which what a terminal would take for a command, what turns a line round and what no encoding has are
    as Python writes them. `keep` are characters that stay, such as line ends.
    """
    return "".join(
        ascii(letter)[1:-1]
        if (category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in TURNING) and letter not in keep
        else letter
        for letter in text
    )
