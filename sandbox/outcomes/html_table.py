"""HTML tables for notebooks. All text in them is untrusted."""

import html
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from .text_escape import escape_text

MAX_CELL_CHARACTERS = 1_000

_brief = reprlib.Repr()  # shortens large values, such as a list of a million numbers
_brief.maxlist = _brief.maxdict = _brief.maxtuple = 100
_brief.maxstring = _brief.maxlong = _brief.maxother = MAX_CELL_CHARACTERS


def render_html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table as HTML. All cells are escaped, both HTML and control characters."""
    head = "".join(f"<th>{_escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def render_fields(outputs: dict[str, Any]) -> str:
    """Return a table with one row per field of a result. Long values are shortened."""
    return render_html_table(("field", "value"), ((name, _brief.repr(value)) for name, value in outputs.items()))


def _escape(text: str) -> str:
    return html.escape(escape_text(text[:MAX_CELL_CHARACTERS]))
