"""CPU seconds and peak memory of executions, as the kernel counts them."""

import pytest

from rlm_batch import ExecutionTimeout
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.meta import Meta

from .gate import FIND_CHANNEL

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
FILL = "data = bytearray(150 * 1024 * 1024)\ndata[::4096] = b'x' * len(data[::4096])\n"
CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', CODE], check=True)\n"


def read_usage(meta: Meta | None) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory, both of which must be known."""
    assert meta is not None
    assert meta.cpu_seconds is not None
    assert meta.peak_mib is not None
    return meta.cpu_seconds, meta.peak_mib


async def test_an_execution_has_the_cpu_time_and_the_peak_memory_of_its_processes(interpreter: Interpreter) -> None:
    idle = await interpreter.execute("import time\ntime.sleep(0.2)\nSUBMIT(y=1)")
    busy = await interpreter.execute(f"{BURN}{FILL}SUBMIT(y=1)")
    child = await interpreter.execute(f"CODE = {BURN + FILL!r}\n{CHILD}")
    after = await interpreter.execute("SUBMIT(y=1)")
    for result in (busy, child):
        seconds, peak = read_usage(result.meta)
        assert 0.3 <= seconds < 30
        assert 150 <= peak < 1000
    for result in (idle, after):
        seconds, peak = read_usage(result.meta)
        assert seconds < 0.3
        assert 0 < peak < 150


async def test_a_failed_execution_has_its_usage(interpreter: Interpreter) -> None:
    with pytest.raises(ExecutionTimeout) as raised:
        await interpreter.execute("while True: pass", timeout=0.5)
    assert min(read_usage(raised.value.meta)) > 0


async def test_a_step_has_its_own_cpu_time(interpreter: Interpreter) -> None:
    first = await interpreter.execute(BURN, context="c")
    second = await interpreter.execute("SUBMIT(y=1)", context="c")
    assert read_usage(first.meta)[0] >= 0.25
    assert read_usage(second.meta)[0] < 0.25


async def test_forged_usage_of_a_context_ends_no_sandbox(interpreter: Interpreter) -> None:
    forge = (
        FIND_CHANNEL
        + """
end = {"op": "end", "token": channel.token, "status": "finished"}
channel.send({**end, "cpu_microseconds": forged, "peak_kib": -forged}, b"null")
"""
    )
    for forged in (-5, 1 << 62, -(10**4299), 10**4300 - 1):
        await interpreter.execute(forge, {"forged": forged}, context="c")
    assert (await interpreter.execute("SUBMIT(y=1)")).y == 1
