"""A report as GitHub's Markdown, which Prefect's UI shows."""

import re
from collections.abc import Iterable

from .document import Heading, PageSection, Part, Picture, Table, Text, Verbatim, clean_line

# What Markdown, or a reader that makes links of addresses, could act on.
_SPECIAL = re.compile(r"[\\`*_\[\]<>#+!|~&:@$^{})=]|[.-](?![0-9])")


def render_markdown(parts: Iterable[Part]) -> str:
    """The parts as one Markdown document."""
    return "\n\n".join(filter(None, map(_render_part, parts))) + "\n"


def escape_markdown(text: str) -> str:
    """The text on one line, with a backslash before what Markdown could act on.

    Entities would be as safe, but Prefect's UI shows those that are numbers as they are written.
    """
    return _SPECIAL.sub(r"\\\g<0>", clean_line(text))


def _render_part(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {escape_markdown(text)}"
        case Text(text):
            return escape_markdown(text)
        case Table(header, rows):
            lines = [_join_cells(map(escape_markdown, header)), _join_cells(["---"] * len(header))]
            return "\n".join([*lines, *(_join_cells(map(escape_markdown, row)) for row in rows)])
        case PageSection(_, mention):
            return escape_markdown(mention)
        case Picture(_, alt):
            return f"![{escape_markdown(alt)}]({part.data_url})"
        case Verbatim():
            excerpt = part.excerpt
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", excerpt)), default=0))
            return f"{fence}text\n{excerpt}\n{fence}"


def _join_cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
