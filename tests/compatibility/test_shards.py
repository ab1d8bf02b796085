"""Shards and the jobs that wait for them may be of different versions: what one writes the other reads."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

from rlm_batch.blocks.storage.location_parsing import parse_location
from rlm_batch.deployments.deploy import deploy
from rlm_batch.flows.shard import shard
from rlm_batch.tasks.ledger.shard_files import ShardFiles, find_last_attempts, load_or_create_cut

from ..infra.workers import Worker
from .conftest import FIXTURES, Job, assert_outcome_is

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

LEDGER = FIXTURES / "shard_work" / "ledger"
EXPECTED = json.loads((FIXTURES / "shard_work" / "expected.json").read_text())


@pytest.fixture
async def worker(server: str, running_daytona: object, s3_process: Any, tmp_path: Path) -> Any:
    """A worker of another machine, as it were."""
    await deploy()
    ports = [int(s3_process.hello["url"].rpartition(":")[2])]
    consent = {"RLM_BATCH_ALLOW_NO_ISOLATION": "1", "RLM_BATCH_ALLOWED_PATHS": str(tmp_path)}
    with Worker(tmp_path / "machine", server, "worker-of-then", limit=2, ports=ports, environment=consent) as found:
        yield found


@pytest.mark.parametrize("attempt", EXPECTED["attempts"], ids=lambda attempt: attempt["work"])
def test_the_work_and_the_heartbeat_of_an_attempt_are_read(attempt: dict[str, Any]) -> None:
    files = ShardFiles.from_work_path(f"{LEDGER}/{attempt['work']}")
    header, executions = files.read_work()
    assert asdict(header) == attempt["head"]
    assert header.part_prefix == attempt["part_of"]
    for execution, expected in zip(executions, attempt["executions"], strict=True):
        assert execution.index == expected["index"]
        assert execution.code == expected["code"]
        assert execution.variables == expected["variables"]
        assert execution.key == expected["key"]
        assert {name: value.json.decode() for name, value in execution.encoded_variables.items()} == expected["encoded"]
        marker = execution.marker
        assert (None if marker is None else {"path": marker.path, "stale": marker.is_stale}) == expected["mark"]
    beat = files.read_heartbeat()
    if attempt["beat"] is None:
        assert beat is None
    else:
        assert beat is not None
        read = json.loads(json.dumps(asdict(beat)))
        assert {name: read[name] for name in attempt["beat"]} == attempt["beat"]


def test_a_job_finds_the_shards_that_it_was_cut_into(tmp_path: Path) -> None:
    ledger = parse_location(LEDGER)
    for job, size in EXPECTED["sizes"].items():
        assert load_or_create_cut(ledger, job, size + 1) == (EXPECTED["id"], size)
        last = {int(number): attempt for number, attempt in EXPECTED["last"][job].items()}
        assert find_last_attempts(ledger, job) == last


@pytest.mark.usefixtures("server", "running_daytona", "no_process_left")
@pytest.mark.full
async def test_a_shard_of_today_runs_the_work_of_a_job_of_then(job_named: Callable[[str], Job]) -> None:
    job = job_named("shards")
    before = job.lines()
    for part in job.ledger.glob("part-*"):
        part.unlink()
    for run in json.loads((job.ledger.parent / "shards.json").read_text()):
        name = Path(run["parameters"]["work"]).name
        (work,) = job.ledger.glob(f"shards/*/{name}")
        options = {**run["parameters"]["options"], "results_path": str(job.ledger)}
        await shard(work=str(work), options=options, volume_name=run["parameters"]["volume_name"])  # type: ignore[arg-type]
    assert {(line["key"], line["index"], line["outputs"]["y"]) for line in job.lines()} == {
        (line["key"], line["index"], line["outputs"]["y"]) for line in before
    }
    assert len(job.lines()) == len(before)
    assert {path.name.rpartition("-")[0][:-12] for path in job.ledger.glob("part-*")} == {
        "part-5e3a00f2b0f7-00000-1-",
        "part-5e3a00f2b0f7-00001-1-",
    }


@pytest.mark.usefixtures("machine_of_then", "worker")
@pytest.mark.full
async def test_a_job_that_lacks_a_shard_goes_on_with_that_shard_alone(job_named: Callable[[str], Job]) -> None:
    job = job_named("shards")
    (lacking,) = job.ledger.glob("part-*-00001-1-*.jsonl")
    lacking.unlink()
    before = job.lines()
    results = await job.run()
    for result, expected in zip(results[:4], job.outcomes, strict=False):
        assert_outcome_is(result, expected)
    assert [result.y for result in results] == [x * x for x in range(7)]
    (folder,) = {path.parent for path in job.ledger.glob("shards/*/*.jsonl")}
    assert sorted(path.name for path in folder.iterdir()) == [
        "00000-1.beat", "00000-1.jsonl", "00001-1.beat", "00001-1.jsonl", "00001-2.beat", "00001-2.jsonl", "size",
    ]  # fmt: skip
    assert len(job.lines()) == len(before) + 3
    key = "rlm-batch 9d9906c0d0234c0f 5e3a00f2b0f7 1 2"  # of the ledger, the job, the shard and the attempt
    async with get_client() as client:
        only = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
        assert len(await client.read_flow_runs(flow_run_filter=only)) == 1
