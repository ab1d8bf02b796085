"""Limits of a container as a whole: exceeding a limit ends only the execution, and the next execution works."""

import asyncio
import time
from pathlib import Path

import pytest

from rlm_batch import CodeCrashed, CodeError, ContainerSandbox, ExecutionTimeout
from rlm_batch.sandbox.errors import RlmBatchError

pytestmark = [pytest.mark.anyio, pytest.mark.requires("podman")]

MEMORY_BOMB = """
import os, time
pids = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        held = os.urandom(1 << 20) * 40
        time.sleep(1000)
        os._exit(0)
    pids.append(pid)
killed = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)]
raise MemoryError(f"processes ended by {killed}")
"""
KILLED = """
import os, time
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")  # the kernel kills this process first
reads, writes = os.pipe()
if os.fork() == 0:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")
    held = os.urandom(1 << 20) * 150
    os.write(writes, b"x")
    time.sleep(1000)
    os._exit(0)
os.read(reads, 1)
held = os.urandom(1 << 20) * 150
"""
MANY_FILES = """
import os
for number in range(1000):
    with open(f"file{number}", "wb") as file:
        file.write(os.urandom(1 << 20))
"""
IN_SHARED_MEMORY = MANY_FILES.replace('f"file', 'f"/dev/shm/file')
FORK_BOMB = """
import os
count = 0
while True:
    try:
        if os.fork() == 0:
            while True:
                os.fork()
        count += 1
    except OSError:
        pass
"""
THREADS = """
import threading, time
for count in range(2000):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
SPIN = """
import os
for _ in range(8):
    if os.fork() == 0:
        while True:
            pass
while True:
    pass
"""
PROCESSOR_SECONDS = """
import os
if os.path.exists("/sys/fs/cgroup/cpu.stat"):
    SUBMIT(seconds=int(open("/sys/fs/cgroup/cpu.stat").read().split()[1]) / 1e6)
SUBMIT(seconds=int(open("/sys/fs/cgroup/cpuacct/cpuacct.usage").read()) / 1e9)
"""
WORKS = "import os; SUBMIT(works=os.getpid() > 0)"


async def run_beyond(provider: ContainerSandbox, code: str) -> RlmBatchError:
    """Return the error of code that exceeds a limit, and check that executions beside and after it succeed."""
    has_begun, is_over = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        has_begun.set()
        await is_over.wait()

    async with provider.interpreter(tools={"wait": wait}) as interpreter:
        beside = asyncio.create_task(interpreter.execute("wait(); SUBMIT(works=True)"))
        await has_begun.wait()
        with pytest.raises(RlmBatchError) as caught:
            await interpreter.execute(code)
        is_over.set()
        assert (await beside).works
        assert (await interpreter.execute(WORKS)).works
    return caught.value


@pytest.mark.full
async def test_ten_processes_share_the_containers_memory_limit(
    container: ContainerSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = await run_beyond(container.with_options({"memory_mib": 256}), MEMORY_BOMB)
    assert isinstance(error, CodeError)
    if isinstance(error, CodeCrashed):  # the kernel killed the first process of the container
        assert error.out_of_memory
    else:
        assert "-9" in str(error)
    assert list(tmp_path.iterdir()) == []  # Podman's monitor (conmon) writes no file into the working directory


async def test_code_killed_for_memory_names_the_setting_to_raise(
    container: ContainerSandbox,
) -> None:
    error = await run_beyond(container.with_options({"memory_mib": 256}), KILLED)
    assert isinstance(error, CodeCrashed)
    assert error.out_of_memory
    assert "the kernel killed" in error.summary
    assert error.summary.endswith("give the sandbox more with `memory_mib` (it is 256)")


@pytest.mark.full
async def test_files_shared_memory_and_threads_are_limited(container: ContainerSandbox) -> None:
    for options, code, words in (
        ({"disk_mib": 16}, MANY_FILES, "No space left on device"),
        ({"memory_mib": 256}, IN_SHARED_MEMORY, "No space left on device"),
        ({"processes": 40}, THREADS, "can't start new thread"),
    ):
        assert words in str(await run_beyond(container.with_options(options), code))


@pytest.mark.full
@pytest.mark.alone
async def test_a_fork_bomb_ends_with_its_execution(container: ContainerSandbox) -> None:
    provider = container.with_options({"processes": 64, "cpus": 1})
    async with provider.interpreter(timeout=3) as interpreter:
        with pytest.raises(RlmBatchError):
            await interpreter.execute(FORK_BOMB)
        assert (await interpreter.execute(WORKS, timeout=60)).works


@pytest.mark.full
@pytest.mark.alone
async def test_busy_processes_get_only_the_containers_cpus(container: ContainerSandbox) -> None:
    provider = container.with_options({"cpus": 0.5})
    async with provider.interpreter() as interpreter:
        await interpreter.execute(WORKS)
        started = time.monotonic()
        with pytest.raises(ExecutionTimeout):
            await interpreter.execute(SPIN, timeout=4)
        used = await interpreter.execute(PROCESSOR_SECONDS)
        assert used.seconds < 0.5 * (time.monotonic() - started) + 1.5
