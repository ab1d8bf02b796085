"""What code prints without end fills neither the host's memory nor the driver's."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from rlm_batch import LocalSandbox

pytestmark = pytest.mark.anyio
Processes = Callable[[], dict[int, str]]

MIB = 1024  # in the KiB that the kernel counts


def memory(pid: int | str, field: str) -> int:
    """A line of a process's status, in KiB."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0])


async def test_fifty_megabytes_of_prints_fill_no_memory(local: LocalSandbox, processes: Processes) -> None:
    before = set(processes())
    async with local.interpreter(timeout=60) as interpreter:
        await interpreter.execute("SUBMIT()")
        ours = memory("self", "VmRSS")
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
        peak = memory("self", "VmHWM")
        assert peak - ours < 25 * MIB
        assert max(memory(pid, "VmHWM") for pid in set(processes()) - before) < 60 * MIB


@pytest.mark.full
async def test_executions_leave_nothing_in_the_hosts_memory_or_the_drivers(processes: Processes) -> None:
    before = set(processes())
    async with LocalSandbox(isolation="none").interpreter(timeout=60) as interpreter:

        async def some() -> None:
            for _ in range(20):
                await asyncio.gather(
                    *(interpreter.execute("print('x' * 50_000); SUBMIT(x='x' * 50_000)") for _ in range(10))
                )

        await some()
        ours, theirs = memory("self", "VmRSS"), {pid: memory(pid, "VmRSS") for pid in set(processes()) - before}
        await some()
        assert memory("self", "VmRSS") - ours < 10 * MIB
        drivers = theirs.keys() & processes().keys()  # and not a process that waited for an execution
        assert drivers
        for pid in drivers:
            assert memory(pid, "VmRSS") - theirs[pid] < 5 * MIB
