"""Jobs in shards: the same results as in one process, whatever happens to the workers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.filesystems import RemoteFileSystem

from rlm_batch import (
    CodeError,
    ConfigurationError,
    ExecutionsFailed,
    Failure,
    NotRun,
    PrepareError,
    batch,
    chunks,
    load_report,
    sweep,
)
from rlm_batch.deployments.deploy import deploy
from rlm_batch.tasks.ledger.ledger import Ledger

from ...infra.consent import move_home
from ...infra.waiting import wait_until_async
from ...infra.workers import Worker, its_own, wait_until_online

# 600 seconds, mostly for the start of the server and the worker.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def worker(server: str, s3_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker that acts like another machine and takes three flow runs at a time."""
    asyncio.run(deploy())
    folder = tmp_path_factory.mktemp("worker")
    allowed_paths = [str(tmp_path_factory.getbasetemp())]
    consent = move_home(folder / "user", allow_no_isolation=True, allowed_paths=allowed_paths)
    with Worker(folder / "machine", server, "worker-of-shards", limit=3, environment=consent) as shard_worker:
        asyncio.run(wait_until_online(shard_worker.name))
        yield shard_worker


@pytest.fixture
def shared(worker: Worker, tmp_path: Path) -> Path:
    """Return a directory that the worker reaches by the same path."""
    return tmp_path / "shared"


def count_results(ledger: Path) -> Counter[str]:
    """Return the number of results of each key."""
    return Counter(line.key for line in Ledger(ledger).read_lines() if line.is_success)


def read_job_id(ledger: Path) -> str:
    """Return the flow run id of the only job that has written to the ledger."""
    (run,) = ledger.glob("run-*.json")
    return json.loads(run.read_text())["flow_run_id"]


async def shards_of(run_id: str) -> list[Any]:
    children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(run_id)]))
    async with get_client() as client:
        return await client.read_flow_runs(flow_run_filter=children)


async def are_over(run_id: str) -> bool:
    """Return True if all shards of the job have ended; after a cancellation the job itself waits only 20 s."""
    return all(run.state.is_final() for run in await shards_of(run_id))


@pytest.mark.full
async def test_a_job_with_too_many_failures_ends_its_shards(shared, tmp_path):
    # The first shard fails after the second has started, because Prefect may miss the cancellation of a starting run.
    code = f"""
import os, time
begun = {str(tmp_path / "begun")!r}
if x >= 10:
    open(begun, "w").close()
    time.sleep(1000)
while not os.path.exists(begun):
    time.sleep(0.05)
raise ValueError(x)
"""
    parameters: dict[str, Any] = {"inputs": [{"x": x} for x in range(20)], "shards": 2, "results_path": str(shared)}
    outcomes = await batch(
        code, max_failures=3, on_failure="return", max_workers=1, timeout=1000, provider="local:none", **parameters
    )
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failure) and isinstance(outcome.error, CodeError)]
    idle = [outcome for outcome in outcomes if isinstance(outcome, Failure) and isinstance(outcome.error, NotRun)]
    assert 3 <= len(failed) <= 10
    assert len(failed) + len(idle) == 20
    assert "executions failed, and `max_failures` is 3" in str(idle[0].error)
    await wait_until_async(lambda: are_over(read_job_id(shared)))


@pytest.mark.full
async def test_results_keep_their_order_and_a_resumed_job_runs_only_failures(shared, tmp_path):
    inputs: list[dict[str, Any]] = [{"x": x} for x in range(12)]
    code = f"""
if x == 7 and not __import__("os").path.exists({str(tmp_path)!r} + "/mended"):
    raise ValueError("seven")
SUBMIT(y=x * x)
"""
    options: dict[str, Any] = {"shards": 3, "results_path": str(shared), "provider": "local:none"}
    with pytest.raises(ExecutionsFailed, match="1 of 12 executions failed") as caught:
        await batch(code, inputs=inputs, **options)
    (failure,) = caught.value.failures
    assert (failure.meta.index, type(failure.error)) == (7, CodeError)
    async with get_client() as client:
        job = await client.read_flow_run(UUID(read_job_id(shared)))
    runs = await shards_of(str(job.id))
    assert sorted(run.name for run in runs) == [f"{job.name} {number} of 3" for number in (1, 2, 3)]
    assert {run.state_name for run in runs} == {"Completed"}

    (tmp_path / "mended").touch()
    results = await batch(code, inputs=inputs, **options)
    assert [result["y"] for result in results] == [x * x for x in range(12)]
    assert len(count_results(shared)) == 12
    assert set(count_results(shared).values()) == {1}


@pytest.mark.full
async def test_a_misspelt_objective_ends_the_shards_at_the_first_success(shared, tmp_path):
    # Only trial 0 ends by itself, so the job could not end otherwise.
    code = "import time\nwhile x:\n    time.sleep(1)\nSUBMIT(loss=x)"
    parameters: dict[str, Any] = {"grid": {"x": list(range(8))}, "shards": 2, "results_path": str(shared)}
    with pytest.raises(ConfigurationError, match="no trial submitted 'los', they submitted loss"):
        await sweep(code, objective="los", max_workers=2, provider="local:none", **parameters)
    await wait_until_async(partial(are_over, read_job_id(shared)))
    assert sum(count_results(shared).values()) == 1


@pytest.mark.full
async def test_shards_run_prepare_and_its_error_ends_the_job(shared):
    parameters: dict[str, Any] = {"inputs": [{"x": x} for x in range(6)], "shards": 2, "provider": "local:none"}
    code = "SUBMIT(y=base + x)"
    results = await batch(code, prepare="base = 100", results_path=str(shared), **parameters)
    assert [result["y"] for result in results] == [100 + x for x in range(6)]
    with pytest.raises(PrepareError, match=r"shard [12]: prepare raised ZeroDivisionError"):
        await batch(code, prepare="base = 1 / 0", results_path=str(shared), **parameters)


@pytest.mark.full
async def test_chunks_in_shards_are_judged_and_reduced_once_and_a_complete_job_runs_nothing(shared, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{number}\n" for number in range(20)))
    code = "SUBMIT(total=sum(data))"
    reduce = "SUBMIT(total=sum(fields['total'] for fields in results.values()))"
    check = "SUBMIT(total=submitted['total'] if chunk_id != '0' else 0)"  # It does not judge the reduction.
    options: dict[str, Any] = {"shards": 2, "results_path": str(shared), "provider": "local:none"}
    for _ in range(2):
        report = await chunks(code, data=str(data), chunk_size=3, reduce=reduce, check=check, **options)
        assert report.reduction is not None
        assert report.reduction.outputs == {"total": sum(range(3, 20))}
        assert report["6"]["total"] == 18 + 19
        assert load_report(str(shared)).summary_fields == report.reduction.outputs
        judged = report["0"].meta.judged
        assert judged is not None
        assert judged["outputs"] == {"total": 0 + 1 + 2}
        assert list(report.results) == [str(number) for number in range(7)]
    assert set(count_results(shared).values()) == {1}


@pytest.mark.full
async def test_a_resumed_job_with_another_check_runs_no_code_again(shared, tmp_path):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('x')\nif x == 3: 1 / 0\nSUBMIT(y=x)"
    options: dict[str, Any] = {"shards": 2, "results_path": str(shared), "provider": "local:none"}
    inputs = [{"x": x} for x in range(5)]
    for limit in (9, 2, 3):
        judge, count = f"SUBMIT(passed=submitted.get('y', 9) < {limit})", "SUBMIT(n=[row['x'] for row in results])"
        results = await batch(code, inputs, check=judge, summarize=count, **options)
        assert [result.passed for result in results] == [x < limit and x != 3 for x in range(5)]
        assert results.summary_fields == load_report(str(shared)).summary_fields == {"n": [0, 1, 2, 3, 4]}
    assert ran.read_text() == "x" * 5
    results = await batch(code, inputs, check="SUBMIT(passed=not error)", **{**options, "shards": None})
    assert ([result.passed for result in results], ran.read_text()) == ([x != 3 for x in range(5)], "x" * 5)


@pytest.mark.full
async def test_shards_judge_repeats_and_a_resumed_run_judges_only_the_new_ones(shared):
    """Task 0 passes in no repeat, task 1 in one, and so on. Every second sample of task 3 exits without a result."""
    code = "import sys\nif task == 3 and repeat % 2: sys.exit(0)\nSUBMIT(passed=True, y=repeat)"
    check = "SUBMIT(passed=submitted.get('y', 9) < task, seen=repeat)"
    options: dict[str, Any] = {"check": check, "shards": 3, "results_path": str(shared)}
    inputs = [{"task": task} for task in range(4)]
    expected = [[False] * 4, [True, False, False, False], [True, True, False, False], [True, False, True, False]]
    for repeats in (4, 6):
        results = await batch(code, inputs, repeats=repeats, **options)
        assert len(results) == 4 * repeats
        for task, passes in enumerate(expected):
            rows = results[task * repeats : (task + 1) * repeats]
            assert [row.passed for row in rows] == passes + [False] * (repeats - 4)
            assert [row.seen for row in rows] == [row.meta.repeat for row in rows] == list(range(repeats))
        assert results.pass_at_k(1).value == pytest.approx((0 + 1 + 2 + 2) / 4 / repeats)
        stored = load_report(str(shared))
        assert [row.outputs for row in stored.results] == [row.outputs for row in results]
        assert stored.pass_at_k(repeats).value == results.pass_at_k(repeats).value == 0.75
        assert [group.outputs["passed"] * repeats for group in stored.groups] == pytest.approx([0, 1, 2, 2])
        for report in (results, stored):
            frame = report.to_dataframe(by="task")
            assert frame[["task", "passed.sum", "passed.count"]].values.tolist() == [
                [0, 0, repeats], [1, 1, repeats], [2, 2, repeats], [3, 2, repeats]
            ]  # fmt: skip
    assert set(count_results(shared).values()) == {1}
    assert len(count_results(shared)) == 24


@pytest.mark.full
async def test_shards_share_a_bucket_with_a_blocks_credentials(server, worker, s3, tmp_path):
    settings = {"key": "of-the-block", "secret": "of-the-block", "client_kwargs": {"endpoint_url": s3.hello["url"]}}
    block = RemoteFileSystem(basepath="s3://results/jobs", settings=settings)
    await block.save("bucket", overwrite=True)  # type: ignore[misc]
    place = "block://remote-file-system/bucket/job-1"
    program = tmp_path / "job.py"
    program.write_text(
        "import asyncio\n"
        "from rlm_batch import batch\n"
        "results = asyncio.run(batch('SUBMIT(y=x * x)', inputs=[{'x': x} for x in range(10)], shards=2,\n"
        f"    results_path={place!r}, provider='local:none'))\n"
        "assert [result['y'] for result in results] == [x * x for x in range(10)]\n"
    )
    environment = {**os.environ, **its_own(tmp_path / "job", server)}
    for _ in range(2):
        ran = [sys.executable, str(program)]
        done = await asyncio.to_thread(subprocess.run, ran, env=environment, check=False)
        assert done.returncode == 0
    success_counts = Counter(line.key for line in Ledger(place).read_lines() if line.is_success)
    assert len(success_counts) == 10
    assert set(success_counts.values()) == {1}


async def start_two_shards(shared: Path, go: Path) -> tuple[asyncio.Task[Any], set[str]]:
    """Start a job, and return its task and its shards once 20 of its 60 executions have ended; the rest waits."""
    inputs, code = [{"x": x} for x in range(60)], wait_for_file(go)
    options: dict[str, Any] = {"provider": "local:none", "reuse_sandboxes": True, "timeout": 1000}
    job = asyncio.create_task(batch(code, inputs=inputs, shards=2, results_path=str(shared), **options))
    await wait_until_async(lambda: len(count_results(shared)) == 20, timeout=200)
    return job, {str(run.id) for run in await shards_of(read_job_id(shared))}


@pytest.mark.full
async def test_a_killed_shard_restarts_with_its_remaining_executions(worker, shared, tmp_path):
    job, shards = await start_two_shards(shared, tmp_path / "go")
    try:
        # The deployments' schedule may add other runs to this worker.
        processes = await wait_until_async(lambda: [pid for pid, run in worker.flow_runs().items() if run in shards])
        os.kill(processes[0], signal.SIGKILL)
    finally:
        (tmp_path / "go").touch()
    results = await job
    assert [result["x"] for result in results] == list(range(60))
    assert set(count_results(shared).values()) == {1}
    assert list((shared / "shards").glob("*/*-2.jsonl"))


@pytest.mark.full
async def test_a_shard_without_heartbeats_restarts_and_one_that_sends_them_goes_on(worker, shared, tmp_path):
    job, shards = await start_two_shards(shared, tmp_path / "go")
    process = next(pid for pid, run in worker.flow_runs().items() if run in shards)
    parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

    async def is_crashed() -> bool:
        return any(run.state.is_crashed() for run in await shards_of(read_job_id(shared)))

    os.kill(parent, signal.SIGSTOP)  # The worker cannot report the end of the process.
    try:
        os.kill(process, signal.SIGKILL)
        await wait_until_async(is_crashed, timeout=300)
    finally:
        os.kill(parent, signal.SIGCONT)
        (tmp_path / "go").touch()
    results = await job
    assert [result["x"] for result in results] == list(range(60))
    assert set(count_results(shared).values()) == {1}
    assert len(list((shared / "shards").glob("*/*-2.jsonl"))) == 1


@pytest.mark.full
async def test_cancelling_a_job_while_shards_start_leaves_no_shard(worker, shared):
    parameters: dict[str, Any] = {"inputs": [{"x": x} for x in range(2)], "shards": 2, "results_path": str(shared)}
    job = asyncio.create_task(batch("import time; time.sleep(1000)", provider="local:none", timeout=1000, **parameters))

    async def is_starting() -> bool:
        if not list(shared.glob("run-*.json")):
            return False
        return any(run.state.is_pending() for run in await shards_of(read_job_id(shared)))

    await wait_until_async(is_starting)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    runs = {str(run.id) for run in await shards_of(read_job_id(shared))}
    await wait_until_async(
        lambda: not runs & set(worker.flow_runs().values())
    )  # a shard that started before the cancellation has ended
    assert {run.state_name for run in await shards_of(read_job_id(shared))} == {"Cancelled"}


@pytest.mark.full
async def test_a_resumed_job_stops_its_running_shards_and_runs_the_rest(server, shared, tmp_path):
    program = tmp_path / "job.py"
    program.write_text(
        "import asyncio\n"
        "from rlm_batch import batch\n"
        f"asyncio.run(batch({wait_for_file(tmp_path / 'go')!r}, inputs=[{{'x': x}} for x in range(60)],\n"
        f"    shards=2, results_path={str(shared)!r}, provider='local:none', reuse_sandboxes=True, timeout=1000))\n"
    )
    command, environment = [sys.executable, str(program)], {**os.environ, **its_own(tmp_path / "job", server)}
    first = subprocess.Popen(command, env=environment)  # noqa: ASYNC220
    try:
        await wait_until_async(lambda: len(count_results(shared)) == 20, timeout=200)
    finally:
        first.kill()
        first.wait()
        (tmp_path / "go").touch()
    again = await asyncio.to_thread(subprocess.run, command, env=environment, check=False)
    assert again.returncode == 0
    assert len(count_results(shared)) == 60
    assert set(count_results(shared).values()) == {1}
    assert not list((shared / "shards").glob("*/*-2.jsonl"))


def wait_for_file(path: Path) -> str:
    """Return code for 60 executions in two shards: ten of each shard end at once, the others when the file exists."""
    return f"import os, time\nwhile x % 30 >= 10 and not os.path.exists({str(path)!r}): time.sleep(0.05)\nSUBMIT(x=x)"


@pytest.mark.full
async def test_a_random_search_draws_the_same_points_with_shards(shared, tmp_path):
    parameters = {"space": {"x": {"low": 0.0, "high": 1.0}}, "trials": 6, "sampler": "random", "objective": "loss"}
    options = {"provider": "local:none", **parameters}
    sharded = await sweep("SUBMIT(loss=x)", shards=2, results_path=str(shared), **options)
    alone = await sweep("SUBMIT(loss=x)", results_path=str(tmp_path / "alone"), **options)
    assert [trial.meta.variables for trial in sharded.trials] == [trial.meta.variables for trial in alone.trials]
    assert sharded.best.loss == alone.best.loss
    assert len(str(sharded).splitlines()) == 7
