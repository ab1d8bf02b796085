"""The pages of the documentation, including README.md, and their parts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: its page, its language and its text."""

    page: str
    language: str
    text: str


def read_page(page: str) -> str:
    """Return the text of a page, by its path below the repository's root."""
    return (ROOT / page).read_text()


def read_prose(page: str) -> str:
    """Return the text of a page without its blocks of code."""
    return FENCE.sub("", read_page(page))


def blocks(language: str) -> list[Block]:
    """Return all blocks in that language, in the order of the pages."""
    return [
        Block(page, fence_language, text)
        for page in PAGES
        for fence_language, text in FENCE.findall(read_page(page))
        if fence_language == language
    ]


def commands(page: str) -> list[str]:
    """Return the lines of a page's shell blocks."""
    return [line for block in blocks("sh") if block.page == page for line in block.text.splitlines()]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", read_prose(page))


def sections(page: str) -> dict[str, str]:
    """Return the text below each second-level heading of a page, by heading."""
    first, *rest = re.split(r"^## (.+)$", read_page(page), flags=re.MULTILINE)
    return {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}


def table_rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a text's tables, without headers."""
    lines = [line.strip() for line in text.splitlines()]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not below.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def names(cell: str) -> list[str]:
    """Return the names that a cell marks as code."""
    return re.findall(r"`([^`]+)`", cell)
