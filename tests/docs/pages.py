"""The pages of the documentation, README.md among them, and what is in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: the page that it is on, its language, and its text."""

    page: str
    language: str
    text: str


def read_page(page: str) -> str:
    """The text of a page, by its path below the repository's root."""
    return (ROOT / page).read_text()


def read_prose(page: str) -> str:
    """The text of a page without its blocks of code."""
    return FENCE.sub("", read_page(page))


def blocks(language: str) -> list[Block]:
    """All blocks in that language, page after page."""
    return [
        Block(page, found, text)
        for page in PAGES
        for found, text in FENCE.findall(read_page(page))
        if found == language
    ]


def commands(page: str) -> list[str]:
    """The lines of a page's shell blocks."""
    return [line for block in blocks("sh") if block.page == page for line in block.text.splitlines()]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", read_prose(page))


def sections(page: str) -> dict[str, str]:
    """The text below each second-level heading of a page, by the heading."""
    first, *rest = re.split(r"^## (.+)$", read_page(page), flags=re.MULTILINE)
    return {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in a text, headers left out."""
    lines = [line.strip() for line in text.splitlines()]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not below.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def names(cell: str) -> list[str]:
    """The names in a cell that are marked as code."""
    return re.findall(r"`([^`]+)`", cell)
