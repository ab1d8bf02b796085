"""Code that outlives its timeout is ended, wherever it is."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import ConfigurationError, ExecutionTimeout
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

ENDLESS = {
    "asleep": "import time; time.sleep(1000)",
    "busy": "while True: pass",
    "in a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "in a queue": "import queue; queue.Queue().get()",
    "joining a thread": "import threading, time; t = threading.Thread(target=time.sleep, args=(9,), daemon=True)\n"
    "t.start(); t.join()",
    "waiting for a subprocess": "import subprocess; subprocess.run(['sleep', '1000'])",
    "in a loop of coroutines": "import asyncio; asyncio.run(asyncio.sleep(1000))",
    "in a long instruction": "'a' * 30 + 'b' in ['x'] or sum(range(10 ** 12))",
    "swallowing errors": "import time\nwhile True:\n    try: time.sleep(1000)\n    except Exception: pass",
    "waiting for the host": "forever()",
}


async def forever() -> None:
    await asyncio.sleep(1000)


async def test_endless_code_ends_with_its_timeout_wherever_it_is(provider: SandboxProvider) -> None:
    async with provider.interpreter(timeout=0.5, tools={"forever": forever}) as interpreter:
        executions = [interpreter.execute(code) for code in ENDLESS.values()]
        for name, outcome in zip(ENDLESS, await asyncio.gather(*executions, return_exceptions=True), strict=True):
            assert isinstance(outcome, ExecutionTimeout), f"{name}: {outcome!r}"
            assert outcome.timeout == 0.5
            assert "timeout of 0.5 s" in str(outcome)
        assert (await interpreter.execute("SUBMIT(fine=1)")).fine


async def test_a_timeout_says_where_the_code_was_and_what_it_had_printed(interpreter: Interpreter) -> None:
    code = """\
        import time
        def wait():
            time.sleep(1000)
        print("begun")
        wait()
        """
    with pytest.raises(ExecutionTimeout) as caught:
        await interpreter.execute(dedent(code), timeout=2)
    error = caught.value
    assert "line 3, in wait" in error.traceback
    assert "(line 3)" in error.summary
    assert error.stdout == "begun\n"
    assert error.meta is not None
    assert error.meta.seconds >= 2


async def test_code_that_ignores_the_interrupt_is_killed(interpreter: Interpreter) -> None:
    stubborn = """
        import time
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
        """
    deaf = """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            time.sleep(1)
        """
    executions = [interpreter.execute(dedent(code), timeout=0.3) for code in (stubborn, deaf)]
    for outcome in await asyncio.gather(*executions, return_exceptions=True):
        assert isinstance(outcome, ExecutionTimeout)


async def test_what_is_submitted_after_the_timeout_is_no_result(interpreter: Interpreter) -> None:
    code = """
        import time
        try:
            time.sleep(1000)
        except BaseException:
            SUBMIT(late=True)
        """
    with pytest.raises(ExecutionTimeout):
        await interpreter.execute(dedent(code), timeout=0.3)


async def test_a_thread_that_never_ends_is_ended(interpreter: Interpreter) -> None:
    code = "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()"
    with pytest.raises(ExecutionTimeout):
        await interpreter.execute(code, timeout=0.5)


@pytest.mark.full
async def test_a_flood_of_output_does_not_hold_up_the_timeout(interpreter: Interpreter) -> None:
    flood = "import subprocess; subprocess.run(['sh', '-c', 'yes & yes & yes >&2 & yes >&2 & wait'])"
    other = interpreter.execute("import time; time.sleep(0.2); SUBMIT(fine=1)")
    async with asyncio.timeout(20):
        outcome, result = await asyncio.gather(interpreter.execute(flood, timeout=1), other, return_exceptions=True)
    assert isinstance(outcome, ExecutionTimeout)
    assert result.fine  # type: ignore[union-attr]


async def test_a_tiny_timeout_is_a_timeout(interpreter: Interpreter) -> None:
    executions = [interpreter.execute("while True: pass", timeout=0.001, context=context) for context in (None, "c")]
    for outcome in await asyncio.gather(*executions, return_exceptions=True):
        assert isinstance(outcome, ExecutionTimeout)


async def test_a_timeout_of_months_is_as_good_as_any(interpreter: Interpreter) -> None:
    for timeout in (30 * 86_400, 1e9, 1e15):
        assert (await interpreter.execute("import time; time.sleep(0.1); SUBMIT(fine=1)", timeout=timeout)).fine


async def test_a_timeout_that_is_no_time_is_refused(interpreter: Interpreter) -> None:
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="timeout"):
            await interpreter.execute("SUBMIT()", timeout=timeout)


async def test_an_infinite_timeout_is_none_or_refused(interpreter: Interpreter) -> None:
    try:
        assert (await interpreter.execute("SUBMIT(fine=1)", timeout=float("inf"))).fine
    except ConfigurationError as error:
        assert "timeout" in str(error)  # noqa: PT017 - either outcome is right
    assert (await interpreter.execute("SUBMIT(fine=1)")).fine
