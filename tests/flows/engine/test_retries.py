"""Retries: which errors are retried, how often, and how results show it (the table of errors in docs/reference.md)."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from rlm_batch import (
    CodeError,
    ConfigurationError,
    DaytonaSandbox,
    DeadlineExceeded,
    Failure,
    OutcomeUnknown,
    QuotaExceeded,
    Result,
    SandboxLost,
    SandboxStartError,
    batch,
)
from rlm_batch.flows.engine.execute import configure_task, execute
from rlm_batch.flows.engine.lane import Lane
from rlm_batch.flows.parameters import Options

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ...infra.waiting import wait_until_async
from ..conftest import find_run_id

pytestmark = pytest.mark.anyio

CREATE = r"^POST /api/sandbox$"
SQUARE = COUNT_EXECUTION + "count_execution(x)\nSUBMIT(y=x * x)"
# Ways in which code fails, and whether `retry_code_errors` retries them.
CODE = {
    "raises": ("raise ValueError('no such thing')", True),
    "is-no-python": ("x = (", True),
    "crashes": ("import os; os._exit(3)", True),
    "submits-a-set": ("SUBMIT(x={1})", False),
    "has-no-volume": ("load_from_volume('file')", False),
}


def inputs(counter: ExecutionCounter, size: int = 1) -> list[dict[str, Any]]:
    return [{"x": x, "address": counter.address} for x in range(size)]


def test_retries_of_prefects_settings_do_not_run_code_or_ask_a_model_again(counter: ExecutionCounter) -> None:
    script = f"""
from rlm_batch import batch
from rlm_batch.tasks.query import run_query
print(batch.retries, run_query.retries, run_query.retry_delay_seconds)
code = {COUNT_EXECUTION + "count_execution(1); 1 / 0"!r}
batch.sync(code, [{{"address": {counter.address!r}}}], provider="local:none")
"""
    settings = {"PREFECT_FLOWS_DEFAULT_RETRIES": "2", "PREFECT_TASKS_DEFAULT_RETRIES": "2"}
    command, environment = [sys.executable, "-c", script], {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "0 0 0\n"
    assert "1 of 1 executions failed" in done.stderr
    assert counter.counts == {"1": 1}


@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_failing_code_is_retried_only_on_request_and_submit_errors_never(
    counter: ExecutionCounter, asked: bool
) -> None:
    code = [
        f"address = {counter.address!r}{COUNT_EXECUTION}count_execution({name!r})\n{text}"
        for name, (text, _) in CODE.items()
    ]
    code[1] = "x = ("  # invalid syntax, so no line runs and counts
    options: dict[str, Any] = {
        "provider": "local:none", "retries": 1, "retry_code_errors": asked, "idempotent": True, "reuse_sandboxes": True,
        "on_failure": "return",
    }  # fmt: skip
    outcomes = await batch(code, max_workers=5, **options)
    expected = {name: 2 if asked and again else 1 for name, (_, again) in CODE.items()}
    assert {name: outcome.meta.attempt for name, outcome in zip(CODE, outcomes, strict=True)} == expected
    assert counter.counts == {name: times for name, times in expected.items() if name != "is-no-python"}
    (late,) = await batch(["import time; time.sleep(1000)"], timeout=1, **options)
    assert late.meta.attempt == (2 if asked else 1)
    for outcome in (*outcomes, late):
        assert isinstance(outcome, Failure)
        assert len(outcome.meta.earlier_errors) == outcome.meta.attempt - 1
        assert all(text.startswith(type(outcome.error).__name__) for text in outcome.meta.earlier_errors)


async def test_failed_openings_are_retried_and_recorded_in_result_and_ledger(
    daytona: Any, hasty: str, counter: ExecutionCounter, tmp_path: Path
) -> None:
    daytona.set(fault_rate=1.0, faults=["500"], fault_times=1, fault_where=CREATE)
    # Prefect's own list of retry delays is shorter than this number of retries.
    (result,) = await batch(SQUARE, inputs(counter), provider=hasty, results_path=str(tmp_path), retries=100)
    assert (result.y, result.meta.attempt) == (0, 2)
    assert [text.partition(":")[0] for text in result.meta.earlier_errors] == ["SandboxStartError"]
    (line,) = [json.loads(line) for part in tmp_path.glob("part-*") for line in part.read_text().splitlines()]
    assert (line["attempt"], tuple(line["meta"]["earlier_errors"])) == (2, result.meta.earlier_errors)
    assert counter.counts == {"0": 1}


@pytest.mark.parametrize("call", [pytest.param("exec", marks=pytest.mark.full), "input"])
async def test_a_sandbox_lost_before_code_was_sent_is_replaced(
    daytona: Any, counter: ExecutionCounter, call: str
) -> None:
    daytona.set(
        fault_rate=1.0, faults=["404"], fault_message="command not found", fault_times=1, fault_where=f"/{call}$"
    )
    secrets = {"KEY": "k"} if call == "input" else {}  # secrets make the first execution go as input
    await DaytonaSandbox(environment=secrets).save("lost", overwrite=True)  # type: ignore[misc, dict-item]
    (result,) = await batch(SQUARE, inputs(counter), provider="rlm-daytona-sandbox/lost")
    assert (result.y, result.meta.attempt) == (0, 2)
    # The first execution is part of the command that starts the driver, so the error can be either one.
    assert result.meta.earlier_errors[0].startswith((SandboxStartError.__name__, SandboxLost.__name__))
    assert counter.counts == {"0": 1}


@pytest.mark.parametrize("idempotent", [pytest.param(False, marks=pytest.mark.full), True])
async def test_code_with_an_unknown_outcome_is_retried_only_if_idempotent(
    daytona: Any, counter: ExecutionCounter, idempotent: bool
) -> None:
    """The code kills its sandbox's driver the first time that it runs."""
    code = (
        COUNT_EXECUTION
        + "import os, time\nif count_execution(x) == 1:\n    os.kill(os.getppid(), 9); time.sleep(1000)\nSUBMIT(y=x)"
    )
    (outcome,) = await batch(code, inputs(counter), provider="daytona", idempotent=idempotent, on_failure="return")
    if idempotent:
        assert isinstance(outcome, Result)
        assert (outcome.y, outcome.meta.attempt) == (0, 2)
        assert outcome.meta.earlier_errors[0].startswith(OutcomeUnknown.__name__)
    else:
        assert isinstance(outcome.error, OutcomeUnknown)
        assert "set `idempotent`" in str(outcome.error)
    assert counter.counts == {"0": 2 if idempotent else 1}


async def test_invalid_settings_end_the_flow_at_once(daytona: Any, counter: ExecutionCounter) -> None:
    await DaytonaSandbox(snapshot="none-of-that-name").save("wrong", overwrite=True)  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="none-of-that-name"):
        await batch(SQUARE, inputs(counter, 6), provider="rlm-daytona-sandbox/wrong", max_workers=2)
    assert daytona.state()["counts"]["POST /api/sandbox"] <= 2
    assert counter.counts == {}


async def test_a_run_fails_after_its_retries_when_the_workspace_stays_full(
    daytona: Any, counter: ExecutionCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "should_wait_out_refusal", False)
    monkeypatch.setattr("rlm_batch.tasks.capacity.admission.LONGEST_PAUSE_SECONDS", 0.05)
    daytona.set(max_sandboxes=0)
    failures = await batch(
        SQUARE, inputs(counter, 3), provider="daytona", max_workers=2, retries=2, on_failure="return"
    )
    for failure in failures:
        assert isinstance(failure.error, QuotaExceeded)
        assert (failure.meta.attempt, len(failure.meta.earlier_errors)) == (3, 2)
    assert daytona.state()["counts"]["POST /api/sandbox"] == 9


async def test_the_deadline_ends_a_wait_that_the_provider_asks_for_and_keeps_results(
    daytona: Any, counter: ExecutionCounter
) -> None:
    daytona.set(minute=3600.0, creates_per_minute=1)
    done, *late = await batch(
        SQUARE, inputs(counter, 5), provider="daytona", max_workers=1, deadline=20, on_failure="return"
    )
    assert done.y == 0
    for failure in late:
        assert isinstance(failure.error, DeadlineExceeded)
        assert "deadline of 20 s passed before" in str(failure.error)
    assert daytona.state()["counts"]["POST /api/sandbox"] == 2  # no third attempt


@pytest.mark.full
async def test_a_deadline_ends_a_retrys_wait_and_names_its_reason(
    daytona: Any, hasty: str, counter: ExecutionCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlm_batch.flows.engine.execute.compute_backoff", lambda _: 3600.0)
    daytona.set(fault_rate=1.0, faults=["500"], fault_where=CREATE)
    (failure,) = await batch(SQUARE, inputs(counter), provider=hasty, deadline=30, on_failure="return")
    assert isinstance(failure.error, DeadlineExceeded)
    assert failure.meta.attempt == 2
    assert failure.meta.earlier_errors[0].startswith(SandboxStartError.__name__)
    assert failure.meta.earlier_errors[0] in str(failure.error)


@pytest.mark.full
async def test_a_worker_releases_its_sandbox_during_a_long_retry_delay(
    daytona: Any, counter: ExecutionCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second execution waits for the first one's retry, so a sandbox kept for both would idle for an hour."""
    monkeypatch.setattr("rlm_batch.flows.engine.execute.compute_backoff", lambda _: 3600.0)
    code = COUNT_EXECUTION + "count_execution(x)\nassert x\nSUBMIT(y=x)"
    flow = asyncio.create_task(
        batch(
            code, inputs(counter, 2), provider="daytona", max_workers=1, executions_per_task=2, reuse_sandboxes=True,
            retry_code_errors=True,
        )
    )  # fmt: skip
    await wait_until_async(lambda: daytona.state()["destroyed"], "a sandbox that is given back")
    assert daytona.state()["destroyed"] == 1
    assert counter.counts == {"0": 1, "1": 1}
    assert not flow.done()
    flow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow


@pytest.mark.full
async def test_executions_in_one_task_run_are_retried_separately(counter: ExecutionCounter, results: Path) -> None:
    """The first fails permanently at once, the second after its retries; the third succeeds at its second attempt."""
    code = COUNT_EXECUTION + (
        "times = count_execution(x)\n"
        "if x == 0: SUBMIT(y={1})\n"
        "assert x == 3 or x == 2 and times == 2, f'time {times}'\n"
        "SUBMIT(y=x)"
    )
    first, second, third, fourth = await batch(
        code, inputs(counter, 4), provider="local:none", executions_per_task=4, retry_code_errors=True, retries=2,
        on_failure="return",
    )  # fmt: skip
    assert [outcome.meta.attempt for outcome in (first, second, third, fourth)] == [1, 3, 2, 1]
    assert [isinstance(outcome.error, CodeError) for outcome in (second,)] == [True]
    assert ["time 1" in text or "time 2" in text for text in second.meta.earlier_errors] == [True, True]
    assert (third.y, fourth.y) == (2, 3)
    assert counter.counts == {"0": 1, "1": 3, "2": 2, "3": 1}
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[find_run_id(results)]))
    async with get_client() as client:

        async def has_failed() -> bool:
            return [task.state_name for task in await client.read_task_runs(flow_run_filter=of_run)] == ["Failed"]

        await wait_until_async(has_failed)


async def test_the_retry_delay_doubles_up_to_a_minute_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    task = configure_task(execute, Options(retries=9), set(), per_task=1)
    assert task.retry_delay_seconds == [1, 2, 4, 8, 16, 32, 60]  # Prefect repeats the last delay
    assert task.retry_jitter_factor == 0.5
