"""Reports with text chosen by code: they show it as text in Markdown, HTML and charts."""

import base64
import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from markdown_it import MarkdownIt

from rlm_batch import CodeError, Failure, Result
from rlm_batch.flows.reporting.charts import build_charts
from rlm_batch.flows.reporting.document import make_excerpt, render_html, render_markdown
from rlm_batch.flows.reporting.report import ReportContent, build_report
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.flows.search.importances import Importances
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import Objective, ReportSpec, RunRecord

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</pre></td></table><script>alert(1)</script>",
    "a | b || c |",
    "**bold** _low_ ~~gone~~ `code` ``` \\| \\",
    "[link](javascript:alert(1)) ![picture](http://127.0.0.1/x.png) <http://127.0.0.1/>",
    "http://example.com/ www.example.com someone@example.com",
    "&lt;b&gt; &amp; &#60;script&#62;",
    "# heading",
    "- a list",
    "    indented",
    "```\nfence\n```",
    '"quoted" \'single\' onclick="x"',
    "--- | ---",
    "[^1]: note",
]


class Parsed(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def build(text: str) -> ReportContent:
    """Return the report on two executions, in which each text that code can choose is `text`."""
    summary = RunSummary(ReportSpec("execution"))
    summary.add(Result({f"field {text}": text}, Meta(index=0, variables={text: text})))
    error = CodeError(f"the code raised {text}", type=text, message=text, traceback=f"  {text}")
    summary.add(Failure(error, Meta(index=1, variables={text: text}, provider=text, earlier_errors=(text,))))
    return build_report(summary, [RunRecord("batch", "/results", name=text, total=2)])


def build_single(text: str) -> ReportContent:
    """Return the report on one execution with a field whose name and value are `text`."""
    summary = RunSummary.from_outcomes([Result({text: text}, Meta(index=0))], ReportSpec("execution"))
    return build_report(summary, [RunRecord("batch", "/results", total=1)])


def test_text_from_code_becomes_neither_markup_nor_a_link() -> None:
    # Prefect's UI renders in this way: it passes HTML through, and has tables and links.
    reader = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable(["table", "strikethrough"])
    ours = {"h1", "h2", "h3", "p", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "img"}
    ours |= {"html", "head", "meta", "title", "style", "body"}
    for text in HOSTILE:
        for report in (build(text), build_single(text)):
            markdown = render_markdown(report)
            pages = Parsed(reader.render(markdown)), Parsed(render_html(report))
            for parsed in pages:
                assert {tag for tag, _ in parsed.tags} <= ours
                attributes = {name for _, attributes in parsed.tags for name in attributes}
                assert not attributes & {"onerror", "onclick", "href"}
                assert all((of_tag["src"] or "").startswith("data:") for tag, of_tag in parsed.tags if tag == "img")
                assert text in parsed.text
            assert len({[tag for tag, _ in parsed.tags].count("td") for parsed in pages}) == 1
            prose = re.sub(r"^(`{3,})text$.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
            prose = prose.replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|www\.[a-z]|[^\\]@", prose)


def test_terminal_commands_and_bidirectional_characters_are_removed_and_long_texts_cut() -> None:
    report = build("a\x1b[31mb\u202egnp.exe")
    assert not {"\x1b", "\u202e"} & {*render_markdown(report), *render_html(report)}
    assert len(make_excerpt("x" * 100_000)) < 5000
    assert make_excerpt("x\n" * 100_000).count("x\n") <= 41


def test_a_page_embeds_its_pictures_and_forbids_loading_anything() -> None:
    report = replace(build("x"), charts=[("a | b", "<svg/>")])
    page = render_html(report)
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=.?(?!data:)[a-z]+:", page)
    (data,) = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", render_markdown(report))
    assert base64.b64decode(data) == b"<svg/>"


def parse_svg(svg: str) -> tuple[ET.Element, str]:
    root = ET.fromstring(svg)
    return root, " ".join(text for element in root.iter() if (text := element.text))


def draw_trials(trials: Iterable[tuple[dict[str, Any], float]], name: str = "loss") -> list[tuple[str, str]]:
    """Return the charts of a sweep with these variables and values of its objective, and one failed trial."""
    summary = RunSummary(ReportSpec("trial", (Objective(name),)))
    for index, (variables, value) in enumerate(trials):
        summary.add(Result({name: value}, Meta(index=index, variables=variables)))
    summary.add(Failure(CodeError("no"), Meta(index=summary.done)))
    return build_charts(summary)


def test_a_chart_is_valid_xml_for_any_names() -> None:
    for text in (*HOSTILE, "\x00\x1b\ud800\ufffe", "x" * 10_000):
        for more, count in (((), 2), (("c",), 4)):  # a heat map, or a chart for each variable
            pairs = [(first, second) for first in range(3) for second in (text, "b")]
            trials = [({text: first, "b": second, **dict.fromkeys(more, first)}, first) for first, second in pairs]
            charts = draw_trials(trials, text)
            assert len(charts) == count
            for _, svg in charts:
                tags = {element.tag.rpartition("}")[2] for element in parse_svg(svg)[0].iter()}
                assert tags <= {"svg", "style", "rect", "path", "text", "circle"}


def test_a_chart_has_every_point_inside_its_frame() -> None:
    for values in (
        *([1.0, 1.0], [0.0, 0.0], [-5.0, 5.0], [1e-9, 1e9], [1e150, -1e150], [3, 4], [123456789.0] * 3),
        *([5e-324, 1e-300], [0.0, 5e-324], [1e-320, 3e-320, -1e-320], [1e200, -1e200], [1e-300, 1e200]),
    ):
        root, _ = parse_svg(draw_trials(({}, value) for value in values)[0][1])
        circles = [element for element in root.iter() if element.tag.endswith("circle")]
        assert len(circles) == len(values)
        assert all(0 < float(c.attrib["cx"]) < 760 and 0 < float(c.attrib["cy"]) < 400 for c in circles), values


def test_long_names_below_a_chart_are_inside_it() -> None:
    for count in (1, 2, 3, 12, 30):
        trials = [({"a": f"{number} is a very long name for a value" * 3}, 1.0) for number in range(count)]
        _, (_, svg) = draw_trials([*trials, ({}, 1.0)])
        labels = [element for element in parse_svg(svg)[0].iter() if (element.text or "").endswith("...")]
        assert len(labels) == min(count, 12) or count == 30
        for label in labels:
            half = len(label.text or "") * 3.4  # pixels
            assert half <= float(label.attrib["x"]) <= 760 - half


def test_a_report_accepts_any_submitted_numbers() -> None:
    for values in ((1.7e308, -1.7e308), (1.79e308, 1.79e308), (10**308, 5e-324), (10**400, 1.0, 2.0)):
        summary = RunSummary(ReportSpec("trial", (Objective("loss"),)))
        for index, value in enumerate(values):
            summary.add(Result({"loss": value}, Meta(index=index, variables={"a": value, "b": index})))
        report = build_report(summary, [RunRecord("sweep", "/results", objective="loss")])
        assert "trials succeeded" in render_markdown(report)
        assert "trials succeeded" in render_html(report)


def test_a_heat_map_has_a_labelled_cell_for_each_pair_of_two_variables() -> None:
    charts = dict(draw_trials(({"lr": lr, "size": size}, lr * size) for lr in (0.1, 0.01) for size in (32, 64, 128)))
    _, text = parse_svg(charts["loss over lr and size"])
    assert {f"{lr * size:.4g}" for lr in (0.1, 0.01) for size in (32, 64, 128)} <= set(text.split())


def test_each_variable_with_many_values_has_a_chart_unless_the_values_are_too_many_names() -> None:
    _, *charts = draw_trials(({"a": f"name {n}", "b": n / 7, "c": n % 2 == 0}, n) for n in range(500))
    assert [title for title, _ in charts] == ["loss over b", "loss over c"]
    for _, svg in charts:
        assert svg.count("<circle") == 501  # The best trial has a second dot.
    assert {"True", "False"} <= set(parse_svg(charts[1][1])[1].split())


def test_charts_keep_the_order_of_names_and_show_variables_that_only_some_trials_have() -> None:
    points: list[dict[str, Any]] = [{"size": "small"}, {"size": "medium", "depth": 3}, {"size": "large", "opt": "sgd"}]
    _, *charts = draw_trials(zip(points, (2.0, 1.0, 3.0), strict=True))
    assert [title for title, _ in charts] == ["loss over size", "loss over depth", "loss over opt"]
    assert re.findall("small|medium|large", parse_svg(charts[0][1])[1]) == ["small", "medium", "large"]
    _, (_, heat_map) = draw_trials(zip(points[:2], (2.0, 1.0), strict=True))
    assert re.findall("small|medium|large", parse_svg(heat_map)[1]) == ["small", "medium"]


def test_a_searchs_report_shows_curves_importances_and_variables() -> None:
    space = {"lr": {"low": 0.0, "high": 1.0}, "units": {"low": 1, "high": 64}}
    summary = RunSummary(ReportSpec("trial", (Objective("loss"),), space))
    for index in range(20):
        variables = {"lr": index / 20, "units": 1 + index * 7 % 64}
        is_pruned = index % 4 == 3
        reports = tuple((step, index + 1 / (step + 1)) for step in range(2 if is_pruned else 5))
        meta = Meta(index, variables, "local", submitted=not is_pruned, reports=reports, pruned=is_pruned)
        summary.add(Result({"loss": float(index)}, meta))
    importances = Importances({"lr": 0.9, "units": 0.1}, "fANOVA, 15 trials")
    report = build_report(summary, [RunRecord("sweep", "/results", total=20)], importances)
    assert [title for title, _ in report.charts] == [
        "loss over trials",
        "loss over lr and units",
        "loss as it was reported",
    ]
    for _, svg in report.charts:
        assert parse_svg(svg)[0].tag.endswith("svg")
        assert "prefers-color-scheme:dark" in svg
    assert ["Importance", "lr 0.90, units 0.10 (fANOVA, 15 trials)"] in report.figures
    assert [row[-1] for row in report.rows].count("pruned") == 5
    assert report.rows[1][0] == "0"
    assert "20 of 20 trials succeeded, 5 of them pruned" in report.figures[0][1]


def test_a_report_of_several_objectives_shows_the_pareto_front() -> None:
    summary = RunSummary(ReportSpec("trial", (Objective("loss"), Objective("accuracy", "maximize"))))
    for index, scores in enumerate([(3, 1), (2, 2), (1, 1), (3, 3), (2, float("nan"))]):
        summary.add(
            Result(dict(zip(("loss", "accuracy"), scores, strict=True)), Meta(index, {"x": index, "y": index % 2}))
        )
    report = build_report(summary, [RunRecord("sweep", "/results", total=5)])
    assert "3 trials (1, 2, 3) by minimize loss, maximize accuracy" in str(report.figures)
    (front,) = [svg for title, svg in report.charts if "Pareto front" in title]
    assert front.count('r="5"') == 3
    notes = [row[-1] for row in report.rows[1:]]
    assert notes == ["", "Pareto", "Pareto", "Pareto", "without all objectives as numbers"]


@pytest.mark.parametrize(
    ("values", "bounds", "is_log"),
    [
        ([0.01, 0.1, 1.0], None, True),
        ([1, 2, 4, 8, 16], None, False),
        ([10, 40, 70, 100], None, False),
        ([0.0, 0.01, 0.1, 1.0], None, False),
        ([0.02, 0.05, 0.09], {"low": 0.01, "high": 0.1, "log": True}, True),
        ([0.0005, 0.01, 0.9], {"low": 0.0, "high": 1.0}, False),
    ],
)
def test_axes_of_variables_are_logarithmic_as_the_space_says_or_over_two_decades(values, bounds, is_log):
    space = None if bounds is None else {"x": bounds, "opt": ["a", "b"]}
    summary = RunSummary(ReportSpec("trial", (Objective("loss"),), space))
    for index, (x, opt, size) in enumerate(itertools.product(values, "ab", (1, 2))):
        summary.add(Result({"loss": float(index)}, Meta(index, {"x": x, "opt": opt, "size": size})))
    root, _ = parse_svg(dict(build_charts(summary))["loss over x"])
    pixels = sorted({float(element.attrib["cx"]) for element in root.iter() if element.tag.endswith("circle")})
    places = [math.log(x) if is_log else x for x in values]
    length, span = pixels[-1] - pixels[0], places[-1] - places[0]
    assert pixels == pytest.approx([pixels[0] + (place - places[0]) / span * length for place in places], abs=0.2)


@pytest.mark.parametrize(
    ("values", "widths"),
    [
        ([1, 2, 4], [1.25, 1.5, 1.75]),
        ([0.1, 1, 10, 100], [1, 1, 1, 1]),
        (["a", "b", 3], [1, 1, 1]),
        ([5, 5 + 1e-14], [1, 1]),
    ],
)
def test_the_cells_of_a_heat_map_have_the_distances_of_their_values(values, widths):
    root, _ = parse_svg(draw_trials(({"x": x, "opt": opt}, 1.0) for x in values for opt in "ab")[1][1])
    cells = [element.attrib for element in root.iter() if element.tag.endswith("rect") and "x" in element.attrib]
    shown = {float(cell["x"]): float(cell["width"]) for cell in cells}
    assert [shown[x] for x in sorted(shown)] == pytest.approx([width / sum(widths) * 652 for width in widths], abs=0.2)
