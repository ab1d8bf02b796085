"""One shard of a job, as its worker runs it."""

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import FailedRun
from prefect.flow_engine import run_flow_async
from prefect.states import Cancelled, Cancelling, Crashed

from rlm_batch import LocalSandbox
from rlm_batch.blocks.storage.location import list_names
from rlm_batch.flows.parameters import Options
from rlm_batch.flows.shard import shard
from rlm_batch.tasks.execution import assign_keys
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.shards import ShardFiles, ShardHeader

from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio


def files_of(results: Path, code: str, count: int = 6, attempt: int = 1) -> ShardFiles:
    """Write the work of a shard whose first execution has number 10."""
    executions = list(assign_keys([(code, {"x": x}) for x in range(10 + count)], {}))[10:]
    files = ShardFiles(results / "job", "abc", 1, attempt)
    head = ShardHeader(2, count, "execution", None)
    files.write_work(head, executions)
    return files


def options_of(files: ShardFiles, **parameters: Any) -> Options:
    """Return the options that a job passes to its shards."""
    arguments = {"provider": "local:none", "max_workers": 2, "results_path": str(files.ledger), **parameters}
    options = Options(**arguments, executions_per_task=3, reuse_sandboxes=True, on_failure="return")
    return options.options


async def run(files: ShardFiles, **parameters: Any) -> None:
    await shard(work=str(files.work_path), options=options_of(files, **parameters))


async def run_to_state(files: ShardFiles, **parameters: Any) -> State[Any]:
    run_shard: Any = shard  # Type checkers do not know `return_state`.
    return await run_shard(work=str(files.work_path), options=options_of(files, **parameters), return_state=True)


def read_values(files: ShardFiles) -> dict[int, Any]:
    """Return the submitted `y` of every successful line by number; fail if two lines have the same key."""
    successes = [line for line in Ledger(files.ledger).read_lines() if line.is_success]
    assert len({line.key for line in successes}) == len(successes)
    return {line.data["index"]: line.data["outputs"]["y"] for line in successes}


async def test_a_shard_writes_its_outcomes_to_the_jobs_ledger(results):
    files = files_of(results, "SUBMIT(y=1 // (x - 12))")
    await run(files)
    assert read_values(files) == {10: -1, 11: -1, 13: 1, 14: 0, 15: 0}
    assert {name[:17] for name in list_names(files.ledger, "part-*")} == {"part-abc-00001-1-"}
    assert list_names(files.ledger, "run-*.json") == []  # only jobs write run records


async def test_a_retried_shard_skips_executions_with_results(results, tmp_path):
    """Prefect's Retry repeats an attempt, for example. The job itself skips the results of earlier attempts."""
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('x'); SUBMIT(y=x)"
    files = files_of(results, code)
    await run(files)
    await run(files)
    assert (tmp_path / "ran").read_text() == "x" * 6
    assert len(read_values(files)) == 6
    await run(files_of(results, code, attempt=2))
    assert (tmp_path / "ran").read_text() == "x" * 12


@pytest.mark.parametrize("state", [Cancelling(), Crashed()], ids=["cancelled", "started again"])
async def test_a_shard_that_its_job_has_stopped_ends_and_leaves_no_sandbox(state, results, tmp_path, monkeypatch):
    monkeypatch.setattr("rlm_batch.flows.shard.STATE_INTERVAL_SECONDS", 0.2)
    begun = tmp_path / "begun"
    files = files_of(results, f"open({str(begun)!r}, 'w').write(''); import time; time.sleep(1000)")
    running = asyncio.create_task(run_to_state(files, timeout=1000))
    await wait_until_async(begun.exists)
    async with get_client() as client:
        only = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])))
        (own,) = [
            found for found in await client.read_flow_runs(flow_run_filter=only)
            if found.parameters.get("work") == str(files.work_path)
        ]  # fmt: skip
        await client.set_flow_run_state(own.id, state, force=True)
    ended = await asyncio.wait_for(running, 90)
    assert (ended.type, ended.message) == (StateType.CANCELLED, "the job has stopped this shard")
    assert read_values(files) == {}


async def test_a_shard_that_was_cancelled_before_its_process_started_runs_nothing(results):
    files = files_of(results, "SUBMIT(y=1)")
    work = str(files.work_path)
    async with get_client() as client:
        own = await client.create_flow_run(shard, parameters={"work": work}, state=Cancelled())
    parameters = {"work": work, "options": options_of(files)}
    state: Any = await run_flow_async(shard, own, parameters, return_type="state")
    assert state.name == "Cancelled"
    assert read_values(files) == {}


@pytest.mark.parametrize(
    ("code", "parameters", "name", "message"),
    [
        ("import time; time.sleep(1000)", {"deadline": 1, "timeout": 1000}, "DeadlineExceeded", "6 executions had not"),
        ("SUBMIT(y=1)", {"prepare": "1 / 0"}, "PrepareError", "prepare raised ZeroDivisionError"),
    ],
)
async def test_a_shard_says_in_its_state_why_executions_are_undone(results, code, parameters, name, message):
    state = await run_to_state(files_of(results, code), **parameters)
    assert (state.type, state.name) == (StateType.FAILED, name)
    assert message in (state.message or "")


@pytest.mark.full
async def test_a_shard_gets_its_jobs_modules_data_and_tools_or_refuses_to_start(results, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "mine.py").write_text("VALUE = 2\n")
    data = tmp_path / "data.txt"
    data.write_text("2")
    value = f"x * mine.VALUE * int(open({str(data)!r}).read()) // count('ab')"
    files = files_of(results, f"import mine\nopen('x.txt', 'w').write(str(x))\nSUBMIT(y={value})")
    host_files = {"python_path": [str(source)], "mounts": {str(data): str(data)}}
    tools = {"count": "builtins:len"}
    more = {"tools": tools, "collect": ["*.txt"]}
    options = options_of(files, **host_files, **more)
    digest = await LocalSandbox().with_files(**host_files).compute_files_digest()
    before = data.stat()
    for path, other in ((source / "mine.py", "VALUE = 3\n"), (data, "12")):
        was = path.read_text()
        path.write_text(other)
        with pytest.raises(FailedRun, match="the files of python_path or mounts differ on this worker"):
            await shard(work=str(files.work_path), options=options, files_digest=digest)
        path.write_text(was)
    assert read_values(files) == {}
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    await shard(work=str(files.work_path), options=options, files_digest=digest)
    assert read_values(files) == {x: 2 * x for x in range(10, 16)}
    homes = [line.to_outcome().meta.collected for line in Ledger(files.ledger).read_lines()]
    assert sorted(homes) == [(str(files.ledger / f"files/{x}/x.txt"),) for x in range(10, 16)]
    assert (results / "job/files/12/x.txt").read_text() == "12"


async def test_a_shard_that_cannot_reach_the_ledger_says_so(results):
    files = files_of(results, "SUBMIT(y=1)")
    os.remove(str(files.work_path))
    with pytest.raises(FailedRun, match="every worker reaches under the same name"):
        await run(files)


async def test_a_shards_paths_need_the_workers_consent(results, tmp_path, monkeypatch, allow):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))  # a worker sets this variable
    allow(allow_no_isolation=True)
    elsewhere, here = (files_of(folder, "SUBMIT(y=x)") for folder in (tmp_path / "elsewhere", results))
    for files, ledger in ((elsewhere, here.ledger), (here, elsewhere.ledger)):
        with pytest.raises(FailedRun, match="allowed_paths"):
            await run(files, results_path=str(ledger))
    assert list_names(elsewhere.ledger, "part-*") == []
    await run(here)
    assert len(read_values(here)) == 6
