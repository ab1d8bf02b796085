"""Containers that end with their host or lifetime, and `reap`, which removes only the project's containers."""

import asyncio
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from rlm_batch import ContainerSandbox, SandboxLost, SandboxStartError, reap
from rlm_batch.blocks.container.settings import DEFAULT_IMAGE
from rlm_batch.sandbox.errors import OutcomeUnknown

from ...infra.waiting import wait_until
from .conftest import list_names, run_podman

pytestmark = [pytest.mark.anyio, pytest.mark.requires("podman")]

HOST = """
import asyncio, sys
from rlm_batch.blocks.container.provider import ContainerProvider

CODE = "import time, subprocess; subprocess.Popen(['sleep', '1000']); print('runs', flush=True); time.sleep(1000)"

async def run_one(provider):
    async with provider.interpreter(timeout=None) as interpreter:
        await interpreter.execute(CODE, on_output=lambda _, text: print(text, end="", flush=True))

async def run_all(count):
    await asyncio.gather(*(run_one(ContainerProvider(engine="podman")) for _ in range(count)))

asyncio.run(run_all(int(sys.argv[1])))
"""


@pytest.fixture
def foreign() -> Iterator[str]:
    """Start a container of another program, with a name like the project's."""
    name = f"rlm-batch-{uuid.uuid4().hex[:16]}"
    words = ["run", "--detach", "--name", name, "--network", "none", "--log-driver", "none", "--label", "managed-by=me"]
    words += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    run_podman(*words, DEFAULT_IMAGE, "sleep", "1000")
    yield name
    run_podman("rm", "--force", "--time", "0", name)


def container_exists(name: str) -> bool:
    return name in run_podman("ps", "--all", "--format", "{{.Names}}").split()


def open_abandoned(label: str, value: str) -> str:
    """Start a container of the project that has no client."""
    name = f"rlm-batch-{uuid.uuid4().hex[:16]}"
    labels = {"managed-by": "rlm-batch", "rlm-batch-host": socket.gethostname(), label: value}
    words = ["run", "--detach", "--name", name, "--network", "none", "--log-driver", "none"]
    words += [word for item in labels.items() for word in ("--label", "=".join(item))]
    words += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    run_podman(*words, DEFAULT_IMAGE, "sleep", "1000")
    return name


@pytest.mark.full
async def test_a_killed_host_leaves_no_container_and_harms_no_other(container: ContainerSandbox, foreign: str) -> None:
    count = 5
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOST, str(count)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        for _ in range(count):
            assert await process.stdout.readline() == b"runs\n"
        assert len(await asyncio.to_thread(list_names, process.pid)) == count
    finally:
        process.kill()
        await process.wait()
    await asyncio.to_thread(wait_until, lambda: not list_names(process.pid))
    assert container_exists(foreign)


@pytest.mark.full
async def test_reap_deletes_only_our_expired_containers(server: str, container: ContainerSandbox, foreign: str) -> None:
    expired = open_abandoned("rlm-batch-expires", str(int(time.time()) - 10))
    running = open_abandoned("rlm-batch-expires", str(int(time.time()) + 600))
    try:
        assert {expired, running, foreign} & {*await reap("container", dry_run=True)} == {expired}
        assert container_exists(expired)
        assert {expired, running, foreign} & {*await reap("container")} == {expired}
        assert [container_exists(name) for name in (expired, running, foreign)] == [False, True, True]
        await container.delete_sandbox(foreign)  # a container of another program is not deleted
        assert container_exists(foreign)
        await container.delete_sandbox(running)
        assert not container_exists(running)
        await container.delete_sandbox(running)  # deleting a missing container is not an error
    finally:
        run_podman("rm", "--force", "--time", "0", "--ignore", expired, running)


async def test_a_container_ends_at_its_lifetime_without_its_host(container: ContainerSandbox) -> None:
    interpreter = container.with_options({"lifetime": 2}).interpreter(timeout=None)
    with pytest.raises((SandboxLost, OutcomeUnknown, SandboxStartError)):
        await interpreter.execute("import time; time.sleep(1000)")
    await asyncio.to_thread(wait_until, lambda: not list_names())
    await interpreter.shutdown()


async def test_killing_the_engines_client_loses_one_sandbox_and_the_next_works(
    container: ContainerSandbox, processes: Callable[[], dict[int, str]]
) -> None:
    has_begun = asyncio.Event()
    async with container.interpreter(tools={"begin": has_begun.set}) as interpreter:
        sleeping = asyncio.create_task(interpreter.execute("begin(); import time; time.sleep(1000)"))
        await has_begun.wait()
        name = interpreter.sandbox.id
        for pid, command in processes().items():
            if "podman run " in command and name in command:
                with suppress(ProcessLookupError):  # killing one process can end another
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises((OutcomeUnknown, SandboxLost, SandboxStartError)):
            await sleeping
    await asyncio.to_thread(wait_until, lambda: not container_exists(name))
    async with container.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(works=True)")).works


@pytest.mark.full
async def test_a_container_is_deleted_although_its_conmon_was_killed(
    container: ContainerSandbox,
) -> None:
    name = open_abandoned("rlm-batch-expires", str(int(time.time()) - 60))
    conmon = int(run_podman("inspect", "--format", "{{.State.ConmonPid}}", name))
    os.kill(conmon, signal.SIGKILL)
    await container.delete_sandbox(name)
    assert not container_exists(name)


@pytest.mark.full
async def test_cancelling_a_starting_container_leaves_no_container(container: ContainerSandbox) -> None:
    for seconds in (0.01, 0.1, 0.3):
        interpreter = container.interpreter(timeout=None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await interpreter.execute("import time; time.sleep(1000)")
        await interpreter.shutdown()
    await asyncio.to_thread(wait_until, lambda: not list_names())
