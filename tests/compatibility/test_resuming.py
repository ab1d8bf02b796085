"""A job that an earlier version has run, run again on what that wrote, executes nothing that had succeeded."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ChunksReport, SweepReport
from rlm_batch.sandbox.errors import ExecutionsFailed

from .conftest import Job, assert_outcome_is, outcomes_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("server", "running_daytona", "no_process_left", "machine_of_then"),
]

FILES, MARKERS = 1_700_000_000, 1_700_000_001  # when they were written, in epoch seconds


@pytest.fixture
def volume(volumes: Path) -> Path:
    """A copy of the chunked job's volume, whose markers are later than the files that they speak of, as they were."""
    copy = volumes / "numbers"
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "jobs" / "chunks" / "volume", copy)
    for path in copy.rglob("*.json"):
        at = MARKERS if ".rlm-batch" in path.parts else FILES
        os.utime(path, (at, at))
    return copy


def without_marks(details: dict[str, Any]) -> dict[str, Any]:
    """An error's details whose tracebacks mark nothing below a line: Python 3.13 marks more than those before it."""
    marks = re.compile(r"^ *[~^]+\n", re.MULTILINE)
    return {name: marks.sub("", value) if isinstance(value, str) else value for name, value in details.items()}


def assert_same(report: Any, job: Job) -> None:
    """Fails unless the flow returned what it had returned, random numbers included."""
    for outcome, expected in zip(outcomes_of(report), job.outcomes, strict=True):
        assert_outcome_is(outcome, expected)


@pytest.mark.parametrize("name", ["batch", "sweep", "sequence", "queries", "rlm"])
async def test_a_complete_job_executes_nothing_and_returns_the_same(
    name: str, job_named: Callable[[str], Job], sandboxes: list[str], openai: Any
) -> None:
    job = job_named(name)
    before = job.lines()
    assert_same(await job.run(), job)
    assert sandboxes == []
    assert openai.stats.requests == 0
    assert job.lines() == before
    assert len(list(job.ledger.glob("run-*.json"))) == 2


async def test_a_sweep_has_the_best_trial_that_it_had(job_named: Callable[[str], Job]) -> None:
    job = job_named("sweep")
    report: SweepReport = await job.run()
    assert report.best is not None
    assert report.best.outputs["loss"] == min(trial["outputs"]["loss"] for trial in job.outcomes)
    assert (report.objective, report.direction) == ("loss", "minimize")


async def test_only_what_failed_is_executed_again(job_named: Callable[[str], Job], sandboxes: list[str]) -> None:
    job = job_named("failures")
    before = job.lines()
    for outcome, expected in zip(await job.run(), job.outcomes, strict=True):
        if "outputs" in expected:
            assert_outcome_is(outcome, expected)
        else:
            assert type(outcome.error).__name__ == expected["error"]
            details = {name: getattr(outcome.error, name) for name in expected["details"]}
            assert without_marks(details) == without_marks(expected["details"])
    failed = {line["key"] for line in before if line["status"] == "failed"}
    again = [line["key"] for line in job.lines() if line not in before]
    assert len(again) == len(sandboxes) == len(failed) == 7
    assert set(again) == failed


@pytest.mark.parametrize("name", ["batch", "sweep", "queries", "rlm"])
async def test_results_are_found_in_any_ledger_of_the_root_where_that_is_asked_for(
    name: str, job_named: Callable[[str], Job], sandboxes: list[str], openai: Any, results: Path
) -> None:
    job = job_named(name)
    before = job.lines()
    results.mkdir()
    os.rename(job.ledger, results / "of-then")
    assert_same(await job.run(cache_results=True, results_path=str(results / "of-today")), job)
    assert sandboxes == []
    assert openai.stats.requests == 0
    keys = {line["key"] for line in before if line["status"] == "succeeded"}
    of_today = Job(job.name, job.flow, job.arguments, job.outcomes, results / "of-today")
    assert {line["key"] for line in of_today.lines()} == keys


async def test_chunks_that_the_volume_says_are_complete_are_not_executed(
    volume: Path, job_named: Callable[[str], Job], sandboxes: list[str]
) -> None:
    job = job_named("chunks")
    before = job.lines()
    report: ChunksReport = await job.run()
    assert_same(report, job)
    assert list(report.results) == ["0", "b/1", "c"]
    assert len(sandboxes) == 1  # which reads the markers
    assert job.lines() == before


async def test_they_count_without_the_ledger_and_the_next_ledger_has_them_under_the_same_keys(
    volume: Path, job_named: Callable[[str], Job], sandboxes: list[str], tmp_path: Path
) -> None:
    """Those have no signature yet, so that their reader says whether it trusts the code that wrote to the volume."""
    job = job_named("chunks")
    elsewhere = Job(job.name, job.flow, job.arguments, job.outcomes, tmp_path / "elsewhere")
    outcomes = outcomes_of(await elsewhere.run(trust_markers=True))
    assert [outcome.outputs for outcome in outcomes if hasattr(outcome, "outputs")] == [
        expected["outputs"] for expected in job.outcomes
    ]
    assert [list(outcome.meta.files) for outcome in outcomes] == [
        expected["meta"]["files"] for expected in job.outcomes
    ]
    assert len(sandboxes) == 1
    assert {line["key"]: line["outputs"] for line in elsewhere.lines()} == {
        line["key"]: line["outputs"] for line in job.lines()
    }


async def test_without_that_word_and_the_ledger_they_do_not_count(
    volume: Path, job_named: Callable[[str], Job], tmp_path: Path
) -> None:
    job = job_named("chunks")
    elsewhere = Job(job.name, job.flow, job.arguments, job.outcomes, tmp_path / "elsewhere")
    draws = [outcome.outputs["draw"] for outcome in outcomes_of(await elsewhere.run())]
    assert not {outcome["outputs"]["draw"] for outcome in job.outcomes} & set(draws)


@pytest.mark.full
async def test_a_chunk_whose_file_is_newer_than_its_marker_is_executed_and_the_reduction_after_it(
    volume: Path, job_named: Callable[[str], Job]
) -> None:
    os.utime(volume / "parts" / "c.json")
    job = job_named("chunks")
    draws = [outcome.outputs["draw"] for outcome in outcomes_of(await job.run())]
    then = [outcome["outputs"]["draw"] for outcome in job.outcomes]
    assert [now == before for now, before in zip(draws, then, strict=True)] == [True, True, False, False]


async def test_a_sequence_that_was_not_complete_begins_again_under_the_same_keys(
    job_named: Callable[[str], Job], sandboxes: list[str]
) -> None:
    job = job_named("sequence-lost")
    before = job.lines()
    errors = [getattr(outcome, "error", None) for outcome in await job.run()]
    assert [type(error).__name__ if error else None for error in errors] == [
        outcome.get("error") for outcome in job.outcomes
    ]
    assert len(sandboxes) == 1
    assert [line["key"] for line in job.lines() if line not in before] == [line["key"] for line in before]


async def test_a_job_in_shards_is_complete_without_them_as_well(
    job_named: Callable[[str], Job], sandboxes: list[str]
) -> None:
    job = job_named("shards")
    assert_same(await job.run(shards=None), job)
    assert sandboxes == []


async def test_a_job_of_other_code_finds_nothing(job_named: Callable[[str], Job]) -> None:
    """Or what is held above would hold for a look-up that finds anything."""
    job = job_named("sweep")
    with pytest.raises(ExecutionsFailed, match="6 of 6 trials failed"):
        await job.run(code="raise RuntimeError('executed')")
