"""Artifacts of a flow run in Prefect's UI: progress, the final report, and the code's output while it runs."""

import asyncio
import base64
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import batch, chunks, sequence, sweep
from rlm_batch.flows.engine.artifacts import ArtifactPublisher
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.result import Result
from rlm_batch.tasks.ledger.run_record import ReportSpec, RunRecord

from ...infra.deployed import Deployed
from ...infra.waiting import wait_until_async
from ..conftest import find_run_id

pytestmark = pytest.mark.anyio


async def artifacts(run_id: str) -> dict[str, Any]:
    """Return the artifacts of a flow run by type."""
    async with get_client() as client:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))  # type: ignore[arg-type]
        return {artifact.type or "": artifact for artifact in await client.read_artifacts(artifact_filter=wanted)}


async def logs(run_id: str) -> list[Any]:
    """Return the log records of the code's output that the server has for a flow run."""
    await APILogHandler.aflush()
    async with get_client() as client:
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id]))  # type: ignore[arg-type]
        records: list[Any] = []
        while page := await client.read_logs(wanted, offset=len(records)):
            records += page
        return [record for record in records if record.name == "prefect.task_runs.output"]


async def test_a_sweeps_report_shows_the_best_trials_charts_and_failures():
    code = "if x == 3: raise ValueError('no <b>bold</b> | here')\nSUBMIT(loss=(x - 1) ** 2 + y)"
    grid = {"x": [0, 1, 2, 3], "y": [0.5, 1]}
    report = await sweep(code, grid, objective="loss", on_failure="return", reuse_sandboxes=True)
    run_id = Path(report.results_path).name
    run_artifacts = await artifacts(run_id)
    text = run_artifacts["markdown"].data
    rows = re.findall(r"^\| (\d+) \| (\d) \| ([\d.]+) \| ([\d.]*) \|", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "3", "0", "4", "1", "5", "6", "7"]
    assert rows[0][3] == "0.5"
    assert "6 of 8 trials succeeded, 2 failed" in text
    assert "<b>" not in text.partition("```")[0]  # a code block shows it as text
    assert "ValueError" in text
    pictures = [base64.b64decode(data) for data in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", text)]
    assert [b"loss over trials" in picture for picture in pictures] == [True, False]
    assert b"loss over x and y" in pictures[1]
    assert re.search(r"4 opened|3 opened|2 opened|1 opened", text)
    table = json.loads(run_artifacts["table"].data)
    assert [row["index"] for row in table] == [2, 3, 0, 4, 1, 5, 6, 7]
    assert {**table[0], "seconds": 0} == {"index": 2, "x": 1, "y": 0.5, "loss": 0.5, "seconds": 0, "outcome": "best"}
    # The text is escaped, so that Prefect's UI shows it as text.
    assert r"ValueError (line 1\)\: no \<b\>bold\</b\> \| here" in table[-1]["outcome"]


async def test_a_cancelled_run_has_a_report_with_the_path_of_its_results(results: Path, tmp_path: Path):
    code = "import time\nwhile x: time.sleep(0.05)\nSUBMIT(y=x)"
    running = asyncio.create_task(batch(code, [{"x": 0}, {"x": 1}], provider="local:none", max_workers=1))
    await wait_until_async(lambda: any(part.stat().st_size for part in results.glob("*/part-*")))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    run_id = str(find_run_id(results))
    text = (await artifacts(run_id))["markdown"].data
    assert "1 of 2 executions succeeded" in text
    assert str(results / run_id) in text.replace("\\", "")


async def test_every_flow_ends_with_a_report(results: Path):
    await batch(["SUBMIT(a=1)", "SUBMIT(a=2)"])
    await chunks("SUBMIT(n=len(data))", data=[1, 2, 3], chunk_size=2, reduce="SUBMIT(n=len(results))")
    await sequence(["a = 1", "SUBMIT(a=a)"])
    run_artifacts = [await artifacts(folder.name) for folder in results.iterdir()]
    said = {kinds["markdown"].key: kinds["markdown"].data for kinds in run_artifacts}
    assert set(said) == {"rlm-batch-report", "rlm-chunks-report", "rlm-sequence-report"}
    assert "2 of 2 chunks succeeded" in said["rlm-chunks-report"]
    assert "| Reduction | n\\=2 |" in said["rlm-chunks-report"]
    assert "2 of 2 steps succeeded" in said["rlm-sequence-report"]


async def test_every_deployment_has_keys_of_its_own():
    """Prefect takes only small letters, digits and dashes, and the first name begins like its flow's."""
    keys: list[str | None] = []
    for name in ("rlm-batch-every-night", "every-night", "every-night-", "Every night"):
        run = await Deployed.made(deployment=name, code=["SUBMIT(a=1)"])
        assert (await run.execute()).is_completed()
        keys += [key for key, _ in await run.list_artifacts("markdown")]
    assert keys[:2] == ["rlm-batch-rlm-batch-every-night-report", "rlm-batch-every-night-report"]
    assert len(set(keys)) == 4
    assert all(key.startswith("rlm-batch-every-night") for key in keys[2:] if key)


async def test_progress_is_published_during_a_run_and_ends_complete(tmp_path: Path, results: Path):
    """The last execution waits until the server has the progress of the others."""
    seen = tmp_path / "seen"
    code = f"import os, time\nwhile last and not os.path.exists({str(seen)!r}):\n    time.sleep(0.05)\nSUBMIT()"
    inputs = [{"last": False}, {"last": False}, {"last": True}]
    run = asyncio.ensure_future(batch(code, inputs, provider="local:none", max_workers=1))
    await wait_until_async(lambda: list(results.glob("*/run-*.json")), "the run's record")
    run_id = str(find_run_id(results))

    async def find_progress() -> Any:
        assert not run.done()
        progress = (await artifacts(run_id)).get("progress")
        return progress if progress is not None and progress.data >= 66 else None

    assert (await wait_until_async(find_progress)).description == "2 of 3 executions succeeded"
    seen.touch()
    await run
    assert (await artifacts(run_id))["progress"].data == 100


async def test_a_missing_server_causes_one_warning_and_fails_no_run(
    closed_address: str, caplog: pytest.LogCaptureFixture
):
    record, summary = RunRecord("sweep", "/a/ledger", total=2), RunSummary(ReportSpec())
    log = logging.getLogger("test_told")
    outcomes = [Result({"y": 1}, Meta(index=0)), Result({"y": 2}, Meta(index=1))]
    with temporary_settings({PREFECT_API_URL: f"http://{closed_address}/api"}), caplog.at_level("WARNING", "test_told"):
        async with ArtifactPublisher(record, summary, log):
            for outcome in outcomes:
                summary.add(outcome)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "test_told"]
    assert "`rlm-batch report /a/ledger` makes one" in said
    assert "\n" not in said


async def test_output_is_streamed_to_the_log_of_its_task_run(tmp_path: Path, results: Path):
    """The code continues only after its first line has been logged."""
    heard = tmp_path / "heard"

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "0: first":
                heard.touch()

    code = (
        "import os, sys, time\nprint('first', flush=True)\n"
        f"while not os.path.exists({str(heard)!r}):\n    time.sleep(0.02)\n"
        "print('a\\x1b[31m red', file=sys.stderr)\nprint('half', end='')"
    )
    logger, handler = logging.getLogger("prefect.task_runs.output"), Hear()
    logger.addHandler(handler)
    try:
        await batch([code], provider="local:none")
    finally:
        logger.removeHandler(handler)
    run_id = str(find_run_id(results))
    records = await logs(run_id)
    assert sorted((record.level, record.message) for record in records) == [
        (logging.INFO, "0: first"),
        (logging.INFO, "0: half"),
        (logging.WARNING, "0: a\\x1b[31m red"),
    ]
    async with get_client() as client:
        wanted = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[run_id]))  # type: ignore[arg-type]
        (task_run,) = await wait_until_async(lambda: client.read_task_runs(task_run_filter=wanted), "the task run")
    assert {record.task_run_id for record in records} == {task_run.id}


@pytest.mark.full
async def test_long_output_is_truncated_in_the_log_and_logging_can_be_disabled(results: Path):
    code = "print('x' * 3000)\nfor number in range(5000): print(number)"
    await batch([code])
    run_id = str(find_run_id(results))
    messages = [record.message for record in await logs(run_id)]
    assert len(messages) == 201
    assert max(map(len, messages)) < 1100
    assert any(re.search(r"\d+ more lines are left out of this log", message) for message in messages)
    await batch([code], log_output=False)
    (other,) = [folder.name for folder in results.iterdir() if folder.name != run_id]
    assert await logs(other) == []
