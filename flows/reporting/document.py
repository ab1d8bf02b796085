"""The parts of a report, and the report as Markdown, for Prefect's UI. `html.py` makes a page of these parts.

Code in a sandbox may have chosen any text in a report: variables, fields, their names, messages of errors. In both
forms such text stays text: it cannot open a tag, a link, an image or a table's cell.
"""

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from ...sandbox.outcomes.text_escape import escape_text

VERBATIM_LINES = 40
VERBATIM_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading. Level 1 is the page's title."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below a header. A page highlights the row with the number `best`, counted from 0."""

    header: list[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, as an address that needs no network, and its alternative text.

    A page shows it as an image, and images run no code, even if they are SVG.
    """

    data_url: str
    alt: str

    @classmethod
    def from_bytes(cls, kind: str, data: bytes, alt: str) -> Self:
        """Return the picture with these bytes, of a type such as `image/png`."""
        return cls(f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}", alt)

    @classmethod
    def from_svg(cls, svg: str, alt: str) -> Self:
        """Return an SVG picture."""
        return cls.from_bytes("image/svg+xml", svg.encode("utf-8", "replace"), alt)


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A text of several lines, of which at most `VERBATIM_LINES` and `VERBATIM_CHARACTERS` are shown."""

    text: str

    @property
    def excerpt(self) -> str:
        """The part of the text that is shown, without commands for a terminal."""
        lines = self.text[: VERBATIM_CHARACTERS + 1].splitlines()
        clean = "\n".join(escape_text(line, keep="\t") for line in lines[:VERBATIM_LINES])
        is_cut = len(self.text) > VERBATIM_CHARACTERS or len(lines) > VERBATIM_LINES
        return clean[:VERBATIM_CHARACTERS] + ("\n..." if is_cut else "")


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that code displayed, for a frame in which it can neither run nor fetch anything. `alt` is the title."""

    html: str
    alt: str


@dataclass(frozen=True, slots=True)
class Files:
    """Collected files, by their paths or locations. A page shows those that are pictures."""

    paths: list[str]


SectionPart = Picture | Markup | Heading | Verbatim | Text | Files


@dataclass(frozen=True, slots=True)
class PageSection:
    """Parts for a page only: they may take megabytes. Markdown has the `mention` in their place."""

    parts: list[SectionPart]
    mention: str


Part = Heading | Text | Table | Picture | Verbatim | PageSection


def clean_line(text: str) -> str:
    """Return the text on one line, without commands for a terminal or signs that reverse the direction of text."""
    return escape_text(" ".join(text.split("\n")))


# Markdown could interpret these characters, or a Markdown reader could turn addresses into links.
_SPECIAL = re.compile(r"[\\`*_\[\]<>#+!|~&:@$^{})=]|[.-](?![0-9])")


def render_markdown(parts: Iterable[Part]) -> str:
    """Return the parts as a document in GitHub's Markdown."""
    return "\n\n".join(filter(None, map(_render_part, parts))) + "\n"


def escape_markdown(text: str) -> str:
    """Return the text on one line, with a backslash before each character that Markdown could interpret.

    HTML entities would be as safe, but Prefect's UI shows the source of numeric entities.
    """
    return _SPECIAL.sub(r"\\\g<0>", clean_line(text))


def _render_part(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {escape_markdown(text)}"
        case Text(text):
            return escape_markdown(text)
        case Table(header, rows):
            cells = [[*map(escape_markdown, row)] for row in (header, *rows)]
            cells.insert(1, ["---"] * len(header))
            return "\n".join(f"| {' | '.join(row)} |" for row in cells)
        case PageSection(_, mention):
            return escape_markdown(mention)
        case Picture(data_url, alt):
            return f"![{escape_markdown(alt)}]({data_url})"
        case Verbatim():
            excerpt = part.excerpt
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", excerpt)), default=0))
            return f"{fence}text\n{excerpt}\n{fence}"
