"""Tests that code ends at its timeout, whatever it is doing."""

import asyncio
from pathlib import Path
from textwrap import dedent
from typing import Any

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
    "joining a thread": "import threading, time; t = threading.Thread(target=time.sleep, args=(999,), daemon=True)\n"
    "t.start(); t.join()",
    "waiting for a thread at its end": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "waiting for a subprocess": "import subprocess; subprocess.run(['sleep', '1000'])",
    "in a loop of coroutines": "import asyncio; asyncio.run(asyncio.sleep(1000))",
    "awaiting": "import asyncio\nawait asyncio.sleep(1000)",
    "in a long instruction": "'a' * 30 + 'b' in ['x'] or sum(range(10 ** 12))",
    "swallowing errors": "import time\nwhile True:\n    try: time.sleep(1000)\n    except Exception: pass",
    "swallowing the interrupt": "import time\nwhile True:\n    try: time.sleep(1000)\n    except BaseException: pass",
    "deaf to the interrupt": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)",
    "submitting too late": "import time\ntry: time.sleep(1000)\nexcept BaseException: SUBMIT(late=True)",
    "waiting for the host": "forever()",
}


async def forever() -> None:
    await asyncio.Event().wait()


async def test_endless_code_of_any_kind_ends_at_its_timeout(provider: SandboxProvider) -> None:
    async with provider.interpreter(timeout=0.3, tools={"forever": forever}) as interpreter:
        executions = [interpreter.execute(code) for code in ENDLESS.values()]
        outcomes = await asyncio.gather(*executions, return_exceptions=True)
        for name, outcome in zip(ENDLESS, outcomes, strict=True):
            assert isinstance(outcome, ExecutionTimeout), f"{name}: {outcome!r}"
            assert outcome.timeout == 0.3
            assert "timeout of 0.3 s" in str(outcome)
        for context in (None, "c"):
            with pytest.raises(ExecutionTimeout):
                await interpreter.execute("while True: pass", timeout=0.001, context=context)
        assert (await interpreter.execute("SUBMIT(fine=1)", timeout=60)).fine


WAITING = """\
    import time
    def wait():
        time.sleep(1000)
    print("begun")
    display(1)
    wait()
    """
SAVING = "open('saved', 'w').write('x')\nwhile True: pass"
LEAVING = """
    import fcntl, os, time
    if os.fork() == 0:
        os.setsid()
        fcntl.flock(open("lock", "w"), fcntl.LOCK_EX)
        time.sleep(1000)
    print("left")
    time.sleep(1000)
    """
REPRESENTING = "class A:\n    def __repr__(self):\n        while True: pass\ndisplay(1)\nA()"


async def test_a_timeout_reports_the_line_and_the_output_so_far(interpreter: Interpreter, tmp_path: Path) -> None:
    """Check four executions at the same time.

    They take milliseconds before they wait; the six seconds allow for a busy machine.
    """
    outcomes: tuple[Any, ...] = await asyncio.gather(
        interpreter.execute(dedent(WAITING), timeout=6),
        interpreter.execute(SAVING, timeout=6, collect=["saved"], collect_to=tmp_path),
        interpreter.execute(dedent(LEAVING), timeout=6),
        interpreter.execute(REPRESENTING, timeout=6),
        return_exceptions=True,
    )
    waiting, saving, leaving, representing = outcomes
    for outcome in outcomes:
        assert isinstance(outcome, ExecutionTimeout)
        assert outcome.meta is not None
        assert outcome.meta.seconds >= 6
    assert "line 3, in wait" in waiting.traceback
    assert "(line 3)" in waiting.summary
    assert (waiting.stdout, waiting.meta.displays) == ("begun\n", ({"text/plain": "1"},))
    assert saving.meta.collected == (str(tmp_path / "saved"),)
    assert (tmp_path / "saved").read_text() == "x"
    assert leaving.stdout == "left\n"
    await interpreter.execute("import fcntl; fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)")  # waits for the fork's end
    assert "line 3" in str(representing)
    assert representing.meta.displays == ({"text/plain": "1"},)


@pytest.mark.full
async def test_a_flood_of_output_does_not_delay_the_timeout(interpreter: Interpreter) -> None:
    flood = "import subprocess; subprocess.run(['sh', '-c', 'yes & yes & yes >&2 & yes >&2 & wait'])"
    other = interpreter.execute("SUBMIT(fine=1)")
    outcome, result = await asyncio.gather(interpreter.execute(flood, timeout=1), other, return_exceptions=True)
    assert isinstance(outcome, ExecutionTimeout)
    assert result.fine  # type: ignore[union-attr]


async def test_a_timeout_may_be_months_and_must_be_positive(interpreter: Interpreter) -> None:
    for timeout in (30 * 86_400, 1e15, float("inf")):
        assert (await interpreter.execute("import time; time.sleep(0.01); SUBMIT(fine=1)", timeout=timeout)).fine
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="timeout"):
            await interpreter.execute("SUBMIT()", timeout=timeout)
    assert (await interpreter.execute("SUBMIT(fine=1)")).fine
