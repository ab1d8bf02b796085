"""Tests that an error caused by one of our limits names the option and its value, and that other errors do not."""

from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError, ContainerSandbox, LocalSandbox, PrepareError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation

from ..infra.requirements import mark_level

pytestmark = pytest.mark.anyio

HINTS = {
    "processes": "`processes` allows 40: have fewer processes and threads at a time, or set a higher `processes`",
    "open_files": "`open_files` allows 64: close files that are not needed, or set a higher `open_files`",
    "file_size_mib": "`file_size_mib` allows 5: write smaller files, or set a higher `file_size_mib`",
    "memory_mib": "`memory_mib` allows 4,096: work on less at a time, or set a higher `memory_mib`",
    "": "",
}
CODE = [
    ("processes", "import os, time\nfor _ in range(99):\n    os.fork() or time.sleep(1000)"),
    ("processes", "import subprocess\nall = [subprocess.Popen(['sleep', '1000']) for _ in range(99)]"),
    ("processes", "import _thread, time\nfor _ in range(99): _thread.start_new_thread(time.sleep, (99,))"),
    (
        "processes",
        """
        import subprocess
        try: all = [subprocess.Popen(["sleep", "1000"]) for _ in range(99)]
        except OSError as error: raise RuntimeError("no workers") from error
        """,
    ),
    ("memory_mib", "import mmap; mmap.mmap(-1, 8 << 30)"),
    ("open_files", "all = [open('/dev/null') for _ in range(99)]"),
    ("file_size_mib", "open('large', 'wb').write(bytes(6 << 20))"),
    ("", "import socket\none, other = socket.socketpair()\none.setblocking(False)\none.recv(1)"),
    ("", "raise RuntimeError('too many open files')"),
]  # fmt: skip

FULL_SHARED_MEMORY = """
import mmap
file = open("/dev/shm/full", "wb+")
file.truncate(1 << 30)
for place in range(0, 1 << 30, 1 << 20):
    mmap.mmap(file.fileno(), 1 << 20, offset=place)[:] = bytes(1 << 20)
"""


@pytest.fixture(params=[pytest.param(level, marks=mark_level(level)) for level in ("bubblewrap", "landlock")])
def limited(request: pytest.FixtureRequest) -> LocalSandbox:
    """Return the local provider with low limits."""
    return LocalSandbox(isolation=request.param, processes=40, open_files=64, file_size_mib=5, memory_mib=4096)


@pytest.mark.parametrize(("option", "code"), CODE)
async def test_an_error_names_the_limit_that_code_exceeded(limited: LocalSandbox, option: str, code: str) -> None:
    async with limited.interpreter() as interpreter:
        for context in (None, "stays"):
            with pytest.raises(CodeError) as failure:
                await interpreter.execute(dedent(code), context=context)
            assert failure.value.summary.partition(". ")[2] == HINTS[option]
        assert (await interpreter.execute("SUBMIT(1)")).output == 1


@pytest.mark.parametrize(
    "full",
    [
        pytest.param(LocalSandbox(memory_mib=256), marks=mark_level("bubblewrap")),
        pytest.param(
            ContainerSandbox(engine="podman", memory_mib=256), marks=[pytest.mark.requires("podman"), pytest.mark.full]
        ),
    ],
    ids=["local", "container"],
)
async def test_a_full_shared_memory_names_the_memory_limit(full: SandboxProvider) -> None:
    async with full.interpreter() as interpreter:
        with pytest.raises(CodeCrashed, match=r"killed by SIGBUS: .* `memory_mib` allows 256: keep less in /dev/shm"):
            await interpreter.execute(FULL_SHARED_MEMORY)


async def test_an_error_in_prepare_names_the_limit_that_was_exceeded(limited: LocalSandbox) -> None:
    preparation = Preparation("all = [open('/dev/null') for _ in range(99)]")
    with pytest.raises(PrepareError, match="`open_files` allows 64: close files"):
        await limited.interpreter(prepare=preparation).execute("1")
