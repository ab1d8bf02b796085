"""When Daytona's calls fail, or the host dies, every result is right, nothing runs twice and nothing is left."""

import asyncio
import time
from collections.abc import Sequence
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import batch
from rlm_batch.sandbox.result import Failure

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

COUNTED = f"""
{COUNT_EXECUTION}
count_execution(x)
SUBMIT(y=x * x, text=text)
"""


def run(counter: ExecutionCounter, size: int, workers: int, **options: Any) -> Sequence[Any]:
    inputs = [{"x": x, "address": counter.address, "text": "t" * (x % 5) * 20_000} for x in range(size)]
    return asyncio.run(
        batch(
            COUNTED, inputs=inputs, provider="daytona", max_workers=workers, on_failure="return", timeout=60, **options
        )
    )


def none_left(daytona: Any) -> bool:
    """Whether the provider has nothing any more: removing is accepted, and done a little later."""
    until = time.monotonic() + 10
    while daytona.state()["sandboxes"] and time.monotonic() < until:
        time.sleep(0.1)
    return not daytona.state()["sandboxes"]


SIZES = [
    pytest.param(12, 6, id="12"),
    pytest.param(100, 20, id="100", marks=[pytest.mark.full, pytest.mark.timeout(600)]),
]


@pytest.mark.full
@pytest.mark.parametrize(("size", "workers"), SIZES)
def test_a_batch_survives_a_fifth_of_all_calls_failing(
    size: int,
    workers: int,
    daytona: Any,
    counter: ExecutionCounter,
    server: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    daytona.set(boot_s=0.09, fault_rate=0.2, fault_delay_s=5.0, retry_after_s=0.2, seed=size)
    results = run(counter, size, workers, retries=5)
    state = daytona.state()
    daytona.set(fault_rate=0.0)
    assert min(state["faults"].values()) > 0, state["faults"]
    assert set(state["faults"]) == {"429", "502", "503", "drop", "delay"}
    failures = [outcome for outcome in results if isinstance(outcome, Failure)]
    assert not failures, [str(failure.error) for failure in failures]
    assert [result.y for result in results] == [x * x for x in range(size)]
    assert [len(result.text) for result in results] == [(x % 5) * 20_000 for x in range(size)]
    assert counter.counts == {str(x): 1 for x in range(size)}
    assert none_left(daytona)


@pytest.mark.parametrize(("size", "workers"), SIZES[1:])
def test_a_batch_survives_its_logs_being_cut_every_second(
    size: int,
    workers: int,
    daytona: Any,
    counter: ExecutionCounter,
    server: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    daytona.set(boot_s=0.09, cut_s=1.0)
    code = """
        import time
        count_execution(x)
        for line in range(25):
            print(x, line)
            time.sleep(0.1)
        SUBMIT(y=x * x)
    """
    inputs = [{"x": x, "address": counter.address} for x in range(size)]
    results = asyncio.run(batch(COUNT_EXECUTION + dedent(code), inputs=inputs, provider="daytona", max_workers=workers))
    assert [result.y for result in results] == [x * x for x in range(size)]
    assert all(result.meta.stdout == "".join(f"{x} {line}\n" for line in range(25)) for x, result in enumerate(results))
    assert counter.counts == {str(x): 1 for x in range(size)}
    assert daytona.state()["counts"]["WS /toolbox/*/process/session/*/command/*/logs"] > 2 * size
    assert none_left(daytona)
