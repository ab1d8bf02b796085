"""Text that code or a model chose, on a person's terminal, in a log or on a page."""

from __future__ import annotations

from unicodedata import category


def shown(text: str, keep: str = "") -> str:
    """The text, in which what a terminal would take for a command and what no encoding has are as Python writes them.
    `keep` are characters that stay, such as line ends.
    """
    return "".join(
        ascii(letter)[1:-1] if category(letter) in ("Cc", "Cs", "Zl", "Zp") and letter not in keep else letter
        for letter in text
    )
