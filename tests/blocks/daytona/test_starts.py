"""The call that starts a driver and its first execution: the code runs at most once, even if calls are lost."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import DaytonaSandbox, OutcomeUnknown, Result, SandboxStartError, batch
from rlm_batch.blocks.daytona import channel, errors, launch
from rlm_batch.sandbox import interpreter as interpreters
from rlm_batch.sandbox.interpreter import Interpreter

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

COUNTED = f"{COUNT_EXECUTION}\ncount_execution('x')\nSUBMIT(1)"
SESSION = "/toolbox/*/process/session"
EXEC = f"POST {SESSION}/*/exec"
SECRET = {"KEY": "of the code alone"}
# Code that searches command lines, the daemon's files and the driver's files for the secret.
READ_TRACES = """
import os
from pathlib import Path

places = [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/home/daemon").rglob("*"), *Path("/tmp").rglob("*")]
texts = []
for place in places:
    try:
        texts.append(place.read_bytes())
    except OSError:
        pass
SUBMIT(hits=sum(os.environ["KEY"].encode() in text for text in texts))
"""


@pytest.fixture
def block(request: pytest.FixtureRequest) -> DaytonaSandbox:
    """Return a block that sends its first execution in the command, or as input if the block has secrets."""
    return DaytonaSandbox(environment=getattr(request, "param", {}))


along_or_as_input = pytest.mark.parametrize("block", [{}, SECRET], ids=["along", "as input"], indirect=True)


@asynccontextmanager
async def execute(interpreter: Interpreter, code: str, **variables: Any) -> AsyncIterator[Result]:
    """Start the driver, yield the first execution's result, and keep the sandbox open until the end of the block."""
    try:
        yield await interpreter.execute(code, variables)
    finally:
        await interpreter.shutdown()


async def count(interpreter: Interpreter, counter: ExecutionCounter) -> Any:
    async with execute(interpreter, COUNTED, address=counter.address) as result:
        return result.output


@along_or_as_input
async def test_one_execution_takes_five_calls_and_a_sixth_for_secrets(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox
) -> None:
    assert await count(block.interpreter(), counter) == 1
    expected = {"POST /api/sandbox", f"POST {SESSION}", EXEC, f"WS {SESSION}/*/command/*/logs"}
    expected |= {"DELETE /api/sandbox/*"}
    expected |= {f"POST {SESSION}/*/command/*/input"} if block.environment else set()
    assert standin.state()["counts"] == Counter(expected)


async def test_a_secret_is_in_no_command_and_no_file() -> None:
    async with execute(DaytonaSandbox(environment=SECRET).interpreter(), READ_TRACES) as result:  # type: ignore[arg-type]
        assert result.hits == 0
    # Without secrets the variables are part of the command, so the search finds the value.
    code = READ_TRACES.replace('os.environ["KEY"]', "key")
    async with execute(DaytonaSandbox().interpreter(), code, key=SECRET["KEY"]) as result:
        assert result.hits == 1


@along_or_as_input
@pytest.mark.parametrize(("call", "fault"), [("session", "lost"), ("session", "repeat"), ("exec", "lost")])
async def test_a_start_that_fails_in_transit_is_found_or_repeated_and_runs_once(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, fault: str, call: str
) -> None:
    standin.set(fault_rate=1.0, faults=[fault], fault_times=1, fault_where=f"^POST .*/{call}$")
    assert await count(block.interpreter(), counter) == 1
    state = standin.state()
    assert state["faults"] == {fault: 1}
    assert state["created"] == 1
    assert counter.counts == {"x": 1}


@pytest.mark.full
async def test_a_start_that_arrives_after_its_retry_runs_nothing(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CALL_SECONDS", 1.0)  # The SDK waits 5 s longer than its timeout.
    standin.set(fault_rate=1.0, faults=["delay"], fault_delay_s=3600.0, fault_times=1, fault_where="/exec$")
    async with execute(block.interpreter(), COUNTED, address=counter.address) as result:
        assert result.output == 1
        assert standin.state()["counts"][EXEC] == 2
        standin.set(fault_rate=0.0, fault_delay_s=0.0)
        await wait_until_async(
            lambda: launch.LOST_RACE_STATUS in standin.state()["sandboxes"][0]["exit_codes"], "the first has come too"
        )
        assert counter.counts == {"x": 1}
    assert standin.state()["created"] == 1


@along_or_as_input
async def test_a_start_that_stays_missing_raises_outcome_unknown(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "TRIES", 2)

    async def open_and_hurry() -> Any:
        sandbox = await block.open(block.labels(""))
        block.start_timeout = 1  # The sandbox opened with the usual timeout.
        return sandbox

    standin.set(fault_rate=1.0, faults=["lost"], fault_where=r"^POST .*/exec$|^GET .*/session/\*$")
    has_run = not block.environment  # Code sent as input has not run.
    error, words = (
        (OutcomeUnknown, r"the call that starts the driver was lost .*idempotent")
        if has_run
        else (SandboxStartError, "did not start")
    )
    with pytest.raises(error, match=words):
        await count(Interpreter(open_and_hurry), counter)
    assert counter.counts["x"] <= has_run
    assert standin.state()["counts"][EXEC] == 1


async def test_a_start_repeated_by_the_proxy_runs_at_most_once(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy returns the answer of the repeated call. Its command runs after the end of the first command."""
    monkeypatch.setattr(interpreters, "START_TIMEOUT_SECONDS", 2.0)
    standin.set(fault_rate=1.0, faults=["repeat"], fault_times=1, fault_where="/exec$")
    with pytest.raises(OutcomeUnknown, match="idempotent"):
        await count(block.interpreter(), counter)
    assert counter.counts["x"] <= 1


@along_or_as_input
async def test_an_unreadable_driver_log_raises_outcome_unknown(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "GIVE_UP_SECONDS", 3600.0)
    standin.set(fault_rate=1.0, faults=["502"], fault_where="^WS ")
    running = asyncio.create_task(count(block.interpreter(), counter))
    await wait_until_async(lambda: counter.counts, "the code runs")
    monkeypatch.setattr(channel, "GIVE_UP_SECONDS", 0.0)
    with pytest.raises(OutcomeUnknown, match="its log cannot be followed") as caught:
        await running
    assert caught.value.meta is not None
    assert caught.value.meta.sandbox_id
    assert counter.counts == {"x": 1}


async def test_a_log_that_keeps_disconnecting_is_read_completely(standin: Any, block: DaytonaSandbox) -> None:
    code = """
for line in range(5):
    print(line)
    cut()
SUBMIT(y=1)
"""
    async with block.interpreter(tools={"cut": standin.cut}) as interpreter:
        result = await interpreter.execute(code)
    assert (result.y, result.meta.stdout) == (1, "0\n1\n2\n3\n4\n")
    assert standin.state()["counts"][f"WS {SESSION}/*/command/*/logs"] >= 6


async def test_an_unanswered_input_raises_outcome_unknown(
    standin: Any, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with block.interpreter() as interpreter:
        await interpreter.execute("pass")
        monkeypatch.setattr(channel, "CALL_SECONDS", 1.0)
        monkeypatch.setattr(channel, "GIVE_UP_SECONDS", 0.5)
        standin.set(fault_rate=1.0, faults=["delay"], fault_where="/input", fault_delay_s=3600.0)
        with pytest.raises(OutcomeUnknown, match="it takes no input: no answer came in time"):
            await interpreter.execute("pass")


async def test_losing_the_answers_to_an_input_runs_no_code_twice(standin: Any, block: DaytonaSandbox) -> None:
    async with block.interpreter() as interpreter:
        await interpreter.execute("runs = 0", context="main")
        standin.set(fault_rate=1.0, faults=["lost"], fault_times=3, fault_where="/input$")
        await interpreter.execute("runs += 1", context="main")
        assert (await interpreter.execute("SUBMIT(runs)", context="main")).output == 1
    assert standin.state()["faults"] == {"lost": 3}


@pytest.mark.full
async def test_a_batch_succeeds_while_a_fifth_of_all_calls_fail(
    standin: Any, counter: ExecutionCounter, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    standin.set(boot_s=0.09, fault_rate=0.2, retry_after_s=0.2)
    code = f"{COUNT_EXECUTION}\ncount_execution(x)\nSUBMIT(y=x * x, text=text)"
    inputs = [{"x": x, "address": counter.address, "text": "t" * (x % 5) * 20_000} for x in range(40)]
    results = await batch(code, inputs=inputs, provider="daytona", max_workers=10, retries=5)
    faults = standin.state()["faults"]
    standin.set(fault_rate=0.0)
    assert set(faults) == {"429", "502", "503", "drop", "delay"}
    assert [(result.y, len(result.text)) for result in results] == [(x * x, (x % 5) * 20_000) for x in range(40)]
    assert counter.counts == {str(x): 1 for x in range(40)}
