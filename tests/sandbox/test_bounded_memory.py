"""Output and results that code makes without end fill neither the host's memory nor the driver's."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from rlm_batch import LocalSandbox

from .conftest import read_memory

pytestmark = pytest.mark.anyio
Processes = Callable[[], dict[int, str]]

MIB = 1024  # KiB, in which the kernel counts


@pytest.mark.strongest_first
async def test_fifty_megabytes_of_prints_fill_no_memory(local: LocalSandbox, processes: Processes) -> None:
    before = set(processes())
    async with local.interpreter() as interpreter:
        await interpreter.execute("SUBMIT()")
        ours = read_memory("self", "VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
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
async def test_executions_leave_nothing_in_the_memory_of_the_host_or_the_driver(processes: Processes) -> None:
    before = set(processes())
    async with LocalSandbox(isolation="none").interpreter() as interpreter:

        async def run_some() -> dict[int | str, int]:
            for _ in range(20):
                code = "print('x' * 50_000); SUBMIT(x='x' * 50_000)"
                await asyncio.gather(*(interpreter.execute(code) for _ in range(10)))
            return {pid: read_memory(pid, "VmRSS") for pid in ("self", *(set(processes()) - before))}

        first, second = await run_some(), await run_some()
        assert len(first.keys() & second.keys()) > 1  # the driver, but no process that waited for an execution
        for pid in first.keys() & second.keys():
            assert second[pid] - first[pid] < 10 * MIB
