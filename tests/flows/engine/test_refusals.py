"""Providers that begin to refuse every sandbox: the results that a run keeps, and the time when it ends."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import DaytonaSandbox, QuotaExceeded, SandboxStartError, batch
from rlm_batch.tasks.ledger.ledger import Ledger

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

CREATE = r"^POST /api/sandbox$"
SQUARE = COUNT_EXECUTION + "count_execution(x)\nSUBMIT(y=x * x)"
WORKERS, TOTAL = 3, 9


async def save_block(start_timeout: int) -> str:
    """Save a block that gives up after `start_timeout` seconds; return its name for a flow's `provider`."""
    await DaytonaSandbox(start_timeout=start_timeout).save("impatient", overwrite=True)  # type: ignore[misc]
    return "rlm-daytona-sandbox/impatient"


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path) -> Path:
    """Return the results path of a test's runs."""
    return tmp_path / "ledger"


async def run_and_refuse(
    daytona: Any, provider: str, counter: ExecutionCounter, ledger: Path, status: str, times: int | None = None
) -> Sequence[Any]:
    """Run a batch. Once each worker has an execution, refuse all further sandboxes, or only the next `times`."""
    inputs = [{"x": x, "address": counter.address} for x in range(TOTAL)]
    counter.may_go_on.clear()
    run = asyncio.ensure_future(
        batch(
            SQUARE, inputs, provider=provider, max_workers=WORKERS, results_path=str(ledger), on_failure="return",
            retries=2 if times is None else 0,
        )
    )  # fmt: skip
    await wait_until_async(lambda: len(counter.counts) >= WORKERS, f"{WORKERS} executions")
    daytona.set(fault_rate=1.0, faults=[status], fault_where=CREATE, fault_times=times)
    counter.may_go_on.set()
    return await run


def check_kept_results(results: Sequence[Any], counter: ExecutionCounter, ledger: Path, error: type[Exception]) -> None:
    """Check that running executions finished once with one ledger line, and that the rest failed, mostly before
    starting.
    """
    assert [result.y for result in results[:WORKERS]] == [0, 1, 4]
    assert counter.counts == {str(x): 1 for x in range(WORKERS)}
    assert [type(outcome.error) for outcome in results[WORKERS:]] == [error] * (TOTAL - WORKERS)
    # Each worker tried one more execution.
    assert all(str(outcome.error).startswith("not started: ") for outcome in results[2 * WORKERS :])
    lines = list(Ledger(ledger).read_lines())
    assert len({line.key for line in lines if line.is_success}) == WORKERS
    assert len(lines) == TOTAL


@pytest.mark.full
@pytest.mark.parametrize(("status", "error"), [("400", SandboxStartError), ("401", QuotaExceeded)])
async def test_refusals_keep_running_executions_and_end_the_others(
    status: str, error: type[Exception], daytona: Any, counter: ExecutionCounter, ledger: Path
) -> None:
    provider = await save_block(20)  # seconds, also for the first sandboxes to start
    results = await run_and_refuse(daytona, provider, counter, ledger, status)
    check_kept_results(results, counter, ledger, error)
    # A resumed run executes only the executions that have not started.
    daytona.set(fault_rate=0.0)
    inputs = [{"x": x, "address": counter.address} for x in range(TOTAL)]
    again = await batch(SQUARE, inputs, provider=provider, max_workers=WORKERS, results_path=str(ledger))
    assert [result.y for result in again] == [x * x for x in range(TOTAL)]
    assert counter.counts == {str(x): 1 for x in range(TOTAL)}


@pytest.mark.full
async def test_transient_refusals_use_no_attempt(daytona: Any, counter: ExecutionCounter, ledger: Path) -> None:
    results = await run_and_refuse(daytona, "daytona", counter, ledger, "401", times=2)
    assert daytona.state()["faults"] == {"401": 2}
    assert [result.y for result in results] == [x * x for x in range(TOTAL)]
    assert {result.meta.attempt for result in results} == {1}
    assert counter.counts == {str(x): 1 for x in range(TOTAL)}


@pytest.mark.full
async def test_an_unreachable_provider_costs_one_start_timeout(daytona: Any, counter: ExecutionCounter) -> None:
    daytona.set(fault_rate=1.0, faults=["502"], fault_where=CREATE)
    provider, inputs = await save_block(5), [{"x": x, "address": counter.address} for x in range(40)]
    results = await batch(SQUARE, inputs, provider=provider, max_workers=8, retries=1, on_failure="return")
    assert {type(outcome.error) for outcome in results} == {SandboxStartError}
    assert sum(str(outcome.error).startswith("not started: ") for outcome in results) >= 40 - 2 * 8
    assert counter.counts == {}
