"""The channel to a driver on Modal: a command's standard streams, through the buffers of Modal's client."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from grpclib.exceptions import StreamTerminatedError

from rlm_batch import ModalSandbox, OutcomeUnknown
from rlm_batch.blocks.modal.channel import ModalChannel

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]


async def test_answers_survive_a_broken_network(modal_sandbox: Make, modal_standin: Any) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    SUBMIT(list(pool.map(lambda n: [ask(n, "x" * 3000 * k) for k in range(5)], range(16))))
"""
    async with modal_sandbox().interpreter(tools={"ask": lambda n, text: [n, len(text)]}) as interpreter:
        await interpreter.execute("1")
        faults: list[dict[str, Any]] = [
            {"status": "UNAVAILABLE"}, {"status": "UNAVAILABLE", "after": True}, {"status": "RESOURCE_EXHAUSTED"},
            {"drop": True},
        ]  # fmt: skip
        modal_standin.ask("faults", rules=[{"method": "TaskExecStdinWrite", "times": 2, **fault} for fault in faults])
        result = await interpreter.execute(code)
        assert result.output == [[[n, 3000 * k] for k in range(5)] for n in range(16)]
        assert modal_standin.ask("state")["faults"] == {"TaskExecStdinWrite": 8}


async def test_output_continues_after_its_stream_breaks(modal_sandbox: Make, modal_standin: Any) -> None:
    code = """
for n in range(20):
    print(n, flush=True)
    if n % 4 == 0:
        cut()
SUBMIT(x=1)
"""
    heard: list[str] = []
    async with modal_sandbox().interpreter(tools={"cut": lambda: modal_standin.ask("drop")}) as interpreter:
        await interpreter.execute("1")
        faults = [{"status": "RESOURCE_EXHAUSTED", "times": 2}, {"status": "UNAVAILABLE", "times": 2}]
        modal_standin.ask("faults", rules=[{"method": "TaskExecStdioRead", **fault} for fault in faults])
        result = await interpreter.execute(code, on_output=lambda _, text: heard.append(text))
    assert "".join(heard).split() == result.meta.stdout.split() == [str(n) for n in range(20)]
    assert modal_standin.ask("state")["counts"]["TaskExecStdioRead"] > 5


async def test_a_driver_without_output_raises_outcome_unknown(
    modal_sandbox: Make, modal_standin: Any, counter: ExecutionCounter
) -> None:
    """The first execution is part of the command that starts the driver, so it runs even if no answer arrives."""
    modal_standin.ask("faults", rules=[{"method": "TaskExecStdioRead", "status": "PERMISSION_DENIED"}])
    interpreter = modal_sandbox().interpreter()
    try:
        with pytest.raises(OutcomeUnknown, match=r"its output ended early.*idempotent"):
            await interpreter.execute(f"{COUNT_EXECUTION}\ncount_execution('x')", {"address": counter.address})
    finally:
        await interpreter.shutdown()
    assert counter.counts["x"] <= 1


async def test_a_driver_that_ends_without_readable_last_words_closes_the_channel() -> None:
    async def output() -> AsyncIterator[bytes]:
        for data in ():
            yield data

    async def break_off() -> bytes:
        raise StreamTerminatedError("Connection lost")

    stderr = SimpleNamespace(read=SimpleNamespace(aio=break_off))
    process = SimpleNamespace(stdin=SimpleNamespace(write=len), stdout=output(), stderr=stderr)
    reasons: list[str] = []
    channel = ModalChannel(process, b"", receive=print, closed=reasons.append, sandbox_id="sb-1")
    await wait_until_async(lambda: bool(reasons), "the channel is closed")
    assert (reasons, channel.is_complete) == (["its process has ended"], True)


async def test_a_fresh_sandbox_for_one_execution_takes_five_calls(modal_sandbox: Make, modal_standin: Any) -> None:
    async def execute() -> Counter[str]:
        interpreter = modal_sandbox().interpreter()
        try:
            assert (await interpreter.execute("SUBMIT(1)")).output == 1
        finally:
            await interpreter.shutdown()
        return Counter(modal_standin.ask("state")["counts"])

    before = await execute()  # This call also looks up the app and the image.
    assert await execute() - before == Counter(
        ["SandboxCreateV2", "TaskExecStart", "TaskExecStdinWrite", "TaskExecStdioRead", "SandboxTerminateV2"]
    )
