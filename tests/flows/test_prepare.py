"""The `prepare` parameter: code that prepares each sandbox of a flow run, its cost, errors and place in the key."""

import os
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogHandler

from rlm_batch import ConfigurationError, PrepareError, batch, chunks, sweep
from rlm_batch.tasks.ledger.ledger import Ledger

from .conftest import find_run_id

pytestmark = pytest.mark.anyio

SIX = [{"x": x} for x in range(6)]


def prepare_counted(path: Path) -> str:
    """Return code that counts its runs in a file of the host and defines names."""
    return f"import os\nopen({str(path)!r}, 'a').write('x')\nbase = 100\nprocess = os.getpid()"


def count_preparations(path: Path) -> int:
    return len(path.read_text())


async def test_each_worker_prepares_once_and_keeps_its_sandbox(tmp_path):
    prepare = prepare_counted(tmp_path / "prepared")
    results = await batch(
        "SUBMIT(y=base + x, process=process)", inputs=SIX, prepare=prepare, max_workers=2, provider="local:none"
    )
    assert [result.y for result in results] == [100 + x for x in range(6)]
    assert count_preparations(tmp_path / "prepared") == len({result.process for result in results}) <= 2
    assert len({result.meta.sandbox_id for result in results}) <= 2


@pytest.mark.full
async def test_a_sweep_and_a_chunked_job_run_prepare(volumes, tmp_path):
    prepare = "import json\nweights = [3, 1, 2]"
    report = await sweep("SUBMIT(loss=weights[i])", grid={"i": [0, 1, 2]}, objective="loss", prepare=prepare)
    assert report.best is not None
    assert report.best.meta.variables == {"i": 1}
    prepare += "\nopen(f'{VOLUME}/prepared', 'a').write('x')"
    options = {"chunk_size": 2, "volume_name": "v", "prepare": prepare, "max_workers": 1}
    options["results_path"] = str(tmp_path / "ledger")
    code, reduce = "SUBMIT(total=sum(data) * weights[0])", "SUBMIT(whole=json.dumps(weights))"
    report = await chunks(code, data=[1, 2, 3], reduce=reduce, **options)
    assert [report[i].total for i in "01"] == [9, 9]
    assert report.reduction is not None
    assert report.reduction.whole == "[3, 1, 2]"
    (prepared,) = volumes.rglob("prepared")
    count = count_preparations(prepared)
    again = await chunks(code, data=[1, 2, 3], reduce=reduce, **options)
    assert [again[i].outputs for i in "01"] == [report[i].outputs for i in "01"]
    assert count_preparations(prepared) == count


async def test_output_of_prepare_is_in_the_runs_log(results):
    outcomes = await batch("print('of the code'); SUBMIT()", prepare="print('loading')\nprint('loaded', end='')")
    assert outcomes[0].meta.stdout == "of the code\n"
    await APILogHandler.aflush()
    async with get_client() as client:
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[find_run_id(results)]))
        logs = [line for line in await client.read_logs(wanted) if line.message.startswith("prepare: ")]
    assert [line.message for line in logs] == ["prepare: loading", "prepare: loaded"]
    assert {line.task_run_id for line in logs} == {None}


async def test_an_error_in_prepare_ends_the_run_without_a_retry(results, tmp_path):
    prepare = f"{prepare_counted(tmp_path / 'prepared')}\nimport nowhere_at_all"
    code = f"open({str(tmp_path / 'ran')!r}, 'w'); SUBMIT()"
    with pytest.raises(PrepareError, match=r"prepare raised ModuleNotFoundError \(line 5\): No module named"):
        await batch(
            code, inputs=SIX, prepare=prepare, max_workers=1, retries=5, retry_code_errors=True,
            provider="local:none", on_failure="return",
        )  # fmt: skip
    assert count_preparations(tmp_path / "prepared") == 1
    assert not (tmp_path / "ran").exists()
    assert [line for path in results.iterdir() for line in Ledger(path).read_lines()] == []


@pytest.mark.parametrize(("name", "code"), [("prepare", "x = 1\ny = ("), ("check", "x = 1\nSUBMIT(passed=)")])
async def test_prepare_and_check_that_are_not_python_are_refused_before_a_run(results, name, code):
    with pytest.raises(ConfigurationError, match=rf"`{name}` is not valid Python: .* \(line 2\)"):
        await batch("SUBMIT()", SIX, **{name: code})
    assert not results.exists()
    # Invalid escapes only warn, and code may await at its top level and stand in a block of a reply.
    valid = "import asyncio\nawait asyncio.sleep(0)\ntext = '\\d'"
    judge = f"```python\n{valid}\nSUBMIT(passed=text == '\\\\d')\n```"
    (outcome,) = await batch("SUBMIT()", [{"x": 1}], prepare=valid, check=judge)
    assert outcome.passed


@pytest.mark.usefixtures("short_delays")
async def test_a_lost_prepared_process_is_replaced_in_a_new_sandbox(tmp_path):
    code = """
import signal
if x == 2 and attempts == "x":
    os.kill(process, signal.SIGKILL)  # which none but an execution without isolation can do
SUBMIT(y=base + x)
"""
    prepare = prepare_counted(tmp_path / "prepared") + f"\nattempts = open({str(tmp_path / 'prepared')!r}).read()"
    results = await batch(code, inputs=SIX, prepare=prepare, max_workers=1, provider="local:none")
    assert [result.y for result in results] == [100 + x for x in range(6)]
    assert count_preparations(tmp_path / "prepared") == 2
    (lost,) = [result for result in results if result.meta.attempt == 2]
    assert "prepare had run in was killed by SIGKILL" in lost.meta.earlier_errors[0]


@pytest.mark.full
async def test_a_chunk_stays_complete_after_the_prepared_process_is_lost(volumes, tmp_path):
    code = """
import os, signal
with open(ran, "a") as file:
    file.write(chunk_id)
if chunk_id == "0":
    os.kill(process, signal.SIGKILL)  # which none but an execution without isolation can do
SUBMIT(total=sum(data))
"""
    prepare = prepare_counted(tmp_path / "prepared") + f"\nran = {str(tmp_path / 'ran')!r}"
    options = {"data": [1, 2, 3, 4], "chunk_size": 2, "volume_name": "v", "prepare": prepare, "max_workers": 1}
    options["results_path"] = str(tmp_path / "ledger")
    for _ in range(2):
        report = await chunks(code, **options, provider="local:none")
        assert [report[i].total for i in "01"] == [3, 7]
        assert (tmp_path / "ran").read_text() == "01"
    assert count_preparations(tmp_path / "prepared") == 2


@pytest.mark.full
async def test_prepare_and_its_seed_are_in_the_key_and_its_timeout_is_not():
    async def list_sandboxes(**options: Any) -> set[str]:
        return {result.meta.sandbox_id for result in await batch(["SUBMIT()"], cache_results=True, **options)}

    first = await list_sandboxes(prepare="x = 1")
    assert await list_sandboxes(prepare="x = 1", prepare_timeout=99) == first
    for options in ({"prepare": "x = 2"}, {}, {"prepare": "x = 1", "prepare_seed": 1}):
        assert not await list_sandboxes(**options) & first


async def test_with_a_seed_random_numbers_depend_only_on_the_executions_number(tmp_path):
    async def draw(count: int, **options: Any) -> list[float]:
        inputs = [{"x": x} for x in range(count)]
        results = await batch("SUBMIT(drawn=random.random())", inputs=inputs, prepare="import random", **options)
        return [result.drawn for result in results]

    first = await draw(8, prepare_seed=5, max_workers=3)
    assert len({*first}) == 8
    assert await draw(8, prepare_seed=5, max_workers=1, executions_per_task=3) == first


async def test_an_invalid_prepare_is_refused_with_a_sentence(results):
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"prepare_seed": 1}, "prepare_seed needs prepare: pass both, or leave"),
        ({"prepare": "  \n"}, "prepare is empty"),
    )
    for wrong, said in refused:
        with pytest.raises(ConfigurationError, match=said):
            await batch("SUBMIT()", **wrong)
    assert not results.exists() or not os.listdir(results)
