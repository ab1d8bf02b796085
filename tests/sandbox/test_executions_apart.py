"""On an isolated level the executions of one sandbox cannot reach each other, nor their driver."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import LocalSandbox

from ..infra.requirements import mark_level

pytestmark = pytest.mark.anyio

ATTACKING = """
    import os, signal
    reached = []
    for pid in [os.getppid(), *pids]:
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(pid, number)
                reached.append(f"signal {number}")
            except OSError:
                pass
        for name in ("mem", "environ", "fd/3", "fd/4", "fd/10", "fd/11", "cwd", "root"):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                try:
                    fd = os.open(f"/proc/{pid}/{name}", flags)
                    if os.read(fd, 10) or os.write(fd, b"rubbish"):
                        reached.append(f"{name} of {pid}")
                except OSError:
                    pass
    SUBMIT(reached=reached)
"""


@pytest.mark.parametrize(
    "local", [pytest.param(level, marks=mark_level(level)) for level in ("landlock", "bubblewrap")], indirect=True
)
async def test_an_execution_reaches_no_other_and_not_the_driver(local: LocalSandbox) -> None:
    async with local.interpreter(timeout=20) as interpreter:
        begun: list[asyncio.Future[int]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
        code = "import os, time; print(os.getpid()); time.sleep(1); SUBMIT(fine=True)"
        waiting = [
            asyncio.ensure_future(
                interpreter.execute(code, context=context, on_output=lambda _, text, one=one: one.set_result(int(text)))
            )
            for one, context in zip(begun, (None, "c"), strict=True)
        ]
        pids = await asyncio.wait_for(asyncio.gather(*begun), 15)
        attack = await interpreter.execute(dedent(ATTACKING), {"pids": pids})
        assert attack.reached == []
        for result in await asyncio.gather(*waiting):
            assert result.fine
