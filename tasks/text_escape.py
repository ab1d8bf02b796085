"""Text that code or a model chose, made safe for a person's terminal, a log or a page."""

from unicodedata import category

BIDI_CONTROLS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # the rest of a line round


def escape_text(text: str, keep: str = "") -> str:
    """The text with control characters, those that reverse a line and lone surrogates written as Python's escapes.

    `keep` are characters that stay, such as line ends.
    """
    return "".join(
        ascii(letter)[1:-1]
        if (category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in BIDI_CONTROLS) and letter not in keep
        else letter
        for letter in text
    )
