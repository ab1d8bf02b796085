"""`summarize`: code over all results. Its fields are those of the run, and no table or export has a row of it."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import (
    CodeError,
    ConfigurationError,
    ExecutionsFailed,
    Failure,
    batch,
    check,
    chunks,
    load_report,
    sweep,
)
from rlm_batch.cli.commands import app

pytestmark = pytest.mark.anyio
CODE = "SUBMIT(said='buy' in text)"
ROWS: list[dict[str, Any]] = [
    {"text": "buy now", "label": True},
    {"text": "hello", "label": False},
    {"text": "buy", "label": True},
    {"text": "pills", "label": True},
]


def f1(results: list[dict[str, Any]]) -> dict[str, float]:
    hits = sum(row["said"] and row["label"] for row in results)
    return {"f1": 2 * hits / sum(row["said"] + row["label"] for row in results)}


def report_again(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, list[dict[str, str]]]:
    """Run the command `report`. Return what it prints, the page, and the rows of the CSV file."""
    capsys.readouterr()
    page, table = folder / "page.html", folder / "table.csv"
    assert app(["report", path, "--html", str(page), "--csv", str(table)], result_action="return_value") == 0
    printed = capsys.readouterr()
    return printed.out + printed.err, page.read_text(), list(csv.DictReader(table.read_text("utf-8-sig").splitlines()))


async def test_f1_of_all_is_a_field_of_the_run_and_not_a_row(tmp_path: Path, capsys: Any) -> None:
    report = await batch(CODE, ROWS, summarize=f1)
    assert (report.summary_fields, len(report), len(list(report.failures))) == ({"f1": 0.8}, 4, 0)
    assert (report.summary(), report.describe()) == ("4 of 4 executions succeeded", "Summary: f1=0.8")
    assert [line["outputs"] for line in report.to_json_lines()][-1] == {"f1": 0.8}
    stored = load_report(report.results_path)
    assert (stored.summary_fields, len(stored), stored.to_dataframe().shape[0]) == ({"f1": 0.8}, 4, 4)
    printed, page, rows = report_again(report.results_path, tmp_path, capsys)
    assert "Outcome: 4 of 4 executions succeeded\nSummary: f1=0.8" in printed
    assert "<td>Summary</td><td>f1=0.8</td>" in page
    assert "def f1(results" in page
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]


async def test_code_that_failed_is_among_the_results_with_its_error(capsys: Any) -> None:
    code = "if x == 1: 1 / 0\nSUBMIT(y=x)"
    count = "SUBMIT(failed=[row['x'] for row in results if 'error' in row], types=results[1]['error']['type'])"
    inputs = [{"x": x} for x in range(3)]
    report = await batch(code, inputs, summarize=count, on_failure="return")
    assert report.summary_fields == {"failed": [1], "types": "ZeroDivisionError"}
    with pytest.raises(ExecutionsFailed):
        await batch(code, inputs, summarize=count)


async def test_a_summary_that_fails_is_a_failure_of_the_run(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ExecutionsFailed) as caught:
        await batch(CODE, ROWS, summarize="1 / 0", results_path=str(tmp_path / "ledger"))
    (failure,) = caught.value.failures
    assert isinstance(failure.error, CodeError)
    report = load_report(str(tmp_path / "ledger"))
    assert (report.summary_fields, len(report), type(report.reduction)) == ({}, 4, Failure)
    printed, _, rows = report_again(str(tmp_path / "ledger"), tmp_path, capsys)
    assert "Summary: CodeError: the code raised ZeroDivisionError (line 1): division by zero" in printed
    assert len(rows) == 4
    again = await batch(CODE, ROWS, summarize=f1, results_path=str(tmp_path / "ledger"))
    assert again.summary_fields == {"f1": 0.8}


async def test_a_resumed_run_summarizes_again_only_what_changed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"summarize": "import os\nSUBMIT(n=len(results), random=os.urandom(9).hex())"}
    options["results_path"] = str(tmp_path)
    first = await batch(CODE, ROWS, **options)
    again = await batch(CODE, ROWS, **options)
    assert again.summary_fields == first.summary_fields
    for count in (2, 4, 3):
        other = await batch(CODE, ROWS[:count], **options)
        assert other.summary_fields["n"] == count
    assert load_report(str(tmp_path)).summary_fields["n"] == 3


async def test_the_summary_of_an_earlier_run_is_not_that_of_a_later_run_without_one(tmp_path: Path) -> None:
    await batch(CODE, ROWS[:1], summarize="SUBMIT(n=len(results))", results_path=str(tmp_path))
    await batch(CODE, ROWS, results_path=str(tmp_path))
    stored = load_report(str(tmp_path))
    assert (len(stored), stored.reduction) == (len(ROWS), None)


async def test_the_fields_of_a_check_are_summarized_and_only_executions_are_counted() -> None:
    summarize = "SUBMIT(rate=sum(row['passed'] for row in results) / len(results))"
    report = await batch(CODE, ROWS, check="SUBMIT(passed=submitted['said'] == label)", summarize=summarize)
    assert (report.summary_fields, report.summary()) == ({"rate": 0.75}, "3 of 4 executions passed, 1 did not pass")
    judged = await check(report.results_path, "SUBMIT(passed=submitted['said'])", summarize=summarize)
    assert (judged.summary_fields, judged.summary()) == ({"rate": 0.5}, "2 of 4 executions passed, 2 did not pass")
    assert load_report(judged.results_path).summary_fields == {"rate": 0.5}


async def test_searches_and_repeats_are_summarized_without_a_trial_more(tmp_path: Path) -> None:
    summarize = "SUBMIT(loss=-1, n=len(results))"
    options: dict[str, Any] = {"objective": "loss", "summarize": summarize}
    report = await sweep("SUBMIT(loss=x)", space={"x": [1, 2, 3]}, trials=5, stop_at=1.5, max_workers=1, **options)
    assert report.best["loss"] >= 1
    assert report.summary_fields == {"loss": -1, "n": len(report)}
    assert load_report(report.results_path).best["loss"] >= 1
    repeated = await sweep("SUBMIT(loss=x + repeat)", grid={"x": [1, 2]}, repeats=3, **options)
    assert (repeated.summary_fields["n"], len(repeated), len(repeated.groups)) == (6, 6, 2)
    stored = load_report(repeated.results_path)
    assert (stored.summary_fields["n"], len(stored), len(stored.groups)) == (6, 6, 2)


async def test_a_function_of_other_variables_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def wrong(outcomes: Any) -> Any:
        return outcomes

    with pytest.raises(ConfigurationError, match="outcomes"):
        await batch(CODE, ROWS, summarize=wrong, results_path=str(tmp_path / "ledger"))
    assert not (tmp_path / "ledger").exists()


async def test_the_reduction_of_chunks_is_no_row_also_of_earlier_versions(tmp_path: Path, capsys: Any) -> None:
    reduce = "display('all')\nSUBMIT(total=sum(fields['n'] for fields in results.values()))"
    ledger = tmp_path / "ledger"
    report = await chunks("SUBMIT(n=len(data))", data=[1, 2, 3], chunk_size=2, reduce=reduce, results_path=str(ledger))
    assert (report.summary_fields, report.summary()) == ({"total": 3}, "2 of 2 chunks succeeded")
    assert report.describe() == "Reduction: total=3"
    new = report_again(str(ledger), tmp_path, capsys)
    (record,) = ledger.glob("run-*.json")
    fields = json.loads(record.read_text())
    record.write_text(json.dumps({**fields, "what": "execution", "total": 3}))
    (part,) = ledger.glob("part-*.jsonl")
    part.write_text(part.read_text().replace(',"is_reduction":true', ""))
    old = report_again(str(ledger), tmp_path, capsys)
    assert new == old
    printed, page, rows = new
    assert "Outcome: 2 of 2 chunks succeeded\nReduction: total=3" in printed
    assert "Missing" not in printed
    assert "<h3>Reduction</h3>" in page
    assert [row["chunk_id"] for row in rows] == ["0", "1"]
    again = await chunks("SUBMIT(n=len(data))", data=[1, 2, 3], chunk_size=2, reduce=reduce, results_path=str(ledger))
    assert len(part.read_text().splitlines()) == 3  # Nothing ran.
    assert again.summary_fields == {"total": 3}
