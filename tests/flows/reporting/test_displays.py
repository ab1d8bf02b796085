"""Displayed output in a run's page: images unchanged, and HTML in a frame where no script runs."""

import html
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas
import pytest

from rlm_batch import Result
from rlm_batch.flows.reporting.display_html import rebuild_html
from rlm_batch.flows.reporting.document import render_html, render_markdown
from rlm_batch.flows.reporting.report import build_report
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import ReportSpec, RunRecord

from ...browser.chromium import Chromium

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
# Every script or load that succeeds would change the title or request a file from this machine.
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


def build(metas: list[Meta], folder: str = "/results") -> tuple[str, str]:
    """Return the page for a folder, and the report as Markdown."""
    summary = RunSummary(ReportSpec("execution"))
    for meta in metas:
        summary.add(Result({}, meta))
    report = build_report(summary, [RunRecord("the page", "/results", total=len(metas))])
    return render_html(report, folder), render_markdown(report)


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


def test_a_page_shows_pictures_and_markdown_mentions_them() -> None:
    page, markdown = build([SHOWN, Meta(index=0, value=[1.5, "é"]), *(Meta(index=n, value=n) for n in range(2, 150))])
    assert (
        page.index("<h3>Execution 0</h3>") < page.index("[1.5, &#34;é&#34;]") < page.index("<h3>Execution 1 with x=7")
    )
    assert f'<img src="data:image/png;base64,{PNG}"' in page
    assert page.count("<iframe") == 1
    frame = re.search(r'<iframe sandbox loading="lazy" title="[^"]*" srcdoc="([^"]*)"></iframe>', page)
    assert frame is not None
    assert html.unescape(frame[1]).rstrip().endswith('<p id="end">"quoted" &amp; the end</p>')
    assert "default-src 'none'" in html.unescape(frame[1])
    outside = page.replace(frame[0], "")
    assert not re.search(r"<(script|svg|meta http-equiv=.?refresh|form|link)", outside)
    assert "&lt;/pre&gt;&lt;script&gt;" in outside
    assert "[application/json: this page cannot show it]" in outside
    assert "The displays of 50 more are in the ledger." in outside
    assert "The displays and files of 150 executions are in the page that rlm\\-batch report writes" in markdown
    assert "hostile" not in markdown
    assert PNG not in markdown


# Each item gets its own `HOST`. The test detects every connection, also one without a request.
FETCHING = (
    *(f'<link rel={rel} href="https://HOST">' for rel in ("preconnect", "dns-prefetch", "prefetch", "stylesheet")),
    '<LINK/REL=&#112;reconnect/HREF=https://HOST>',
    '<meta http-equiv=refresh content="0;url=https://HOST">',
    '<meta http-equiv=Link content="<https://HOST>; rel=preconnect">',
    '<base href="https://HOST"><img src=picture.png>',
    '<img src="https://HOST" srcset="https://HOST 1x" longdesc="https://HOST" attributionsrc="https://HOST">',
    '<picture><source srcset="https://HOST"><img></picture><input type=image src="https://HOST">',
    '<video poster="https://HOST" src="https://HOST" autoplay></video><audio src="https://HOST" autoplay></audio>',
    '<table background="https://HOST"><tr><td background="https://HOST">x</table><body background="https://HOST">',
    '<object data="https://HOST"></object><embed src="https://HOST"><iframe src="https://HOST"></iframe>',
    '<iframe srcdoc="<link rel=preconnect href=https://HOST>"></iframe><frameset><frame src="https://HOST"></frameset>',
    '<style>p { background: url(https://HOST) } @import "https://HOST";</style><p>x</p>',
    '<style>@font-face { font-family: f; src: url(https://HOST) } p { font-family: f }</style><p>x</p>',
    "<style>p { background: u/**/rl(https://HOST), U\\72l(//HOST), image-set('https://HOST' 1x) }</style><p>x</p>",
    "<style>q{content:'\\\n'} \"\n p{background:url(https://HOST)} p{background:src('https://HOST')}</style><p>x</p>",
    '<p style="--a: url(https://HOST); background: var(--a); cursor: url(https://HOST), auto">x</p>',
    '<p style="background: &#117;rl(https://HOST); mask: -webkit-image-set(url(https://HOST) 1x)">x</p>',
    '<svg><foreignObject><link xmlns="http://www.w3.org/1999/xhtml" rel=preconnect href="https://HOST"></svg>',
    '<svg><image href="https://HOST"/><use href="https://HOST#a"/><style>@import "https://HOST";</style></svg>',
    '<math href="https://HOST"><mtext><link rel=preconnect href="https://HOST"></mtext></math>',
    '<math><mtext><table><mglyph><style><!--</style><link rel=preconnect href="https://HOST">--></style>',
    '<style><p title="</style><link rel=preconnect href=https://HOST>">',
    "<p title='\"><link rel=preconnect href=\"https://HOST\">'>x</p><!--><link rel=preconnect href='https://HOST'>-->",
    '<template shadowrootmode=open><link rel=preconnect href="https://HOST"></template>',
    '<noscript><link rel=preconnect href="https://HOST"></noscript><!-- --!><link rel=preconnect href="https://HOST">-->',
    '<form action="https://HOST"><button formaction="https://HOST" autofocus>go</button></form>',
    '<a href="https://HOST" ping="https://HOST" rel=preconnect>x</a><ins cite="https://HOST">x</ins>',
    '<script type=speculationrules>{"prefetch": [{"source": "list", "urls": ["https://HOST"]}]}</script>',
)  # fmt: skip
END = "</foreignObject></svg>"
SVG_TAG = '<svg xmlns="http://www.w3.org/2000/svg">'
SVG_FETCHING = (
    f'{SVG_TAG}<foreignObject><link xmlns="http://www.w3.org/1999/xhtml" rel="preconnect" href="https://HOST"/>{END}',
    f'{SVG_TAG}<style>@import "https://HOST";</style><image href="https://HOST"/></svg>',
)


@pytest.mark.full
@pytest.mark.requires("chromium")
def test_displays_run_and_load_nothing_in_a_browser(tmp_path: Path) -> None:
    hosts = iter(f"{number}.leak.test" for number in range(1000))
    fetching = [text.replace("HOST", next(hosts)) for text in (*FETCHING, *SVG_FETCHING)]
    displays = [{"text/html": text} for text in fetching[: len(FETCHING)]]
    displays += [{"image/svg+xml": text} for text in fetching[len(FETCHING) :]]
    collected = tmp_path / "picture.svg"
    collected.write_text(SVG_FETCHING[0].replace("HOST", next(hosts)))
    more = Meta(index=2, displays=tuple(displays), collected=(str(collected),))
    file, control, network_log = (tmp_path / name for name in ("report.html", "control.html", "network.json"))
    file.write_text(build([SHOWN, more])[0].replace(' loading="lazy"', ""))
    control.write_text('<iframe srcdoc="<link rel=preconnect href=https://control.leak.test>"></iframe>')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rules = f"--host-resolver-rules=MAP *.leak.test 127.0.0.1:{listener.getsockname()[1]}, MAP * ~NOTFOUND"
        with Chromium(1280, 2400, flags=(rules, f"--log-net-log={network_log}")) as browser:
            browser.goto(file.as_uri())
            browser.until(lambda: browser.js("document.readyState") == "complete", "the page")
            assert browser.js("[...document.images].some(image => image.naturalWidth === 1)")
            assert browser.js("document.querySelectorAll('iframe').length") == 1 + len(FETCHING)
            assert browser.js("document.querySelector('iframe').contentDocument") is None
            assert browser.js("document.title") == "the page"
            assert [address for address in browser.asked if address.startswith("http")] == []
            browser.goto(control.as_uri())
            listener.settimeout(120)
            # The first connection must be the control page's, which proves that the test detects connections.
            listener.accept()[0].close()
    assert set(re.findall(r"\w+\.leak\.test", network_log.read_text())) == {"control.leak.test"}


@pytest.mark.parametrize("form", ["to_html", "style"])
def test_a_pandas_table_keeps_its_look(form: str) -> None:
    frame = pandas.DataFrame({"a": [1, 2.5], "b": ["x < y", "y & z"]}, index=[["i", "i"], ["j", "k"]])
    style: Any = (
        frame.style.bar(subset="a").highlight_max(props="color: white; background-color: pink").set_caption("c")
    )
    style = style.set_table_styles([{"selector": "th:nth-child(2n):hover", "props": "color: rgb(1 2 3 / 50%)"}])
    text = frame.to_html() if form == "to_html" else style.format(escape="html").to_html()
    assert read_events(rebuild_html(text)) == read_events(text.replace(' type="text/css"', ""))
    embedded = (
        f'<img src="data:image/png;base64,{PNG}" width="5"><input type="checkbox" id="i"><label for="i">x</label>'
    )
    assert read_events(rebuild_html(embedded)) == read_events(embedded)


def test_hostile_html_is_processed_in_linear_time() -> None:
    """A parser that builds a tree would take gigabytes of memory, or hours, for each of these."""
    clones = "<p>" + "".join(f"<b id={number}>" for number in range(50_000)) + "<p>x" * 50_000
    for text in (
        "<div>" * 500_000,
        clones,
        "<style>" + '\\"' * 500_000,
        "<style>" + "x" * 1_000_000,
        '<a b="' * 500_000,
    ):
        assert len(rebuild_html(text)) < 2 * len(text)


def read_events(text: str) -> list[Any]:
    """Return the tags and the text that a parser reads."""
    events: list[Any] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            events.append((tag, attrs))

        def handle_endtag(self, tag: str) -> None:
            events.append(tag)

        def handle_data(self, data: str) -> None:
            events.append(data)

    Reader().feed(text)
    return events


RUNNING = "<!doctype html><html><script>document.title = 'ran'</script></html>"
LINKED = ("a.txt", "a.csv", "a.JSON", "a.png", "a.jpeg", "a.html.webp", '<b>" onload=x.GIF', "a.xml#.png", "a.svg?.txt")
WITHOUT_LINK = (
    *("a.svg", "a.html", "a.HTM", "a.xhtml", "a.shtml", "a.xml", "a.xsl", "a.mht", "a.pdf", "a.md", "a.js", "a.svgz"),
    *("a", "a.txt.html", "a.txt.", "a.png ", "a.svg/.png", "a.hta", "a.url", "a.desktop", "a.log"),
)


def test_scriptable_collected_files_get_no_link_and_others_get_relative_links() -> None:
    names = [f"/results/files/1/{name}" for name in (*LINKED, *WITHOUT_LINK)]
    names += ["/elsewhere/a.txt", "s3://bucket/a.png", "javascript:alert(1)//.png", "/\ud800.png"]
    page, _ = build([Meta(index=1, collected=tuple(names), not_collected=("<i> is a link",))])
    links = re.findall('href="([^"]*)"', page)
    assert links == [*(f"./files/1/{quote(name)}" for name in LINKED), "file:///elsewhere/a.txt"]
    pictures = [name for name in (*LINKED, "a.svg") if not name.lower().endswith((".txt", ".csv", ".json"))]
    assert re.findall('src="([^"]*)"', page) == [f"./files/1/{quote(name)}" for name in pictures]
    assert page.count("<li>") == len(names)
    assert "<li>s3://bucket/a.png<" in page
    assert "<li>javascript:alert(1)//.png<" in page
    assert "&lt;i&gt; is a link" in page
    assert "<b>" not in page
    assert f"{len(names)} collected; notes on others: 1" in page


def test_a_page_elsewhere_contains_the_collected_pictures_and_no_other_file(tmp_path: Path) -> None:
    files, secret = tmp_path / "job" / "files" / "1", tmp_path / "secret.png"
    files.mkdir(parents=True)
    secret.write_bytes(b"secret")
    (files / "plot.png").write_bytes(b"plot")
    (files / "drawing.svg").write_bytes(b"<svg/>")
    (files / "link.png").symlink_to(secret)
    names = ["plot.png", "drawing.svg", "link.png", "missing.png", "../../../secret.png"]
    meta = Meta(index=1, collected=tuple(f"{files}/{name}" for name in names))
    summary = RunSummary(ReportSpec("execution"))
    summary.add(Result({}, meta))
    report = build_report(summary, [RunRecord("the page", str(tmp_path / "job"), total=1)])
    page = render_html(report, str(tmp_path), tmp_path / "job" / "files")
    pictures = re.findall('src="(data:[^"]*)"', page)
    assert pictures == ["data:image/png;base64,cGxvdA==", "data:image/svg+xml;base64,PHN2Zy8+"]
    beside = render_html(report, str(tmp_path / "job"))
    assert 'src="./files/1/plot.png"' in beside
    assert "data:image" not in beside


@pytest.mark.full
@pytest.mark.requires("chromium")
def test_opening_a_linked_collected_file_runs_nothing(tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / name).write_text(RUNNING)
    file = tmp_path / "report.html"
    metas = [Meta(index=1, collected=tuple(str(tmp_path / name) for name in LINKED))]
    file.write_text(build(metas, str(tmp_path))[0])
    with Chromium() as browser:
        browser.goto(file.as_uri())
        browser.until(lambda: browser.js("document.title") == "the page", "the page")
        addresses = browser.js("[...document.links].map(link => link.href)")
        assert len(addresses) == len(LINKED)
        for address in addresses:
            browser.command("Page.navigate", url=address)
            browser.until(lambda: browser.js("document.readyState") == "complete", address)
            assert browser.js("document.title") != "ran"
