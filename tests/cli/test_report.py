"""`rlm-batch report`, which shows a run from its ledger only."""

import base64
import csv
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, Failure, Result, TrialsReport, load_report
from rlm_batch.flows.reporting.export import build_data_frame
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.turns import NOTE
from rlm_batch.sandbox.meta import Meta, QuerySummary
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import Objective, ReportSpec

from .conftest import Run, write_run

SWEEP = {"flow": "sweep", "what": "trial", "objective": "loss"}


def make_trials(count: int) -> list[Outcome]:
    """Return trials with decreasing losses, and a failure."""
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


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def test_a_run_is_found_by_id_name_or_path_without_a_server(root: Path, run: Run) -> None:
    write_run(root / "first", make_trials(3), **SWEEP)
    for name in ("id-of-run", "quick-fox", root / "first"):
        done = run("report", name)
        assert done.returncode == 0
        first, second = done.stdout.splitlines()[1:3]
        assert first.split()[:2] == ["2", "0.2"]
        assert first.split()[-1] == "best"
        assert second.startswith("1 ")
        assert f"Report: {root}/first/report.html" in done.stdout
        assert "3 of 4 trials succeeded, 1 failed" in done.stderr
        assert "the model was called 6 times: 90 + 12 tokens, for $0.750000" in done.stderr


def test_output_and_queries_are_shown_on_request(root: Path, run: Run) -> None:
    used = {"calls": 2, "prompt_tokens": 1200, "completion_tokens": 4, "cost": 0.5}
    flat = {"kind": "llm_query", "depth": 2, "model": "small", "prompt": "one\ntwo", "seconds": 0.25, **used}
    asked = {**flat, "turn": 1, "prompt": "how many?", "answer": "30", "cached": 1, "calls": 0}
    turn = {"reasoning": "Look.", "code": "print(1)\nprint(2)", "output": "1\n\x1b[2J2\n", "queries": 3}
    deep = {"kind": "rlm_query", "depth": 1, "model": "large", "prompt": "why?", "seconds": 3.0, **used}
    tree = ({**deep, "error": "no budget", "trajectory": [turn], "queries": [flat, asked]},)
    first = Result({"x": 1}, Meta(index=0, queries=QuerySummary(asked=2, calls=4, tree=tree)))
    printed = Result({"x": 2}, Meta(index=1, stdout="one\ntwo\x1b[2J\n", stderr="a warning\n"))
    write_run(root / "first", [first, printed])
    plain = run("report", "quick-fox").stdout
    assert "llm_query" not in plain
    assert "a warning" not in plain
    assert (
        "\n1:\none\ntwo\\x1b[2J\n\n1 standard error:\na warning\n" in run("report", "quick-fox", "--show-output").stdout
    )
    shown = run("report", "quick-fox", "--show-queries").stdout
    assert (
        shown[shown.index("\nExecution 0:") : shown.index("\nPrompts are cut")]
        == r"""
Execution 0: 4 calls, 0 + 0 tokens, $0.000000, 0 s
  1. rlm_query at depth 1, large: 2 calls, 1,200 + 4 tokens, $0.500000, 3 s
    ? why?
    turn 1: no usage kept
      # Look.
      > print(1)
      > print(2)
      | 1
      | \x1b[2J2
      1. llm_query at depth 2, small: 1 from the cache, 0.25 s
        ? how many?
        = 30
      2 more queries are not shown: with --record full, --messages FILE writes all
    1. llm_query at depth 2, small: 2 calls, 1,200 + 4 tokens, $0.500000, 0.25 s
      ? one
      ? two
    ! no budget
  = x=1
"""
    )
    assert NOTE in shown
    assert "llm_query" in run("report", "quick-fox", "--execution", "0").stdout
    assert "llm_query" not in run("report", "quick-fox", "--execution", "1").stdout


def test_the_report_has_whole_values_as_json(root: Path, run: Run) -> None:
    whole = Result({"loss": 0.5, "text": "x" * 5000, "curve": [math.nan]}, Meta(index=4, variables={"lr": 1}))
    write_run(root / "first", [*make_trials(3), whole], **SWEEP)
    done = run("report", "quick-fox", "--json", "--csv", root / "trials.csv")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["status"] for line in lines] == [*["succeeded"] * 3, "failed", "succeeded"]
    assert [line.get("best") for line in lines] == [None, None, None, None, True]
    assert lines[4]["outputs"] == {"loss": 0.5, "text": "x" * 5000, "curve": [None]}
    assert f"CSV: {root}/trials.csv" in done.stderr


def test_a_field_named_like_a_variable_has_a_separate_column(root: Path, run: Run) -> None:
    """The field, not the variable, decides which trial is the best if the objective has that name."""
    trials: list[Outcome] = [
        Result({"loss": -loss}, Meta(index=index, variables={"loss": loss, "seconds": 7, "x": index}))
        for index, loss in enumerate((0, 2, 1))
    ]
    write_run(root / "first", trials, **SWEEP)
    done = run("report", "quick-fox", "--csv", root / "t.csv")
    header, *rows = (line.split() for line in done.stdout.splitlines()[:4])
    assert header == ["loss", "variables.seconds", "x", "outputs.loss", "seconds"]
    assert rows == [
        ["1", "2", "7", "1", "-2", "0", "best"],
        ["2", "1", "7", "2", "-1", "0"],
        ["0", "0", "7", "0", "0", "0"],
    ]
    assert "Best loss: -2 in trial 1 with loss=2, seconds=7, x=1" in done.stderr
    page = (root / "first" / "report.html").read_text()
    assert "<th>loss</th><th>variables.seconds</th><th>x</th><th>outputs.loss</th><th>seconds</th>" in page
    assert "<td>1</td><td>2</td><td>7</td><td>1</td><td>-2</td><td>0</td><td>best</td>" in page
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]*)", page)]
    assert any("outputs.loss over loss and x" in picture for picture in pictures)
    assert [row["outputs.loss"] for row in read_csv(root / "t.csv")] == ["0", "-2", "-1"]
    (first,) = open_run_ledger(str(root / "first")).summarize().build_records(1)
    assert {name: first[name] for name in ("loss", "outputs.loss", "variables.seconds", "outcome")} == {
        "loss": 2, "outputs.loss": -2, "variables.seconds": 7, "outcome": "best"
    }  # fmt: skip


def test_all_columns_have_different_names(root: Path, run: Run) -> None:
    fields = {"outputs.x": 1, "x": 2, "printed last": 3, "number": 4, "outcome": 5}
    write_run(root / "first", [Result(fields, Meta(index=0, variables={"x": 9}, stdout="text\n"))])
    rows = load_report(str(root / "first")).rows(shows_output=True)
    names = ["x", "outputs.outputs.x", "outputs.x", "outputs.printed last", "number", "outcome", "printed last"]
    assert rows == [["", *names, ""], ["0", "9", "1", "2", "3", "4", "5", "text", ""]]
    assert run("report", "quick-fox", "--csv", root / "t.csv").returncode == 0
    (row,) = read_csv(root / "t.csv")
    assert (row["x"], row["outputs.x"], row["outputs.outputs.x"]) == ("9", "2", "1")


def test_rows_have_execution_numbers_even_if_some_outcomes_are_missing() -> None:
    results = [Result({"loss": abs(number - 4)}, Meta(index=number, variables={})) for number in (1, 4, 7)]
    report = TrialsReport(results, "/results", ReportSpec("trial", (Objective("loss"),)))
    for limit in (None, 1):
        rows = report.rows(limit)
        assert [row[0] for row in rows[1:]] == (["1", "4", "7"] if limit is None else ["1", "4"])
        assert [row[0] for row in rows if row[-1] == "best"] == ["4"]


@pytest.mark.parametrize(
    "record", [{"objective": "f20"}, {"objectives": [asdict(Objective("f20")), asdict(Objective("f19"))]}]
)
def test_an_objective_always_has_a_column(root: Path, run: Run, record: dict[str, Any]) -> None:
    fields = {f"f{number:02}": number for number in range(21)}
    write_run(
        root / "first",
        [Result(fields, Meta(index=index)) for index in (0, 1)],
        **{**SWEEP, "objective": None, **record},
    )
    assert "f20" in run("report", "quick-fox").stdout.splitlines()[0].split()
    page = (root / "first" / "report.html").read_text()
    assert "<th>f20</th>" in page
    assert "<th>f16</th>" not in page
    assert "Some variables or fields have no column here" in page


LISTS: dict[str, list[Any]] = {
    "whole": [[1, 2], []],
    "real": [[1], [0.5, None]],
    "text": [["a"], None],
    "deep": [[[]], [[1.5]]],
    "none": [[], [None]],
    "large": [[2**53 + 1], [1]],
}
LARGE = 2**53 + 1
INTEGERS: dict[str, list[Any]] = {
    "missing": [None, LARGE], "mixed": [0.5, LARGE], "small": [0.5, 1], "integers": [1, LARGE]
}  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "mixes": [[1], ["a"]], "dicts": [[{"a": 1}], []], "kinds": [[1], 1], "exact": [[LARGE], [0.5]]
}  # fmt: skip


def test_integers_and_lists_stay_what_they_are_in_data_frames_and_parquet(root: Path, run: Run) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    columns = {**LISTS, **INTEGERS, **OTHERS}
    outcomes: list[Outcome] = [
        Result({name: values[index] for name, values in columns.items()}, Meta(index=index)) for index in (0, 1)
    ]
    frame = build_data_frame(outcomes)
    assert {name: [None if pandas.isna(value) else value for value in frame[name]] for name in INTEGERS} == INTEGERS
    assert [str(frame[name].dtype) for name in INTEGERS] == ["Int64", "object", "float64", "int64"]
    write_run(root / "first", outcomes)
    assert run("report", "quick-fox", "--parquet", root / "t.parquet").returncode == 0
    read = parquet.read_table(root / "t.parquet").to_pydict()
    assert {name: read[name] for name in LISTS} == LISTS
    assert {name: read[name] for name in INTEGERS} == {**INTEGERS, "mixed": ["0.5", str(LARGE)]}
    assert {name: [*map(json.loads, read[name])] for name in OTHERS} == OTHERS


def test_csv_and_parquet_have_a_row_for_each_execution_in_order(root: Path, run: Run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    write_run(root / "first", make_trials(3), **SWEEP)
    assert run("report", "quick-fox", "--csv", root / "t.csv", "--parquet", root / "t.parquet").returncode == 0
    rows, read = read_csv(root / "t.csv"), parquet.read_table(root / "t.parquet").to_pylist()
    assert [int(row["index"]) for row in rows] == [row["index"] for row in read] == [0, 1, 2, 3]
    # A field with a variable's name has a separate column.
    assert [row["outputs.loss"] for row in read] == [3.0, 2.0, 1.0, None]
    assert [row["loss"] for row in read] == ["given", "given", "given", None]
    assert [float(row["lr"]) for row in rows] == [row["lr"] for row in read] == [0.0, 0.1, 0.2, 9.9]
    assert [row["parts"] for row in read] == [[0], [1], [2], None]
    assert rows[0]["text"] == read[0]["text"] == "ä"
    assert [row["status"] for row in rows] == ["succeeded"] * 3 + ["failed"]
    assert read[3]["message"].startswith("it <b>failed</b>\n")
    assert not list(root.glob("*.partial"))


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "=cmd|' /C calc'!A0", "\uff1d1+1"]
HARMLESS = ["a=1", " =1", "'=1", "1-1", "", "é"]


def test_csv_text_is_never_a_formula_and_numbers_stay_numbers(root: Path, run: Run) -> None:
    numbers = [-1, -1.5, 2, True, None, [-1], {"=x": "=1"}]
    results: list[Outcome] = [
        Result({"text": text, "=field": text}, Meta(index=index, variables={"+variable": text}))
        for index, text in enumerate(FORMULAS + HARMLESS)
    ]
    results += [Result({"number": value}, Meta(index=100 + index)) for index, value in enumerate(numbers)]
    results.append(Failure(CodeError("=1 + 1"), Meta(index=200)))
    write_run(root / "first", results)

    def export(*words: object) -> list[dict[str, str]]:
        assert run("report", "quick-fox", "--csv", root / "t.csv", *words).returncode == 0
        return read_csv(root / "t.csv")

    rows, count = export(), len(FORMULAS + HARMLESS)
    shown = [f"'{text}" for text in FORMULAS] + HARMLESS
    assert [row["text"] for row in rows[:count]] == [row["'=field"] for row in rows[:count]] == shown
    assert [row["'+variable"] for row in rows[:count]] == shown
    assert [row["number"] for row in rows[count:-1]] == ["-1", "-1.5", "2", "true", "", "[-1]", '{"=x": "=1"}']
    assert rows[-1]["message"] == "'=1 + 1"
    raw = export("--raw-csv")
    assert [row["text"] for row in raw[:count]] == [row["=field"] for row in raw[:count]] == FORMULAS + HARMLESS
    assert [row["number"] for row in raw[count:-1]] == [row["number"] for row in rows[count:-1]]


def test_the_latest_result_is_reported_and_damaged_lines_are_skipped(root: Path, run: Run) -> None:
    def report(name: str) -> list[object]:
        lines = run("report", root / name, "--json").stdout.splitlines()
        return [json.loads(line)["outputs"]["a"] for line in lines]

    write_run(root / "resumed", [Failure(CodeError("no"), Meta(index=0)), Result({"a": 1}, Meta(index=1))])
    write_run(root / "resumed", [Result({"a": 2}, Meta(index=0))])
    assert report("resumed") == [2, 1]

    ledger = Ledger(root / "changed")
    ledger.create()
    ledger.write_outcome("a" * 64, Result({"a": "old"}, Meta(index=0)))
    ledger.write_outcome("b" * 64, Result({"a": "of changed code"}, Meta(index=0)))
    assert report("changed") == ["of changed code"]

    write_run(root / "damaged", [Result({"a": 1}, Meta(index=0)), Result({"a": 2}, Meta(index=1))])
    (part,) = (root / "damaged").glob("part-*")
    first, second = part.read_text().splitlines()
    part.write_text(json.dumps({**json.loads(first), "meta": 5}) + "\n[]\n" + second + "\n")
    assert report("damaged") == [2]


def test_an_impossible_report_is_refused_with_one_sentence(
    root: Path, run: Run, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "empty").mkdir(parents=True)
    write_run(root / "first", make_trials(1))
    write_run(root.parent / "newer", make_trials(1))
    for path in (root.parent / "newer").iterdir():
        path.write_text(re.sub(r'"version": ?1', '"version": 2', path.read_text()))
    for words, reason in (
        (["nosuch"], "there is no run 'nosuch'"),
        ([""], "there is no run ''"),
        ([root / "empty"], "has no results"),
        ([root.parent / "newer"], "was written by a newer version of rlm-batch"),
        (["quick-fox", "--raw-csv"], "--raw-csv needs --csv"),
    ):
        assert reason in refused("report", *words)
    for option, file, reason in (
        ("--html", root / "nosuch" / "page.html", "No such file or directory"),
        ("--csv", "", "Is a directory"),
        ("--csv", "s3://there/t.csv", "No such file or directory"),
    ):
        done = run("report", "quick-fox", option, file)
        assert done.returncode == 2
        assert f"({reason}): name another file" in done.stderr
    done = run("report", "quick-fox", "--messages", root / "messages.jsonl")
    assert done.returncode == 2
    assert "has no conversations: only runs with record='full' (--record full)" in done.stderr
    assert not (root / "messages.jsonl").exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # simulate a machine without pyarrow
    done = run("report", "quick-fox", "--parquet", root / "t.parquet")
    assert done.returncode == 2
    assert "pip install 'rlm-batch[parquet]'" in done.stderr


def test_an_export_writes_through_a_link_or_pipe(root: Path, run: Run) -> None:
    write_run(root / "first", make_trials(2))
    (root / "t.csv").write_text("of old")
    (root / "link.csv").symlink_to("t.csv")
    assert run("report", "quick-fox", "--csv", root / "link.csv").returncode == 0
    assert (root / "link.csv").readlink() == Path("t.csv")
    rows = (root / "t.csv").read_bytes()
    assert rows.count(b"\r\n") == 4
    os.mkfifo(root / "pipe.csv")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((root / "pipe.csv").read_bytes()), daemon=True)
    reader.start()
    assert run("report", "quick-fox", "--csv", root / "pipe.csv").returncode == 0
    assert (root / "pipe.csv").is_fifo()
    reader.join(60)
    assert read == [rows]
