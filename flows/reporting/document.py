"""The parts that a report is made of, and what any form of it does to text: `markdown` and `html` render them.

Everything in it may have been chosen by code in a sandbox: variables, fields, their names, messages of errors. In both
forms such text is text: it opens no tag, no link, no image and no cell of a table.
"""

import base64
from dataclasses import dataclass, field

from ...sandbox.outcomes.text_escape import escape_text

VERBATIM_LINES = 40  # of a verbatim text that are shown, and
VERBATIM_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 1 is the page's own."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below a header; the row with the number `best` (from 0) stands out, where the form allows it."""

    header: list[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG picture, and the text for readers who do not see it."""

    svg: str
    alt: str

    @property
    def data_url(self) -> str:
        """The picture as an address that needs no network."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode('utf-8', 'replace')).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A text of several lines, as it is; `VERBATIM_LINES` and `VERBATIM_CHARACTERS` of it."""

    text: str

    @property
    def excerpt(self) -> str:
        """As much of it as is shown, without what a terminal would take for commands."""
        lines = self.text[: VERBATIM_CHARACTERS + 1].splitlines()
        clean = "\n".join(escape_text(line, keep="\t") for line in lines[:VERBATIM_LINES])
        is_cut = len(self.text) > VERBATIM_CHARACTERS or len(lines) > VERBATIM_LINES
        return clean[:VERBATIM_CHARACTERS] + ("\n..." if is_cut else "")


@dataclass(frozen=True, slots=True)
class Image:
    """A picture that code has shown, of a kind that runs nothing where a page has it as an image.

    `data_url` is an address that needs no network; `alt` is for readers who do not see it.
    """

    data_url: str
    alt: str


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that code has shown, for a frame in which nothing of it runs or is fetched; `alt` is the frame's title."""

    html: str
    alt: str


@dataclass(frozen=True, slots=True)
class Files:
    """Files that an execution brought home, by their paths or locations, of which a page shows the pictures."""

    paths: list[str]


@dataclass(frozen=True, slots=True)
class PageSection:
    """Parts that a page has; other forms have the `mention` of them, for they may take megabytes."""

    parts: list[Image | Markup | Heading | Verbatim | Text | Files]
    mention: str


Part = Heading | Text | Table | Picture | Verbatim | PageSection


def clean_line(text: str) -> str:
    """The text on one line, without what a terminal would take for commands or what turns the text around it."""
    return escape_text(" ".join(text.split("\n")))
