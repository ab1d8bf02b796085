"""Escaping of untrusted text for a terminal, a log or a web page, and HTML tables of untrusted text for notebooks."""

import functools
import html
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Terminal control characters (C0, DEL, C1), Unicode line separators, text direction marks and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HIDDEN = "[...]"  # the replacement of a secret
_CUT = re.compile(r"['\"]?\n\[\.\.\. [0-9,]+ characters left out \.\.\.\]\n?")  # The driver cuts long texts.
LINE_CHARACTERS = "\n\t"  # kept in a text of several lines
MAX_CELL_CHARACTERS = 1_000
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")  # pages show these

_brief = reprlib.Repr()  # shortens large values, such as a list of a million numbers
_brief.maxlist = _brief.maxdict = _brief.maxtuple = 100
_brief.maxstring = _brief.maxlong = _brief.maxother = MAX_CELL_CHARACTERS


def escape_text(text: str, keep: str = "") -> str:
    """Return the text with control characters, text direction marks and lone surrogates as Python escapes.

    Characters of `keep`, such as line ends, stay unchanged.
    """
    return text if _UNSAFE.search(text) is None else text.translate(_build_escapes(keep))


def escape_json(text: str) -> str:
    """Return JSON text with JSON escapes for control characters and direction marks. Lone surrogates become "?"."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.encode("utf-8", "replace").decode("utf-8"))


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value in which `change` was applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change_texts(name, change): change_texts(item, change) for name, item in value.items()}  # type: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return type(value)(change_texts(item, change) for item in value)  # type: ignore[reportUnknownVariableType]
    return value


class SecretFilter:
    """A filter that replaces secrets in a text by `HIDDEN`. `forms` are the secrets' spellings, longest first."""

    def __init__(self, forms: Sequence[str]) -> None:
        self._forms = forms

    def __call__(self, text: str) -> str:
        """Return the text without secrets. Beside the driver's cut, parts of secrets are replaced, too."""
        cut = _CUT.search(text)
        if cut is None:
            return self._replace(text)
        return self.hide_before_cut(text[: cut.start()]) + cut[0] + self.hide_after_cut(text[cut.end() :])

    def hide_before_cut(self, text: str) -> str:
        """Return the text without secrets and without the part of a secret at its end."""
        parts = (form[:size] for form in self._forms for size in range(len(form), 0, -1))
        part = max(filter(text.endswith, parts), key=len, default="")
        return self._replace(text.removesuffix(part)) + (HIDDEN if part else "")

    def hide_after_cut(self, text: str) -> str:
        """Return the text without secrets and without the part of a secret at its begin."""
        parts = (form[-size:] for form in self._forms for size in range(len(form), 0, -1))
        part = max(filter(text.startswith, parts), key=len, default="")
        return (HIDDEN if part else "") + self._replace(text.removeprefix(part))

    def _replace(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return text


@functools.cache
def _build_escapes(keep: str) -> dict[int, str]:
    """Return a table of escapes for `str.translate`, which is ten times as fast as a check of each character."""
    escapes: dict[int, str] = {}
    for number in range(0xE000):  # A surrogate is the last unsafe character.
        character = chr(number)
        if _UNSAFE.match(character) and character not in keep:
            escapes[number] = ascii(character)[1:-1]
    return escapes


def render_html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table as HTML. All cells are escaped, both HTML and control characters."""
    lines = [_render_html_row("td", row) for row in rows]
    head = _render_html_row("th", header)
    return f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>"


def render_result(outputs: dict[str, Any], displays: Iterable[dict[str, Any]]) -> str:
    """Return a table with one row per field of a result, and the displayed images. Long values are shortened."""
    table = render_html_table(("field", "value"), ((name, _brief.repr(value)) for name, value in outputs.items()))
    return "".join([table, *map(_render_image, displays)])


def _render_image(display: dict[str, Any]) -> str:
    """Return the image of a display, or an empty text: HTML of a sandbox could run code in a notebook."""
    for kind in IMAGES:
        if isinstance(display.get(kind), str):
            return f'<p><img src="data:{kind};base64,{html.escape(display[kind])}"></p>'
    return ""


def _render_html_row(tag: str, cells: Sequence[str]) -> str:
    texts = [html.escape(escape_text(cell[:MAX_CELL_CHARACTERS])) for cell in cells]
    return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"
