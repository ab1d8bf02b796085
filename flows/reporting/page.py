"""A page of a report, in parts, as Markdown for Prefect's UI and as HTML that needs no network.

Everything in it may have been chosen by code in a sandbox: variables, fields, their names, messages of errors. In both
forms such text is text: it opens no tag, no link, no image and no cell of a table.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...sandbox.text_escape import shown

LINES = 40  # of a verbatim text that are shown, and
LETTERS = 4000  # characters
# Signs that turn the direction of what stands around them, so that it reads as something else.
_TURNING = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], "\ufffd")
_SIGN = re.compile(r"[\\`*_\[\]<>#+!|~&:@$^{})=]|[.-](?![0-9])")  # what Markdown, or a maker of links, could act on


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
    """An SVG picture, and what is said in its place to whom does not see it."""

    svg: str
    alt: str


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A text of several lines, as it is; `LINES` and `LETTERS` of it."""

    text: str


Part = Heading | Text | Table | Picture | Verbatim

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem; border-bottom: 1px solid #dfe4ea; vertical-align: top; }
th { background: #f4f6f8; } tr.best td { background: #e4f5e6; font-weight: 600; }
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; } img { max-width: 100%; height: auto; }
"""
# Whatever got past the escaping could not load or run anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def as_markdown(parts: Iterable[Part]) -> str:
    """The parts as GitHub's Markdown, which Prefect's UI shows."""
    return "\n\n".join(filter(None, map(_markdown, parts))) + "\n"


def as_html(parts: Iterable[Part], title: str) -> str:
    """The parts as one HTML document."""
    body = "\n".join(filter(None, map(_html, parts)))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{_text(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def plain(text: str) -> str:
    """The text on one line for Markdown, with a backslash before what could be a sign there.

    Entities would be as safe, but Prefect's UI shows those that are numbers as they are written.
    """
    return _SIGN.sub(r"\\\g<0>", _line(text))


def _line(text: str) -> str:
    return shown(" ".join(text.split("\n"))).translate(_TURNING)


def _markdown(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {plain(text)}"
        case Text(text):
            return plain(text)
        case Table(header, rows):
            lines = [header, ["---"] * len(header)]
            marked = "\n".join(_row(map(plain, row)) for row in rows)
            return f"{_row(map(plain, lines[0]))}\n{_row(lines[1])}\n{marked}".rstrip("\n")
        case Picture(svg, alt):
            return f"![{plain(alt)}]({_data(svg)})"
        case Verbatim(text):
            said = _verbatim(text)
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", said)), default=0))
            return f"{fence}text\n{said}\n{fence}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _html(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"<h{level}>{_text(text)}</h{level}>"
        case Text(text):
            return f"<p>{_text(text)}</p>"
        case Table(header, rows, best):
            head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
            lines = [
                f"<tr{' class=best' if number == best else ''}>{''.join(f'<td>{_text(c)}</td>' for c in row)}</tr>"
                for number, row in enumerate(rows)
            ]
            return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody>\n</table>"
        case Picture(svg, alt):
            return f'<p><img src="{_data(svg)}" alt="{_text(alt)}"></p>'
        case Verbatim(text):
            return f"<pre>{html.escape(_verbatim(text))}</pre>"


def _text(text: str) -> str:
    return html.escape(_line(text))


def _verbatim(text: str) -> str:
    lines = text[: LETTERS + 1].splitlines()
    kept = "\n".join(shown(line, keep="\t").translate(_TURNING) for line in lines[:LINES])
    return kept[:LETTERS] + ("\n..." if len(text) > LETTERS or len(lines) > LINES else "")


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode('utf-8', 'replace')).decode('ascii')}"
