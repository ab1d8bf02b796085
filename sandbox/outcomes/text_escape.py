"""Escaping of untrusted text for a terminal, a log or a web page."""

import functools
import re

# Terminal control characters (C0, DEL, C1), Unicode line separators, text direction marks and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LINE_CHARACTERS = "\n\t"  # kept in a text of several lines


def escape_text(text: str, keep: str = "") -> str:
    """Return the text with control characters, text direction marks and lone surrogates as Python escapes.

    `keep` lists characters to leave unchanged, such as line ends.
    """
    return text if _UNSAFE.search(text) is None else text.translate(_build_escapes(keep))


def escape_json(text: str) -> str:
    """Return JSON with the same characters as JSON escapes, and lone surrogates as question marks."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def _build_escapes(keep: str) -> dict[int, str]:
    """Return a table of escapes for `str.translate`, which is ten times as fast as a check of each character."""
    unsafe = (chr(number) for number in range(0xE000) if _UNSAFE.match(chr(number)))
    return {ord(character): ascii(character)[1:-1] for character in unsafe if character not in keep}
