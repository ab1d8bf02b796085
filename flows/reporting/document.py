"""The report on a run as one HTML page that needs no network, and as Markdown for Prefect's UI.

Code in a sandbox may have chosen any text in a report: variables, fields, their names, messages of errors. In both
forms each value of the templates is escaped, unless a filter has made it `Markup`: it cannot open a tag, a link, an
image or a table's cell.
"""

import base64
import json
import mimetypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ...sandbox.outcomes.text_escape import IMAGES, LINE_CHARACTERS, escape_text
from .display_html import rebuild_html
from .report import ReportContent, name_execution
from .summary import MAX_PARTS, MAX_SHOWN_BYTES
from .table import BEST_MARK
from .turns import MORE, TurnsReader

# A second barrier after the escaping, and the one that keeps displayed CSS from fetching: the page runs nothing, and
# loads only images, from data URLs or from files.
FRAME_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
POLICY = f"{FRAME_POLICY} 'self' file:"
FRAME_HEAD = (
    f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{FRAME_POLICY}">'
)
PHOTOS = (".png", ".jpg", ".jpeg", ".gif", ".webp")
PICTURES = (*PHOTOS, ".svg")  # As an image in a page, even SVG runs and fetches nothing.
# Files that run nothing when a browser opens them. Other files can run code: .svg, .html, .xhtml, .xml, .mht, .pdf,
# and files whose type the browser guesses from their content.
LINKED = (*PHOTOS, ".txt", ".csv", ".json")
# Forms of a display that a page can show: pictures, HTML and text.
SVG, HTML, TEXT = "image/svg+xml", "text/html", "text/plain"
EXCERPT_LINES = 40
EXCERPT_CHARACTERS = 4000
# Markdown could interpret these characters, or a Markdown reader could turn addresses into links.
_SPECIAL = re.compile(r"[\\`*_\[\]<>#+!|~&:@$^{})=]|[.-](?![0-9])")


def render_html(
    report: ReportContent, folder: str = "", files: Path | None = None, turns: TurnsReader | None = None
) -> str:
    """Return the report as one HTML page that needs no network.

    Args:
        report: The content.
        folder: The folder of the page. Links to files below it are relative, so that the folder can be moved.
        files: The folder of the collected files whose pictures the page contains; None to refer to them.
        turns: Reader of the turns and queries of language models; None to leave them out.
    """
    environment = _make_environment(clean_line, autoescape=True)
    environment.filters |= {
        "excerpt": lambda text: escape(make_excerpt(text)),
        "lines": lambda text: escape(escape_text(text, keep=LINE_CHARACTERS)),
        "frame": _frame,
        "to_json": partial(json.dumps, ensure_ascii=False),
    }
    template = environment.get_template("page.html.jinja")
    return template.render(
        report=report, policy=Markup(POLICY), best_mark=BEST_MARK, max_parts=MAX_PARTS,
        choose_form=_choose_form, turns=turns, more=MORE, name_execution=name_execution,
        locate=partial(_locate_file, folder, _PictureReader(files)),
    )  # fmt: skip


def render_markdown(report: ReportContent) -> str:
    """Return the report as a document in GitHub's Markdown, without displays and files, which may take megabytes."""
    environment = _make_environment(escape_markdown, autoescape=False)
    environment.filters |= {"fenced": _fence, "rendered": Markup}
    return environment.get_template("artifact.md.jinja").render(report=report)


def _make_environment(clean: Callable[[str], str], *, autoescape: bool) -> Environment:
    """Return an environment for a template, in which `clean` gets each value that is not `Markup`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=autoescape, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(str(value)),
    )  # fmt: skip
    environment.filters["svg_url"] = lambda svg: _make_data_url(SVG, svg.encode("utf-8", "replace"))
    return environment


def clean_line(text: str) -> str:
    """Return the text on one line, without commands for a terminal or signs that reverse the direction of text."""
    return escape_text(text.replace("\n", " "))


def escape_markdown(text: str) -> str:
    """Return the text on one line, with a backslash before each character that Markdown could interpret.

    HTML entities would be as safe, but Prefect's UI shows the source of numeric entities.
    """
    return _SPECIAL.sub(r"\\\g<0>", clean_line(text))


def make_excerpt(text: str) -> str:
    """Return at most `EXCERPT_LINES` and `EXCERPT_CHARACTERS` of a text, without commands for a terminal."""
    lines = text[: EXCERPT_CHARACTERS + 1].splitlines()
    excerpt = "\n".join(escape_text(line, keep="\t") for line in lines[:EXCERPT_LINES])[:EXCERPT_CHARACTERS]
    is_cut = len(text) > EXCERPT_CHARACTERS or len(lines) > EXCERPT_LINES
    return f"{excerpt}\n..." if is_cut else excerpt


def _fence(text: str) -> Markup:
    """Return an excerpt as a block of code, whose fence is longer than any in the excerpt."""
    excerpt = make_excerpt(text)
    longest = max(map(len, re.findall("`+", excerpt)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}text\n{excerpt}\n{fence}")


def _frame(text: str) -> Markup:
    """Return displayed HTML as the value of a frame's attribute `srcdoc`."""
    return escape(FRAME_HEAD + rebuild_html(text))


def _make_data_url(kind: str, data: bytes) -> Markup:
    return Markup(f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}")


def _choose_form(display: dict[str, Any]) -> tuple[str, str, str]:
    """Return the best form of a display that a page can show: its kind (picture, html or text), data and title."""
    texts = {name: value for name, value in display.items() if isinstance(value, str)}
    for name in IMAGES:
        with suppress(ValueError):  # A damaged image is ignored.
            if name in texts:
                image = base64.b64decode("".join(texts[name].split()), validate=True)
                return "picture", _make_data_url(name, image), f"{name}, {len(image):,} bytes"
    if SVG in texts:
        image = texts[SVG].encode("utf-8", "replace")
        return "picture", _make_data_url(SVG, image), f"{SVG}, {len(image):,} bytes"
    if HTML in texts:
        size = len(texts[HTML].encode("utf-8", "replace"))
        return "html", texts[HTML], f"{HTML}, {size:,} bytes"
    return "text", texts.get(TEXT, f"[{', '.join(display)}: this page cannot show it]"), ""


class _PictureReader:
    """A reader of collected pictures, as data URLs of at most `MAX_SHOWN_BYTES` together."""

    def __init__(self, files: Path | None) -> None:
        self._files = None if files is None else files.resolve()
        self._free_bytes = MAX_SHOWN_BYTES

    def read(self, path: str) -> str:
        """Return a picture as a data URL, or an empty text if it is too large or not a file of the folder."""
        file = Path(path).resolve()  # The ledger may name any path.
        is_collected = self._files is not None and file.is_relative_to(self._files) and file.is_file()
        if not is_collected or file.stat().st_size > self._free_bytes:
            return ""
        data = file.read_bytes()
        self._free_bytes -= len(data)
        return _make_data_url(mimetypes.guess_type(file.name)[0] or "", data)


def _locate_file(folder: str, pictures: _PictureReader, path: str) -> tuple[str, str, str]:
    """Return a file's name, the address for a link to it, and the address for an image. An address may be empty."""
    name, address = path, ""
    suffix = PurePath(path).suffix.lower()
    if folder and path.startswith(f"{folder}/"):
        name = path.removeprefix(f"{folder}/")
        address = f"./{quote(name, errors='replace')}"
    elif os.path.isabs(path):
        with suppress(UnicodeError):  # No file has a name that is no Unicode.
            address = Path(path).as_uri()
    link = address if suffix in LINKED else ""
    image = address if suffix in PICTURES else ""
    if image:
        with suppress(OSError):  # The file is unreadable.
            image = pictures.read(path) or image
    return name, link, image
