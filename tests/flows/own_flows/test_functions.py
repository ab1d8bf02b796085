"""Functions passed to the flows as code."""

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from rlm_batch import ConfigurationError, batch, chunks, run_code, sequence, sweep

pytestmark = pytest.mark.anyio


def train(rate: float, layers: int = 2) -> dict[str, float]:
    import math

    print("training")
    return {"loss": math.sqrt(rate) + layers}


def count(data: list[int]) -> dict[str, int]:
    return {"n": len(data)}


def add(results: dict[str, dict[str, int]]) -> int:
    return sum(item["n"] for item in results.values())


def begin() -> None:
    global state
    state = 4  # type: ignore[name-defined]


def go_on(state: int) -> int:
    return state + 1


async def test_a_function_runs_as_a_batch_and_reuses_its_results(tmp_path: Path):
    (tmp_path / "inputs.csv").write_text("rate,layers\n4,1\n9,3\n")
    ledger = tmp_path / "ledger"
    first = await batch(train, tmp_path / "inputs.csv", results_path=ledger)
    assert [result.loss for result in first] == [3, 6]
    before = sorted(ledger.glob("part-*"))
    again = await batch(train, [{"rate": 4, "layers": 1}, {"rate": 9, "layers": 3}], results_path=ledger)
    assert [result.meta.sandbox_id for result in again] == [result.meta.sandbox_id for result in first]
    assert sorted(ledger.glob("part-*")) == before


async def test_variables_that_do_not_match_the_function_are_refused(tmp_path: Path):
    ledger = tmp_path / "ledger"
    not_text: Any = train
    wrong: list[tuple[Any, str]] = [
        (
            lambda: batch(train, [{"rate": 1}, {"rates": 1}], results_path=ledger),
            "has no parameter for the variable 'rates'",
        ),
        (lambda: batch([train, "SUBMIT(1)"], results_path=ledger), "needs a value for 'rate'"),
        (lambda: sweep(train, {"layers": [1]}, results_path=ledger), "needs a value for 'rate'"),
        (lambda: chunks(train, data=[1], chunk_size=1, results_path=ledger), "needs a value for 'rate'"),
        (lambda: sequence([go_on], results_path=ledger), "needs a value for 'state'"),
        (lambda: batch("SUBMIT(1)", prepare=not_text, results_path=ledger), "`prepare` takes text"),
        (lambda: batch(lambda x: x, [{"x": 1}], results_path=ledger), "is a lambda"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            await call()
    assert not ledger.exists()


@pytest.mark.full
async def test_every_flow_and_the_task_accept_functions():
    report = await sweep(train, {"rate": [1, 4]}, objective="loss")
    assert report.best.loss == 3
    drawn = await sweep(train, space={"rate": [1, 4]}, trials=2, sampler="random", objective="loss")
    assert {trial.meta.variables["rate"] for trial in drawn.trials} <= {1, 4}
    counted = await chunks(count, data=range(10), chunk_size=4, reduce=add)
    assert counted.reduction.output == 10
    steps = await sequence([begin, go_on])
    assert steps[1].output == 5
    prepared = await batch([go_on], prepare="state = 7")
    assert prepared[0].output == 8

    @flow
    async def own() -> Any:
        return await run_code(train, {"rate": 4})

    assert (await own()).loss == 4
