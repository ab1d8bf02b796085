"""A ledger that an earlier version wrote is read: each outcome in full, and the report on it."""

import csv
import os
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.cli.main import main
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger

from .conftest import Job, assert_outcome_is, copy_job


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is asked: here is none."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")


def report(*words: object) -> int:
    """The exit status of `rlm-batch report` with these words."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    return int(ended.value.code or 0)


def test_every_outcome_is_read_with_all_that_was_known_of_it(job: Job) -> None:
    outcomes = list(open_run_ledger(str(job.ledger)).read_outcomes())
    assert len(outcomes) == len(job.outcomes)
    for outcome, expected in zip(outcomes, job.outcomes, strict=True):
        assert_outcome_is(outcome, expected)


def test_it_is_reported_on(job: Job, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert report(job.ledger, "--html", tmp_path / "page.html", "--csv", tmp_path / "table.csv") == 0
    said = capsys.readouterr()
    succeeded = sum("outputs" in outcome for outcome in job.outcomes)
    assert f"Outcome: {succeeded} of {len(job.outcomes)} " in said.err
    assert (tmp_path / "page.html").stat().st_size > 1000
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == [outcome["meta"]["index"] for outcome in job.outcomes]
    assert [row["status"] == "succeeded" for row in rows] == ["outputs" in outcome for outcome in job.outcomes]
    assert [row["error"] for row in rows] == [outcome.get("error", "") for outcome in job.outcomes]
    assert [float(row["seconds"]) for row in rows] == [outcome["meta"]["seconds"] for outcome in job.outcomes]
    assert [int(row["attempt"]) for row in rows] == [outcome["meta"]["attempt"] for outcome in job.outcomes]


def test_a_run_is_found_by_its_name_and_by_its_id(results: Path) -> None:
    results.mkdir()
    os.rename(copy_job("errors", results.parent).ledger, results / "of-then")
    for run in ("old-otter", "0f8fad5b-d9cb-469f-a165-70867728950e"):
        found = open_run_ledger(run)
        assert found.ledger.path == results / "of-then"
        (record,) = found.records
        assert (record.flow, record.total, record.sandboxes, record.sandbox_seconds) == ("batch", 22, 3, 20.5)
        assert (record.provider, record.began) == ("modal", 1.7e9)
        assert record.ended is not None
    with pytest.raises(ConfigurationError, match="there is no run"):
        open_run_ledger("new-otter")


def test_the_report_knows_the_best_trial_of_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = copy_job("sweep", tmp_path)
    best = min((outcome for outcome in job.outcomes), key=lambda outcome: outcome["outputs"]["loss"])
    assert report(job.ledger) == 0
    said = capsys.readouterr()
    assert f"Best loss: {best['outputs']['loss']:.6g} in trial {best['meta']['index']} " in said.err
    assert [line.split()[0] for line in said.out.splitlines() if line.endswith("best")] == [str(best["meta"]["index"])]
