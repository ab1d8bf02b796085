"""Work that was done is not done again: Prefect's Retry, the same ledger, and results of earlier flow runs."""

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.responses import SetStateStatus
from pydantic import SecretStr

from rlm_batch import DaytonaSandbox, ExecutionsFailed, LocalSandbox, ModalSandbox, batch
from rlm_batch.tasks.execution import assign_keys
from rlm_batch.tasks.ledger.ledger import Ledger

from ...infra.deployed import Deployed
from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

pytestmark = pytest.mark.anyio

SOME_FAIL = COUNT_EXECUTION + "count_execution(x)\nassert x % 10, 'one in ten'\nSUBMIT(y=x * x)"
LATER = COUNT_EXECUTION + "times = count_execution(x)\nassert x % 3 or times > 1, 'not yet'\nSUBMIT(y=x * x)"


@contextmanager
def worker(pool: str, results: Path) -> Iterator[None]:
    """A process worker of that pool."""
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool],
        env={
            **os.environ,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "RLM_BATCH_RESULTS": str(results),
            "RLM_BATCH_ALLOW_NO_ISOLATION": "1",
        },
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def lines(path: Path) -> list[dict[str, Any]]:
    """Everything that was ever written to a ledger."""
    return [json.loads(line) for part in path.glob("part-*.jsonl") for line in part.read_text().splitlines()]


@pytest.mark.parametrize("per_task", [1, pytest.param(4, marks=pytest.mark.full)])
async def test_prefects_retry_executes_only_what_has_no_result(
    counter: ExecutionCounter,
    results: Path,
    per_task: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RLM_BATCH_ALLOW_NO_ISOLATION", "1")
    inputs = [{"x": x, "address": counter.address} for x in range(8)]
    flow = await Deployed.made(code=LATER, inputs=inputs, provider="local:none", executions_per_task=per_task)
    state = await flow.execute()
    assert state.is_failed()
    assert "3 of 8 executions failed" in str(state.message)
    assert "retry the flow run to run only those that failed" in str(state.message)
    assert await flow.retry() == SetStateStatus.ACCEPT
    state = await flow.execute()
    assert state.is_completed(), state
    assert [line for line in caplog.messages if "to run" in line and "kept" in line] == ["5 kept, 3 to run"]
    assert [result.y for result in await state.result()] == [x * x for x in range(8)]
    assert counter.counts == {str(x): 1 if x % 3 else 2 for x in range(8)}
    deployment = await flow.read_deployment_name()
    assert await flow.list_artifacts("markdown") == [
        (f"batch-{deployment}-report", "5 of 8 executions succeeded"),
        (f"batch-{deployment}-report", "8 of 8 executions succeeded"),
    ]
    assert Counter(line["status"] for line in lines(results / str(flow.run.id))) == {"succeeded": 8, "failed": 3}


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_run_on_a_process_worker_is_retried_as_from_the_ui(counter: ExecutionCounter, results: Path) -> None:
    pool = f"retries-{uuid.uuid4().hex[:8]}"
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    inputs = [{"x": x, "address": counter.address} for x in range(8)]
    flow = await Deployed.made(pool, code=LATER, inputs=inputs, provider="local:none", executions_per_task=3)
    with worker(pool, results):
        assert (await flow.ended()).is_failed()
        assert await flow.retry() == SetStateStatus.ACCEPT
        state = await flow.ended()
    assert state.is_completed(), state
    assert counter.counts == {str(x): 1 if x % 3 else 2 for x in range(8)}
    assert len(Ledger(results / str(flow.run.id)).load_latest_lines()) == 8


@pytest.mark.full
async def test_a_run_that_has_no_deployment_says_how_it_is_resumed_for_prefect_cannot_retry_it(
    counter: ExecutionCounter, tmp_path: Path
) -> None:
    inputs = [{"x": x, "address": counter.address} for x in range(4)]
    with pytest.raises(ExecutionsFailed, match="run it again with the same results_path") as raised:
        await batch(LATER, inputs, provider="local:none")
    async with get_client() as client:
        run = await client.read_flow_run(uuid.UUID(Path(raised.value.results_path).name))
    assert await Deployed(run).retry() == SetStateStatus.ABORT
    results = await batch(LATER, inputs, provider="local:none", results_path=raised.value.results_path)
    assert [result.y for result in results] == [0, 1, 4, 9]
    assert counter.counts == {"0": 2, "1": 1, "2": 1, "3": 2}


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_of_a_run_that_is_retried_twice_among_failing_calls_every_good_execution_ran_once(
    daytona: Any, counter: ExecutionCounter, results: Path
) -> None:
    size, workers = 200, 10
    daytona.set(boot_s=0.05, fault_rate=0.2, fault_delay_s=1.0, retry_after_s=0.1, seed=size)
    inputs = [{"x": x, "address": counter.address} for x in range(size)]
    flow = await Deployed.made(code=SOME_FAIL, inputs=inputs, provider="daytona", max_workers=workers, timeout=60)
    for attempt in range(3):
        if attempt:
            assert await flow.retry() == SetStateStatus.ACCEPT
        state = await flow.execute()
        assert state.is_failed()
    faults, calls = daytona.state()["faults"], daytona.state()["counts"]
    daytona.set(fault_rate=0.0)
    assert sum(faults.values()) > 0.1 * sum(calls.values()), (faults, calls)
    good = [x for x in range(size) if x % 10]
    assert {x: counter.counts[str(x)] for x in good} == dict.fromkeys(good, 1)
    ledger = results / str(flow.run.id)
    found = [line.to_outcome() for line in Ledger(ledger).load_latest_lines().values()]
    assert Counter(outcome.meta.variables["x"] for outcome in found) == dict.fromkeys(range(size), 1)
    succeeded = {outcome.meta.variables["x"]: outcome.outputs for outcome in found if hasattr(outcome, "outputs")}
    assert succeeded == {x: {"y": x * x} for x in good}
    assert Counter(line["status"] for line in lines(ledger))["succeeded"] == len(good)


@pytest.mark.full
async def test_results_serve_later_runs_until_the_code_a_variable_or_the_commit_changes_and_not_a_secret(
    counter: ExecutionCounter, tmp_path: Path
) -> None:
    folder = tmp_path / "repository"
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]

    def commit(text: str) -> None:
        folder.mkdir(exist_ok=True)
        subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
        (folder / "file").write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)

    async def run(code: str = "", secret: str = "one", **variables: Any) -> dict[str, int]:
        """Runs two executions; how often each has begun in all."""
        settings = {"repo_url": str(folder), "repo_token": SecretStr(secret), "environment": {"KEY": SecretStr(secret)}}
        await LocalSandbox(isolation="none", **settings).save("cached", overwrite=True)  # type: ignore[misc]
        inputs = [{"x": x, "address": counter.address, **variables} for x in (1, 2)]
        found = await batch(SOME_FAIL + code, inputs, provider="local-sandbox/cached", cache_results=True)
        assert [result.y for result in found] == [1, 4]
        return dict(counter.counts)

    commit("first")
    assert await run() == {"1": 1, "2": 1}
    assert await run(secret="two") == {"1": 1, "2": 1}
    assert await run(code="\n# changed") == {"1": 2, "2": 2}
    assert await run(more=1) == {"1": 3, "2": 3}
    commit("second")
    assert await run() == {"1": 4, "2": 4}
    assert await run() == {"1": 4, "2": 4}


async def test_the_image_changes_the_key_of_a_result_and_the_account_does_not() -> None:
    async def key(block: Any) -> str:
        (execution,) = assign_keys([("SUBMIT(1)", {"x": 1})], await block.fingerprint())
        return execution.key

    secret, other = SecretStr("one"), SecretStr("two")
    one = await key(DaytonaSandbox(snapshot="a", api_key=secret, environment={"KEY": secret}, lifetime=60))
    assert one == await key(DaytonaSandbox(snapshot="a", api_key=other, environment={"KEY": other}, lifetime=90))
    assert one != await key(DaytonaSandbox(snapshot="b", api_key=secret, environment={"KEY": secret}, lifetime=60))
    one = await key(ModalSandbox(image="a", token_id=secret, token_secret=secret))
    assert one == await key(ModalSandbox(image="a", token_id=other, token_secret=other))
    assert one != await key(ModalSandbox(image="b", token_id=secret, token_secret=secret))
