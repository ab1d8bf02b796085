"""Resumed work: Prefect's Retry, a run on the same ledger, and cached results of earlier flow runs."""

import json
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.responses import SetStateStatus
from pydantic import SecretStr

from rlm_batch import DaytonaSandbox, ExecutionsFailed, LocalSandbox, ModalSandbox, batch, load_report
from rlm_batch.tasks.execution import assign_keys

from ...infra.deployed import Deployed
from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

pytestmark = pytest.mark.anyio

SOME_FAIL = COUNT_EXECUTION + "count_execution(x)\nassert x % 10, 'one in ten'\nSUBMIT(y=x * x)"
LATER = COUNT_EXECUTION + "times = count_execution(x)\nassert x % 3 or times > 1, 'not yet'\nSUBMIT(y=x * x)"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return every line that was written to a ledger."""
    return [json.loads(line) for part in path.glob("part-*.jsonl") for line in part.read_text().splitlines()]


async def test_prefects_retry_runs_only_executions_without_a_result(
    counter: ExecutionCounter,
    results: Path,
    allow: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    allow(allow_no_isolation=True)
    inputs = [{"x": x, "address": counter.address} for x in range(8)]
    flow = await Deployed.made(code=LATER, inputs=inputs, provider="local:none")
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
        (f"rlm-batch-{deployment}-report", "5 of 8 executions succeeded, 3 failed"),
        (f"rlm-batch-{deployment}-report", "8 of 8 executions succeeded"),
    ]
    assert Counter(line["status"] for line in read_lines(results / str(flow.run.id))) == {"succeeded": 8, "failed": 3}


@pytest.mark.full
async def test_a_run_without_a_deployment_says_how_to_resume_it(counter: ExecutionCounter, tmp_path: Path) -> None:
    inputs = [{"x": x, "address": counter.address} for x in range(4)]
    with pytest.raises(ExecutionsFailed, match="run it again with the same `results_path`") as raised:
        await batch(LATER, inputs, provider="local:none")
    async with get_client() as client:
        run = await client.read_flow_run(uuid.UUID(Path(raised.value.results_path).name))
    assert await Deployed(run).retry() == SetStateStatus.ABORT
    results = await batch(LATER, inputs, provider="local:none", results_path=raised.value.results_path)
    assert [result.y for result in results] == [0, 1, 4, 9]
    assert counter.counts == {"0": 2, "1": 1, "2": 1, "3": 2}


@pytest.mark.full
async def test_results_are_reused_until_code_variables_or_commit_change(
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
        """Run two executions and return how often each has started in all runs."""
        settings = {"repo_url": str(folder), "repo_token": SecretStr(secret), "environment": {"KEY": SecretStr(secret)}}
        await LocalSandbox(isolation="none", **settings).save("cached", overwrite=True)  # type: ignore[misc]
        inputs = [{"x": x, "address": counter.address, **variables} for x in (1, 2)]
        results = await batch(SOME_FAIL + code, inputs, provider="rlm-local-sandbox/cached", cache_results=True)
        assert [result.y for result in results] == [1, 4]
        return dict(counter.counts)

    commit("first")
    assert await run() == {"1": 1, "2": 1}
    assert await run(secret="two") == {"1": 1, "2": 1}
    assert await run(code="\n# changed") == {"1": 2, "2": 2}
    assert await run(more=1) == {"1": 3, "2": 3}
    commit("second")
    assert await run() == {"1": 4, "2": 4}
    assert await run() == {"1": 4, "2": 4}


async def test_the_image_is_in_the_key_and_the_account_is_not() -> None:
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


async def test_the_report_is_of_the_last_run_if_other_jobs_ran_on_its_ledger(tmp_path: Path) -> None:
    path = str(tmp_path / "job")
    for inputs in ([{"x": 1}, {"x": 2}], [{"x": 3}, {"x": 4}], [{"x": 1}, {"x": 2}]):
        results = await batch("SUBMIT(y=x)", inputs=inputs, results_path=path)
    assert [result["y"] for result in results] == [1, 2]
    assert [outcome.meta.variables for outcome in load_report(path).results] == [{"x": 1}, {"x": 2}]
