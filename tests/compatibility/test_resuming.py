"""A job that an earlier version has run, run again on what that wrote, executes nothing that had succeeded."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ChunksReport

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


def assert_same(report: Any, job: Job) -> None:
    """Fails unless the flow returned what it had returned, random numbers included."""
    for outcome, expected in zip(outcomes_of(report), job.outcomes, strict=True):
        assert_outcome_is(outcome, expected)


@pytest.mark.parametrize("name", ["batch", "sweep", "sequence"])
async def test_a_complete_job_executes_nothing_and_returns_the_same(
    name: str, job_named: Callable[[str], Job], sandboxes: list[str]
) -> None:
    job = job_named(name)
    before = job.lines()
    assert_same(await job.run(), job)
    assert sandboxes == []
    assert job.lines() == before
    assert len(list(job.ledger.glob("run-*.json"))) == 2


async def test_results_are_found_in_any_ledger_of_the_root_where_that_is_asked_for(
    job_named: Callable[[str], Job], sandboxes: list[str], results: Path
) -> None:
    job = job_named("batch")
    before = job.lines()
    results.mkdir()
    os.rename(job.ledger, results / "of-then")
    assert_same(await job.run(cache_results=True, results_path=str(results / "of-today")), job)
    assert sandboxes == []
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
