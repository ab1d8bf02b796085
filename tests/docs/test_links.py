"""Links of the documentation: each has an existing target, and the index and the README reach every page."""

import re

from .pages import PAGES, ROOT, anchors, links

BESIDE = ["CONTRIBUTING.md", "CHANGELOG.md"]  # pages of the repository outside the manual
MANUAL = [page for page in PAGES if page not in ("README.md", "docs/index.md")]


def test_every_link_leads_to_an_existing_file_and_heading() -> None:
    broken: list[str] = []
    for page in [*PAGES, *BESIDE]:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
            if re.match(r"https?://", link):
                continue
            is_there = target.is_relative_to(ROOT) and target.is_file()
            if not is_there or (anchor and anchor not in anchors(str(target.relative_to(ROOT)))):
                broken.append(f"{page}: {link}")
    assert broken == []


def test_the_index_and_readme_link_to_every_page() -> None:
    for start in ("docs/index.md", "README.md"):
        reached = {str(((ROOT / start).parent / link.partition("#")[0]).resolve()) for link in links(start)}
        assert [page for page in MANUAL if str(ROOT / page) not in reached] == [], start
