"""Tests that endless output and results fill neither the host's memory nor the driver's."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from rlm_batch import LocalInterpreter, LocalSandbox

from .conftest import execute, read_memory

pytestmark = pytest.mark.anyio
Processes = Callable[[], dict[int, str]]

MIB = 1024  # KiB, the kernel's unit


@pytest.mark.strongest_first
async def test_fifty_megabytes_of_prints_fill_no_memory(local: LocalSandbox, processes: Processes) -> None:
    before = set(processes())
    async with local.interpreter() as interpreter:
        await interpreter.execute("SUBMIT()")
        ours = read_memory("self", "VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        code = """
            import sys
            for i in range(50_000):
                print("x" * 999)
                if i % 10 == 0:
                    print("y" * 999, file=sys.stderr)
            """
        result = await interpreter.execute(dedent(code))
        assert "49,900,000 characters dropped" in result.meta.stdout
        assert read_memory("self", "VmHWM") - ours < 25 * MIB
        assert max(read_memory(pid, "VmHWM") for pid in set(processes()) - before) < 60 * MIB


@pytest.mark.full
async def test_executions_leave_no_memory_in_the_host_or_driver(processes: Processes) -> None:
    before = set(processes())
    async with LocalSandbox(isolation="none").interpreter() as interpreter:

        async def run_some() -> dict[int | str, int]:
            for _ in range(20):
                code = "print('x' * 50_000); SUBMIT(x='x' * 50_000)"
                await asyncio.gather(*(interpreter.execute(code) for _ in range(10)))
            return {pid: read_memory(pid, "VmRSS") for pid in ("self", *(set(processes()) - before))}

        first, second = await run_some(), await run_some()
        assert len(first.keys() & second.keys()) > 1  # includes the driver, but no process that waited for an execution
        for pid in first.keys() & second.keys():
            assert second[pid] - first[pid] < 10 * MIB


CALL_WITH_WIDE_TEXTS = """
from concurrent.futures import ThreadPoolExecutor
text = "x" * 3_900_000 + chr(0x1F600)
with ThreadPoolExecutor(12) as pool:
    SUBMIT(sizes=list(pool.map(lambda _: hold(text), range(12))))
"""


@pytest.mark.parametrize("is_sync", [False, True])
async def test_the_total_size_of_tool_arguments_is_bounded(is_sync: bool) -> None:
    held, most, lock = 0, 0, threading.Lock()

    def hold(text: str) -> int:
        nonlocal held, most
        with lock:
            held += sys.getsizeof(text)
            most = max(most, held)
        time.sleep(0.3)  # long enough to see a further call, if there were one
        with lock:
            held -= sys.getsizeof(text)
        return len(text)

    results = await asyncio.gather(*(execute(is_sync, CALL_WITH_WIDE_TEXTS, hold=hold) for _ in range(2)))
    assert [result.sizes for result in results] == [[3_900_001] * 12] * 2
    assert most <= 128 * 1024 * 1024  # Python uses four bytes per character here, so all texts together have 374 MB


ANSWERS = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from rlm_batch import CodeCrashed, LocalInterpreter, LocalSandbox

def read_memory(name):
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) // 1024

async def run(code, tools):
    async with LocalSandbox(isolation="none").interpreter(tools=tools) as interpreter:
        await interpreter.execute(code)

text = "x" * 8_000_000
code = '''
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(40) as pool:
    SUBMIT(sizes=list(pool.map(lambda _: len(answer()), range(40))))
'''
tools = {"answer": lambda: text}
before = read_memory("VmRSS")
with suppress(CodeCrashed):  # The driver ends code that leaves too many answers unread.
    if sys.argv[1] == "sync":
        with LocalInterpreter(isolation="none", tools=tools) as script:
            script.execute(code)
    else:
        asyncio.run(run(code, tools))
print(read_memory("VmHWM") - before)
"""


@pytest.mark.parametrize("way", ["async", "sync"])
def test_the_answers_of_tools_fill_no_memory(way: str) -> None:
    # A process of its own: after other tests, the allocator of the C library keeps large blocks for each thread.
    command = [sys.executable, "-c", ANSWERS, way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 128  # MiB; all answers together have 320


@pytest.mark.parametrize("is_sync", [False, True])
async def test_a_tool_with_the_largest_arguments_can_run_code_that_calls_tools(is_sync: bool) -> None:
    everything_holds = threading.Barrier(8)

    def run_nested(text: str) -> int:
        everything_holds.wait(60)  # eight calls fill the limit, so a ninth would have to wait
        with LocalInterpreter(isolation="none", tools={"count": len}) as interpreter:
            return interpreter.execute("SUBMIT(count('y' * 3_900_000 + chr(0x1F600)))").output + len(text)

    code = CALL_WITH_WIDE_TEXTS.replace("hold", "nest").replace("12", "8")
    assert (await execute(is_sync, code, nest=run_nested)).sizes == [7_800_002] * 8
