"""A driver is started by one call with its first execution, and begins that once, whatever becomes of the call."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rlm_batch import DaytonaSandbox, OutcomeUnknown, Result, SandboxStartError
from rlm_batch.blocks.daytona import channel, errors, launch
from rlm_batch.sandbox import interpreter as interpreters

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left")]

COUNTED = f"{COUNT_EXECUTION}\ncount_execution('x')\nSUBMIT(1)"
SESSION = "/toolbox/*/process/session"
SECRET = {"KEY": "of the code alone"}
# What code can read of how it came here: command lines, the daemon's files and the driver's.
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


@pytest.fixture(autouse=True)
def standin(running_daytona: object, daytona: Any) -> Any:
    """Every test here has one, which was there before processes are counted."""
    return daytona


@pytest.fixture
def counter() -> Iterator[ExecutionCounter]:
    with ExecutionCounter() as counter:
        yield counter


@pytest.fixture
def block(request: pytest.FixtureRequest) -> DaytonaSandbox:
    """Whose first execution goes along with the command, or, for there are secrets, as input."""
    return DaytonaSandbox(environment=getattr(request, "param", {}), start_timeout=20)


along_or_as_input = pytest.mark.parametrize("block", [{}, SECRET], ids=["along", "as input"], indirect=True)


@asynccontextmanager
async def execute(block: DaytonaSandbox, code: str, **variables: Any) -> AsyncIterator[Result]:
    """The result of a fresh sandbox's first execution; the sandbox stays for as long as this does."""
    interpreter = block.interpreter(timeout=20)
    try:
        yield await interpreter.execute(code, variables)
    finally:
        await interpreter.shutdown()


async def count(block: DaytonaSandbox, counter: ExecutionCounter) -> Any:
    async with execute(block, COUNTED, address=counter.address) as result:
        return result.output


async def is_empty(standin: Any) -> bool:
    """Whether the stand-in has nothing any more: removing is accepted, and done a little later."""
    for _ in range(100):
        if not standin.state()["sandboxes"]:
            return True
        await asyncio.sleep(0.05)
    return False


@along_or_as_input
async def test_a_fresh_sandbox_for_one_execution_takes_six_calls_and_one_more_where_there_are_secrets(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox
) -> None:
    standin.set(boot_s=0.09)
    assert await count(block, counter) == 1
    expected = {
        "POST /api/sandbox", "GET /api/sandbox/*", f"POST {SESSION}", f"POST {SESSION}/*/exec",
        f"WS {SESSION}/*/command/*/logs", "DELETE /api/sandbox/*",
    }  # fmt: skip
    expected |= {f"POST {SESSION}/*/command/*/input"} if block.environment else set()
    assert standin.state()["counts"] == Counter(expected)


@pytest.mark.requires("namespaces")  # the stand-in's files are elsewhere without
async def test_a_secret_stands_in_no_command_and_no_file(standin: Any) -> None:
    async with execute(DaytonaSandbox(environment=SECRET), READ_TRACES) as result:  # type: ignore[arg-type]
        assert result.hits == 0
    # It would be seen: variables go along where there is no secret.
    async with execute(DaytonaSandbox(), READ_TRACES.replace('os.environ["KEY"]', "key"), key=SECRET["KEY"]) as result:
        assert result.hits == 1


@along_or_as_input
@pytest.mark.parametrize(
    ("call", "fault"),  # of a start that is repeated see below
    [("session", "lost"), ("session", "502"), ("session", "repeat"), ("exec", "lost"), ("exec", "502")],
)
async def test_a_start_that_failed_on_its_way_is_found_or_made_again_and_runs_once(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, fault: str, call: str
) -> None:
    standin.set(fault_rate=1.0, faults=[fault], fault_times=1, fault_where=f"^POST .*/{call}$")
    assert await count(block, counter) == 1
    state = standin.state()
    assert state["faults"] == {fault: 1}
    assert state["created"] == 1
    assert counter.counts == {"x": 1}
    assert await is_empty(standin)


@pytest.mark.full
@along_or_as_input
async def test_a_start_that_comes_after_it_was_made_again_runs_nothing(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CALL_SECONDS", 1.0)
    # The SDK waits 5 s longer than it is told, so that the second is there 6 s before the first.
    standin.set(fault_rate=1.0, faults=["delay"], fault_delay_s=12.0, fault_times=1, fault_where="/exec$")
    async with execute(block, COUNTED, address=counter.address) as result:
        assert result.output == 1
        await asyncio.sleep(8.0)  # for the first to come
        assert standin.state()["counts"][f"POST {SESSION}/*/exec"] == 2
        assert counter.counts == {"x": 1}
    assert standin.state()["created"] == 1


async def test_a_start_that_cannot_be_found_again_has_an_unknown_outcome(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "TRIES", 2)
    block.start_timeout = 4
    standin.set(fault_rate=1.0, faults=["lost"], fault_where=r"^POST .*/exec$|^GET .*/session/\*$")
    with pytest.raises(OutcomeUnknown, match=r"the call that starts the driver was lost .*idempotent=True"):
        await count(block, counter)
    assert counter.counts["x"] <= 1
    assert standin.state()["counts"][f"POST {SESSION}/*/exec"] == 1
    assert await is_empty(standin)


async def test_a_start_with_a_secret_that_cannot_be_found_again_has_begun_nothing(
    standin: Any, counter: ExecutionCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "TRIES", 2)
    standin.set(fault_rate=1.0, faults=["lost"], fault_where=r"^POST .*/exec$|^GET .*/session/\*$")
    with pytest.raises(SandboxStartError, match="did not start"):
        await count(DaytonaSandbox(environment=SECRET, start_timeout=4), counter)  # type: ignore[arg-type]
    assert counter.counts == {}
    assert await is_empty(standin)


async def test_a_start_that_the_proxy_has_repeated_runs_once_and_its_outcome_is_unknown(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the repetition's, which the session's shell would begin when the first has ended."""
    monkeypatch.setattr(interpreters, "START_TIMEOUT_SECONDS", 6.0)
    standin.set(fault_rate=1.0, faults=["repeat"], fault_times=1, fault_where="/exec$")
    with pytest.raises(OutcomeUnknown, match="idempotent=True"):
        await count(block, counter)
    assert counter.counts == {"x": 1}
    assert await is_empty(standin)


@along_or_as_input
async def test_a_driver_whose_log_cannot_be_followed_has_an_unknown_outcome(
    standin: Any, counter: ExecutionCounter, block: DaytonaSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "GIVE_UP_SECONDS", 5.0)
    standin.set(fault_rate=1.0, faults=["502"], fault_where="^WS ")
    with pytest.raises(OutcomeUnknown, match="its log cannot be followed") as caught:
        await count(block, counter)
    assert caught.value.meta is not None
    assert caught.value.meta.sandbox_id
    assert counter.counts == {"x": 1}
    assert await is_empty(standin)
