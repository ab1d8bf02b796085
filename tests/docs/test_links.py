"""A reader can jump: every link leads somewhere, and every page can be reached, says whom it is for, and leads on."""

import re

import pytest

from .pages import PAGES, ROOT, anchors, links, read_page, sections

BESIDE = ["CONTRIBUTING.md", "CHANGELOG.md"]  # pages of the repository that are no manual
MANUAL = [page for page in PAGES if page not in ("README.md", "docs/index.md")]


@pytest.mark.parametrize("page", [*PAGES, *BESIDE])
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: str) -> None:
    broken: list[str] = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
        if re.match(r"https?://", link):
            continue
        there = target.is_relative_to(ROOT) and target.is_file()
        if not there or (anchor and anchor not in anchors(str(target.relative_to(ROOT)))):
            broken.append(link)
    assert broken == []


def test_the_index_and_the_readme_lead_to_every_page() -> None:
    for start in ("docs/index.md", "README.md"):
        reached = {str(((ROOT / start).parent / link.partition("#")[0]).resolve()) for link in links(start)}
        assert [page for page in MANUAL if str(ROOT / page) not in reached] == [], start


@pytest.mark.parametrize("page", MANUAL)
def test_a_page_says_whom_it_is_for_and_ends_with_links_on(page: str) -> None:
    title, _, first = read_page(page).partition("\n\n")
    assert title.startswith("# ")
    assert first.startswith("This page is for you if ")
    heading, last = [*sections(page).items()][-1]
    assert heading == "Read on"
    assert "](" in last


def test_the_readme_is_short() -> None:
    assert len(read_page("README.md").splitlines()) <= 130
