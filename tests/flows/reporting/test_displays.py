"""What executions have shown is in a run's page: pictures as they are, HTML in a frame in which nothing of it runs."""

import html
import re
from pathlib import Path

import pytest

from rlm_batch import Result
from rlm_batch.flows.reporting.html import render_html
from rlm_batch.flows.reporting.markdown import render_markdown
from rlm_batch.flows.reporting.report import build_report
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import ReportSpec, RunRecord

from ...browser.chromium import Chromium

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
# Each way in which it could act leaves its trace in the title or asks this machine for a file.
HOSTILE = """
</iframe>"><script>top.document.title = document.title = "ran"</script><img src=x onerror="top.document.title = 'ran'">
<meta http-equiv=refresh content="0;url=http://127.0.0.1:1/refreshed"><img src="http://127.0.0.1:1/image.png">
<link rel=stylesheet href="http://127.0.0.1:1/style.css"><body onload="top.document.title = 'ran'">
<iframe src="http://127.0.0.1:1/frame"></iframe>
<form action="http://127.0.0.1:1/form"><button autofocus>go</button></form>
<svg xmlns="http://www.w3.org/2000/svg" onload="top.document.title = 'ran'"></svg><p id=end>"quoted" &amp; the end</p>
"""
SVG = (
    "<svg xmlns='http://www.w3.org/2000/svg' onload=\"top.document.title = 'ran'\"><script>top.document.title = 'ran'"
    "</script><image href='http://127.0.0.1:1/svg.png'/></svg>"
)


def build(metas: list[Meta]) -> tuple[str, str]:
    """The page, and the report as Markdown."""
    summary = RunSummary(ReportSpec("execution"))
    for meta in metas:
        summary.add(Result({}, meta))
    parts = build_report(summary, [RunRecord("batch", "/results", total=len(metas))])
    return render_html(parts, "the page", "/results"), render_markdown(parts)


SHOWN = Meta(
    index=1,
    variables={"x": 7},
    displays=(
        {"image/png": PNG, "text/plain": "<Figure>"},
        {"text/html": HOSTILE, "text/plain": "hostile"},
        {"image/svg+xml": SVG},
        {"image/png": '"><script>alert(1)</script>', "text/plain": "</pre><script>alert(1)</script>"},
        {"application/json": {"a": 1}},
    ),
    value_repr="hostile",
)


def test_a_page_has_pictures_beside_their_execution_and_markdown_a_mention() -> None:
    page, markdown = build([SHOWN, Meta(index=0, value=[1.5, "é"]), *(Meta(index=n, value=n) for n in range(2, 150))])
    assert (
        page.index("<h3>Execution 0</h3>") < page.index("[1.5, &#34;é&#34;]") < page.index("<h3>Execution 1 with x=7")
    )
    assert f'<img src="data:image/png;base64,{PNG}"' in page
    assert page.count("<iframe") == 1
    frame = re.search(r'<iframe sandbox loading="lazy" title="[^"]*" srcdoc="([^"]*)"></iframe>', page)
    assert frame is not None
    assert html.unescape(frame[1]).endswith(HOSTILE)
    assert "default-src 'none'" in html.unescape(frame[1])
    outside = page.replace(frame[0], "")
    assert not re.search(r"<(script|svg|meta http-equiv=.?refresh|form|link)", outside)
    assert "&lt;/pre&gt;&lt;script&gt;" in outside
    assert "[application/json: a form that this page has no place for]" in outside
    assert "What 50 more have shown is in the ledger." in outside
    assert (
        "What 150 executions displayed, ended with, or brought home, is in the page that rlm\\-batch report writes"
        in markdown
    )
    assert "hostile" not in markdown
    assert PNG not in markdown


@pytest.mark.full
@pytest.mark.requires("chromium")
def test_nothing_that_code_displayed_runs_or_is_fetched_in_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(build([SHOWN])[0])
    with Chromium(1280, 2400) as browser:
        browser.goto(file.as_uri())
        browser.until(lambda: browser.js("document.images.length === 2 && document.images[1].complete"), "the page")
        assert browser.js("document.images[0].naturalWidth") == 1
        browser.js("document.querySelector('iframe').scrollIntoView()")
        browser.until(lambda: browser.js("document.querySelector('iframe').contentDocument") is None, "a frame apart")
        assert browser.js("document.title") == "the page"
        assert [address for address in browser.asked if address.startswith("http")] == []


def test_files_have_links_that_move_with_the_page_and_names_that_are_text() -> None:
    names = (
        '/results/files/1/<b>" onload=x.PNG',
        "/elsewhere/a.txt",
        "s3://bucket/a.png",
        "javascript:alert(1)//.png",
        "/\ud800",
    )
    page, _ = build([Meta(index=1, collected=names, not_collected=("<i> is a link",))])
    assert re.findall('(?:href|src)="([^"]*)"', page) == [
        *["./files/1/%3Cb%3E%22%20onload%3Dx.PNG"] * 3,
        "file:///elsewhere/a.txt",
    ]
    assert "<li>s3://bucket/a.png<" in page
    assert "<li>javascript:alert(1)//.png<" in page
    assert "&lt;i&gt; is a link" in page
    assert "<b>" not in page
    assert "5 collected; notes on others: 1" in page
