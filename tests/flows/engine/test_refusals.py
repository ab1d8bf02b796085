"""What a run keeps whose provider refuses every sandbox from some moment on, and when it ends."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, ExecutionsFailed, SandboxStartError, batch
from rlm_batch.tasks.ledger.ledger import Ledger

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

pytestmark = pytest.mark.anyio

CREATE = r"^POST /api/sandbox$"
SQUARE = COUNT_EXECUTION + "count_execution(x)\nSUBMIT(y=x * x)"
START_TIMEOUT = 10  # also of the sandboxes that do start
WORKERS, TOTAL = 3, 9


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path) -> Path:
    """Where the runs of a test write their results."""
    return tmp_path / "ledger"


@pytest.fixture(autouse=True)
async def provider(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A block that gives up soon."""
    monkeypatch.setattr("rlm_batch.tasks.retry.BACKOFF_SECONDS", (0.05,))
    block = DaytonaSandbox(start_timeout=START_TIMEOUT)
    await block.save("impatient", overwrite=True)  # type: ignore[misc]
    return "daytona-sandbox/impatient"


async def refuse_after_start(daytona: Any, counter: ExecutionCounter, status: str, count: int = WORKERS) -> None:
    """Has every creation answer that status, once so many executions have begun; they go on from there."""
    while len(counter.counts) < count:  # noqa: ASYNC110 - it is the server's, in another thread
        await asyncio.sleep(0.02)
    daytona.set(fault_rate=1.0, faults=[status], fault_where=CREATE)
    counter.may_go_on.set()


async def run_and_refuse(
    daytona: Any, counter: ExecutionCounter, ledger: Path, provider: str, status: str, **options: Any
) -> Sequence[Any]:
    inputs = [{"x": x, "address": counter.address} for x in range(TOTAL)]
    common = {"provider": provider, "max_workers": WORKERS, "results_path": str(ledger), "timeout": 60}
    counter.may_go_on.clear()
    results, _ = await asyncio.gather(
        batch(SQUARE, inputs, **common, **options),
        refuse_after_start(daytona, counter, status),
    )
    return results


def check_what_was_kept(
    results: Sequence[Any], counter: ExecutionCounter, ledger: Path, error: type[Exception]
) -> None:
    """What was under way has its result, ran once, and the ledger has it once; the rest fails, most of it not begun."""
    assert [result.y for result in results[:WORKERS]] == [0, 1, 4]
    assert counter.counts == {str(x): 1 for x in range(WORKERS)}
    assert [type(outcome.error) for outcome in results[WORKERS:]] == [error] * (TOTAL - WORKERS)
    assert all("not begun" in str(outcome.error) for outcome in results[2 * WORKERS :])  # one each was tried in vain
    lines = list(Ledger(ledger).read_lines())
    assert len({line.key for line in lines if line.is_success}) == WORKERS
    assert len(lines) == TOTAL


@pytest.mark.parametrize(
    "status", [pytest.param(status, marks=pytest.mark.full) for status in ("400", "401", "403", "404")]
)
async def test_refusals_take_nothing_from_what_runs_and_end_the_rest_after_one_start_timeout(
    status: str, provider: str, daytona: Any, counter: ExecutionCounter, ledger: Path
) -> None:
    results = await run_and_refuse(daytona, counter, ledger, provider, status, on_failure="return")
    error = type(results[-1].error)
    assert error in (ConfigurationError, SandboxStartError)
    check_what_was_kept(results, counter, ledger, error)
    # A run that goes on from there runs what was not begun, and only that.
    daytona.set(fault_rate=0.0)
    inputs = [{"x": x, "address": counter.address} for x in range(TOTAL)]
    again = await batch(SQUARE, inputs, provider=provider, max_workers=WORKERS, results_path=str(ledger))
    assert [result.y for result in again] == [x * x for x in range(TOTAL)]
    assert counter.counts == {str(x): 1 for x in range(TOTAL)}


@pytest.mark.full
async def test_a_run_that_raises_has_the_results_of_what_ran_in_its_error(
    provider: str, daytona: Any, counter: ExecutionCounter, ledger: Path
) -> None:
    with pytest.raises(ExecutionsFailed, match="6 of 9 executions failed") as caught:
        await run_and_refuse(daytona, counter, ledger, provider, "403")
    check_what_was_kept(list(caught.value.results), counter, ledger, type(caught.value.failures[0].error))


@pytest.mark.full
async def test_refusals_that_pass_cost_no_attempt(
    provider: str, daytona: Any, counter: ExecutionCounter, ledger: Path
) -> None:
    async def allow_again() -> None:
        while daytona.state()["faults"].get("401", 0) < 2:  # noqa: ASYNC110 - it is the server's, in another process
            await asyncio.sleep(0.05)
        daytona.set(fault_rate=0.0)

    allowing = asyncio.create_task(allow_again())
    results = await run_and_refuse(daytona, counter, ledger, provider, "401", retries=0)
    await allowing
    assert [result.y for result in results] == [x * x for x in range(TOTAL)]
    assert {result.meta.attempt for result in results} == {1}
    assert counter.counts == {str(x): 1 for x in range(TOTAL)}


@pytest.mark.full
@pytest.mark.parametrize("executions_per_task", [1, 20])
async def test_a_provider_that_is_away_from_the_start_does_not_cost_a_start_timeout_for_each_execution(
    executions_per_task: int, provider: str, daytona: Any, counter: ExecutionCounter
) -> None:
    daytona.set(fault_rate=1.0, faults=["502"], fault_where=CREATE)
    inputs = [{"x": x, "address": counter.address} for x in range(40)]
    async with asyncio.timeout(80):  # with one for each attempt of each it would take a hundred
        results = await batch(
            SQUARE, inputs, provider=provider, max_workers=8, retries=1, on_failure="return",
            executions_per_task=executions_per_task,
        )  # fmt: skip
    assert {type(outcome.error) for outcome in results} == {SandboxStartError}
    assert counter.counts == {}
