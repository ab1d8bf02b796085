"""What `rlm-batch report` makes of a run, from its ledger alone."""

import csv
import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result
from rlm_batch.cli.main import main
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.sandbox.meta import Meta, QuerySummary
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import RunRecord

from .conftest import Run


def written(path: Path, name: str, outcomes: list[Outcome], **record: Any) -> RunRecord:
    """A ledger with those outcomes, as a flow run leaves it."""
    ledger = Ledger(path)
    ledger.create()
    for outcome in outcomes:
        ledger.write_outcome(f"{outcome.meta.index:064x}", outcome)
    ledger.close()
    found = RunRecord("sweep", str(path), f"id-of-{name}", name, total=len(outcomes), began=1.7e9, **record)
    found.finish()
    return found


def trials(count: int) -> list[Outcome]:
    """Trials whose losses fall, and a failure."""
    queries = QuerySummary(asked=1, calls=2, prompt_tokens=30, completion_tokens=4, cost=0.25)
    made: list[Outcome] = [
        Result(
            {"loss": float(count - index), "parts": [index], "text": "ä"},
            Meta(index=index, variables={"lr": index / 10, "loss": "given"}, seconds=1.5, queries=queries),
        )
        for index in range(count)
    ]
    failed = Failure(CodeError("it <b>failed</b>\nTraceback: line 3"), Meta(index=count, variables={"lr": 9.9}))
    return [*made, failed]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results root of the test's own, with no server to be asked."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return tmp_path


def call(*words: object) -> int:
    """The exit status of `rlm-batch` with these words."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_a_run_is_found_by_id_name_and_path_and_no_server_is_asked(root: Path, capsys: pytest.CaptureFixture[str]):
    written(root / "first", "quick-fox", trials(3), what="trial", objective="loss")
    for run in ("id-of-quick-fox", "quick-fox", root / "first"):
        assert call("report", run) == 0
        said = capsys.readouterr()
        first, second = said.out.splitlines()[1:3]
        assert first.split()[:2] == ["2", "0.2"]
        assert first.split()[-1] == "best"
        assert second.startswith("1 ")
        assert f"Report: {root}/first/report.html" in said.out
        assert "3 of 4 trials succeeded, 1 failed" in said.err
        assert "the model was called 6 times: 90 + 12 tokens, for $0.750000" in said.err


def test_what_was_asked_of_a_model_is_a_tree_with_the_turns_of_recursive_queries(
    root: Path, capsys: pytest.CaptureFixture[str]
):
    used = {"calls": 2, "prompt_tokens": 1200, "completion_tokens": 4, "cost": 0.5}
    flat = {"kind": "llm_query", "depth": 2, "model": "small", "prompt": "one\ntwo", "seconds": 0.25, **used}
    turn = {"reasoning": "Look.", "code": "print(1)\nprint(2)", "output": "1\n\x1b[2J2\n"}
    deep = {"kind": "rlm_query", "depth": 1, "model": "large", "prompt": "why?", "seconds": 3.0, **used}
    tree = ({**deep, "error": "no budget", "trajectory": [turn], "queries": [flat]},)
    asked = Result({"x": 1}, Meta(index=0, queries=QuerySummary(asked=2, calls=4, tree=tree)))
    written(root / "first", "quick-fox", [asked, Result({"x": 2}, Meta(index=1))])
    assert call("report", "quick-fox") == 0
    assert "llm_query" not in capsys.readouterr().out
    assert call("report", "quick-fox", "--show-queries") == 0
    said = capsys.readouterr().out
    assert (
        said[said.index("\n0:") : said.index("\nReport: ")]
        == r"""
0:
rlm_query at depth 1, large, 3.0 s, called 2 times: 1,200 + 4 tokens, for $0.500000
  ? why?
  turn 1
    # Look.
    > print(1)
    > print(2)
    | 1
    | \x1b[2J2
  ! no budget
  llm_query at depth 2, small, 0.2 s, called 2 times: 1,200 + 4 tokens, for $0.500000
    ? one
    ? two"""
    )


def test_whole_values_are_json_for_another_program(root: Path, capsys: pytest.CaptureFixture[str]):
    whole = Result({"loss": 0.5, "text": "x" * 5000, "curve": [math.nan]}, Meta(index=4, variables={"lr": 1}))
    written(root / "first", "quick-fox", [*trials(3), whole], what="trial", objective="loss")
    assert call("report", "quick-fox", "--json", "--csv", root / "trials.csv") == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [(line["index"], line["status"], line.get("best")) for line in lines] == [
        (0, "succeeded", None),
        (1, "succeeded", None),
        (2, "succeeded", None),
        (3, "failed", None),
        (4, "succeeded", True),
    ]
    assert lines[4]["outputs"] == {"loss": 0.5, "text": "x" * 5000, "curve": [None]}
    assert f"CSV: {root}/trials.csv" in said.err


def test_what_code_printed_is_there_after_the_run(root: Path, capsys: pytest.CaptureFixture[str]):
    told = Result({"loss": 2.0}, Meta(index=0, stdout="one\ntwo\x1b[2J\n", stderr="a warning\n"))
    written(root / "first", "quick-fox", [told], what="trial", objective="loss")
    assert call("report", "quick-fox", "--show-output") == 0
    assert "\n0:\none\ntwo\\x1b[2J\n\n0 standard error:\na warning\n" in capsys.readouterr().out


def test_the_page_has_the_chart_the_failures_and_nothing_to_fetch(root: Path):
    written(root / "first", "quick-fox", trials(5), what="trial", objective="loss")
    assert call("report", "quick-fox", "--html", root / "page.html") == 0
    page = (root / "page.html").read_text()
    assert page.count("<img ") == 1
    assert not re.search(r"(?:src|href)=[\"']?(?!data:)\w+:", page)
    assert "it &lt;b&gt;failed&lt;/b&gt;" in page
    assert "<b>" not in page


def test_csv_and_parquet_have_a_row_for_each_execution_in_order(root: Path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    written(root / "first", "quick-fox", trials(3), what="trial", objective="loss")
    assert call("report", "quick-fox", "--csv", root / "t.csv", "--parquet", root / "t.parquet") == 0
    with (root / "t.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    read = parquet.read_table(root / "t.parquet").to_pylist()
    assert [int(row["index"]) for row in rows] == [row["index"] for row in read] == [0, 1, 2, 3]
    # A field with a variable's name stands beside it.
    assert [row["outputs.loss"] for row in read] == [3.0, 2.0, 1.0, None]
    assert [row["loss"] for row in read] == ["given", "given", "given", None]
    assert [float(row["lr"]) for row in rows] == [row["lr"] for row in read] == [0.0, 0.1, 0.2, 9.9]
    assert [json.loads(row["parts"]) for row in read[:3]] == [[0], [1], [2]]
    assert rows[0]["text"] == read[0]["text"] == "ä"
    assert [row["status"] for row in rows] == ["succeeded"] * 3 + ["failed"]
    assert read[3]["message"].startswith("it <b>failed</b>\n")
    assert not list(root.glob("*.partial"))


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "=cmd|' /C calc'!A0", "\uff1d1+1"]
HARMLESS = ["a=1", " =1", "'=1", "1-1", "", "é"]


def test_no_text_of_the_codes_is_a_formula_in_the_csv_and_numbers_stay_numbers(root: Path):
    numbers = [-1, -1.5, 2, True, None, [-1], {"=x": "=1"}]
    results: list[Outcome] = [
        Result({"text": text, "=field": text}, Meta(index=index, variables={"+variable": text}))
        for index, text in enumerate(FORMULAS + HARMLESS)
    ]
    results += [Result({"number": value}, Meta(index=100 + index)) for index, value in enumerate(numbers)]
    results.append(Failure(CodeError("=1 + 1"), Meta(index=200)))
    written(root / "first", "quick-fox", results)

    def export(*words: object) -> list[dict[str, str]]:
        assert call("report", "quick-fox", "--csv", root / "t.csv", *words) == 0
        with (root / "t.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    rows, count = export(), len(FORMULAS + HARMLESS)
    shown = [f"'{text}" for text in FORMULAS] + HARMLESS
    assert [row["text"] for row in rows[:count]] == [row["'=field"] for row in rows[:count]] == shown
    assert [row["'+variable"] for row in rows[:count]] == shown
    assert [row["number"] for row in rows[count:-1]] == ["-1", "-1.5", "2", "true", "", "[-1]", '{"=x": "=1"}']
    assert rows[-1]["message"] == "'=1 + 1"
    raw = export("--raw-csv")
    assert [row["text"] for row in raw[:count]] == [row["=field"] for row in raw[:count]] == FORMULAS + HARMLESS
    assert [row["number"] for row in raw[count:-1]] == [row["number"] for row in rows[count:-1]]
    assert call("report", "quick-fox", "--raw-csv") == 2


def test_a_result_that_came_later_stands_in_place_of_the_failure(root: Path, capsys: pytest.CaptureFixture[str]):
    written(root / "first", "one", [Failure(CodeError("no"), Meta(index=0)), Result({"a": 1}, Meta(index=1))])
    written(root / "first", "two", [Result({"a": 2}, Meta(index=0))])
    assert [outcome.a for outcome in open_run_ledger("two").read_outcomes()] == [2, 1]


def test_code_that_was_changed_and_run_on_the_same_ledger_tells_its_latest_results(root: Path):
    ledger = Ledger(root / "first")
    ledger.create()
    ledger.write_outcome("a" * 64, Result({"a": "old"}, Meta(index=0)))
    ledger.write_outcome("b" * 64, Result({"a": "new"}, Meta(index=0)))
    assert [outcome.a for outcome in open_run_ledger(str(root / "first")).read_outcomes()] == ["new"]


def test_a_damaged_ledger_is_reported_on_without_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]):
    written(root / "first", "quick-fox", [Result({"a": 1}, Meta(index=0)), Result({"a": 2}, Meta(index=1))])
    (part,) = (root / "first").glob("part-*")
    first, second = part.read_text().splitlines()
    part.write_text(json.dumps({**json.loads(first), "meta": 5}) + "\n[]\n" + second + "\n")
    assert call("report", "quick-fox") == 0
    assert [outcome.a for outcome in open_run_ledger("quick-fox").read_outcomes()] == [2]


def test_what_is_no_run_is_one_sentence(root: Path, capsys: pytest.CaptureFixture[str]):
    (root / "empty").mkdir()
    for words, said in (
        (["nosuch"], "there is no run 'nosuch'"),
        ([""], "there is no run ''"),
        ([root / "empty"], "has no results"),
    ):
        assert call("report", *words) == 2
        found = capsys.readouterr().err
        assert said in found
        assert len(found.splitlines()) == 1
    written(root / "first", "quick-fox", trials(1))
    assert call("report", "quick-fox", "--html", root / "nosuch" / "page.html") == 2
    assert "No such file or directory; name another file" in capsys.readouterr().err


def test_an_export_to_a_link_or_a_pipe_leaves_it_what_it_is(root: Path):
    written(root / "first", "quick-fox", trials(2))
    (root / "t.csv").write_text("of old")
    (root / "link.csv").symlink_to("t.csv")
    assert call("report", "quick-fox", "--csv", root / "link.csv") == 0
    assert (root / "link.csv").readlink() == Path("t.csv")
    rows = (root / "t.csv").read_bytes()
    assert rows.count(b"\r\n") == 4
    os.mkfifo(root / "pipe.csv")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((root / "pipe.csv").read_bytes()), daemon=True)
    reader.start()
    assert call("report", "quick-fox", "--csv", root / "pipe.csv") == 0
    assert (root / "pipe.csv").is_fifo()
    reader.join(10)
    assert read == [rows]


@pytest.mark.parametrize("option", ["--csv", "--html", "--parquet"])
def test_an_export_to_no_file_is_one_sentence(root: Path, capsys: pytest.CaptureFixture[str], option: str):
    written(root / "first", "quick-fox", trials(1))
    assert call("report", "quick-fox", option, "") == 2
    assert capsys.readouterr().err == f"rlm-batch: {option} names no file\n"


def test_parquet_without_pyarrow_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    from rlm_batch.flows.reporting.export import write_parquet

    written(root / "first", "quick-fox", trials(1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-batch\[parquet\]'"):
        write_parquet(open_run_ledger("quick-fox"), root / "t.parquet")


@pytest.mark.full
def test_a_sweep_from_the_terminal_can_be_reported_afterwards(run: Run, tmp_path: Path):
    (tmp_path / "code.py").write_text("SUBMIT(loss=(x - 2) ** 2)")
    done = run("sweep", "code.py", "--grid", "x=1,2,3", "--minimize", "loss")
    assert done.returncode == 0, done.stderr
    report = run("report", done.stdout.splitlines()[-1].removeprefix("Results: "))
    assert report.returncode == 0, report.stderr
    assert re.search(r"^1 +2 +0 .*best$", report.stdout, re.MULTILINE)
    assert "Best loss: 0 in trial 1 with x=2" in report.stderr
