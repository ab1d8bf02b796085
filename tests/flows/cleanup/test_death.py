"""Failures of a flow's process, worker, server or disk, and their clean-up."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.deployments.runner import RunnerDeployment
from prefect.states import Cancelling

from rlm_batch import DaytonaSandbox, Failure, LocalSandbox, ModalSandbox, batch, reap
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.flows.child_process import build_module_command
from rlm_batch.flows.server.process import ServerProcess
from rlm_batch.tasks.ledger.ledger import Ledger

from ...infra.consent import move_home
from ...infra.listening import run_with_listener
from ...infra.logged_process import run_logged_process
from ...infra.prefect_database import make_prefect_home
from ...infra.programs import COMMAND, run_program
from ...infra.waiting import wait_until, wait_until_async
from ...standins.git_server import GitServer
from ..conftest import OutputListener

pytestmark = pytest.mark.anyio


def count_results(ledger: Path) -> int:
    """Return the number of results in a ledger."""
    return sum(part.read_bytes().count(b"\n") for part in ledger.glob("part-*"))


# ------------------------------------------------------------------------------------------------ signals and deadlines


TOLD_TO_END = """
import asyncio, os, signal
from rlm_batch import batch
from rlm_batch.blocks.local.handle import LocalSandboxHandle

remove = LocalSandboxHandle.remove

async def remove_when_told_to_end(sandbox):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    await remove(sandbox)

LocalSandboxHandle.remove = remove_when_told_to_end
asyncio.run(batch(["SUBMIT()"] * 20, provider="local:none", max_workers=2, log_output=False))
"""


@pytest.mark.usefixtures("server")
def test_a_script_terminated_during_a_deletion_completes_it(tmp_path: Path) -> None:
    """Prefect's signal handler raises an exception at any line of the program."""
    command = [sys.executable, "-c", TOLD_TO_END]
    done = run_program(command, cwd=tmp_path, timeout=500)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert list(Path(tempfile.gettempdir()).glob("rlm-batch-*")) == []
    assert "aborted by a termination signal" in done.stderr


@pytest.mark.full
async def test_a_deadline_leaves_no_sandbox(daytona: Any) -> None:
    code = ["import time; time.sleep(1000)"] * 3
    outcomes = await batch(code, provider="daytona", timeout=1000, deadline=10, on_failure="return")
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert daytona.state()["sandboxes"] == []


# ----------------------------------------------------------------------------------------------------- a process worker


@pytest.fixture
def worker(server: str, account: Callable[..., None], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process worker with a separate work pool, signed in to Daytona and Modal."""
    account("daytona", "modal")
    pool = f"pool-{uuid.uuid4().hex[:8]}"
    command = build_module_command("prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", pool)
    addresses = [os.environ["DAYTONA_API_URL"], os.environ["MODAL_SERVER_URL"]]
    consent = move_home(tmp_path / "user", allow_no_isolation=True, key_addresses=addresses)
    environment = os.environ | {"PREFECT_WORKER_QUERY_SECONDS": "1"} | consent
    with run_logged_process(command, tmp_path / "worker.log", cwd=tmp_path, env=environment) as process:
        process.pool = pool  # type: ignore[attr-defined]
        yield process


def list_engine_pids(processes: dict[int, str], run: FlowRun) -> list[int]:
    """Return the ids of a flow run's processes."""
    wanted = str(run.id).encode()
    engine_pids = [pid for pid, command in processes.items() if "prefect.engine" in command]
    of_run: list[int] = []
    for pid in engine_pids:
        with suppress(OSError):  # the process ended meanwhile
            if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                of_run.append(pid)
    return of_run


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_cancelled_or_killed_deployment_runs_leave_no_sandbox(
    worker: Any,
    daytona: Any,
    modal_standin: Any,
    processes: Callable[[], dict[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=worker.pool, type="process"))
        (tmp_path / "code").mkdir()
        monkeypatch.chdir(tmp_path / "code")  # each flow run gets a copy of the directory that it was deployed from
        deployment = RunnerDeployment.from_entrypoint(
            "rlm_batch.flows.batch.batch", name=worker.pool, work_pool_name=worker.pool
        )
        made: Any = deployment.apply()
        id_ = await made if asyncio.iscoroutine(made) else made
        local, remote = LocalSandbox(), DaytonaSandbox()

        async def begin(provider: str, code: str, **options: Any) -> FlowRun:
            parameters = {"code": [code] * 2, "provider": provider, "timeout": 1000, "provider_options": options}
            return await client.create_flow_run_from_deployment(id_, parameters=parameters)

        async def ids(block: SandboxProvider, run: FlowRun) -> set[str]:
            return {info.id for info in await block.list_sandboxes() if info.run == str(run.id)}

        async def open_in(block: SandboxProvider, run: FlowRun) -> None:
            async def are_open() -> bool:
                return len(await ids(block, run)) == 2

            await wait_until_async(are_open, timeout=200)

        async def ended(block: SandboxProvider, run: FlowRun, state: str) -> None:
            async def has_ended() -> bool:
                now = (await client.read_flow_run(run.id)).state
                return now is not None and now.name == state and not await ids(block, run)

            await wait_until_async(has_ended, f"{state}, and no sandbox left", timeout=300)

        forever = "import time; time.sleep(1000)"
        cancelled, killed = await begin("daytona", forever), await begin("daytona", forever)
        await open_in(remote, cancelled)
        await open_in(remote, killed)
        # The UI cancels a run in this way.
        await client.set_flow_run_state(cancelled.id, Cancelling())
        await ended(remote, cancelled, "Cancelled")
        assert len(await ids(remote, killed)) == 2
        (engine,) = list_engine_pids(processes(), killed)
        os.kill(engine, signal.SIGKILL)
        await ended(remote, killed, "Crashed")

        async def cancel_set_up(provider: str, block: SandboxProvider, part: str) -> None:
            repository = GitServer(tmp_path / f"served-{provider}-{part}")
            packages = [repository.add_wheel("wheel_of_a_set_up")]
            repository.delays[part] = 3600.0
            run = await begin(provider, forever, repo_url=repository.url, packages=packages, setup_snapshot="always")
            await wait_until_async(lambda: repository.downloads[part], f"{part} on {provider}", timeout=200)
            await client.set_flow_run_state(run.id, Cancelling())
            await ended(block, run, "Cancelled")
            repository.end_delays()  # Modal goes on with the build of an image.
            repository.close()

        for part in ("clone", "wheel"):
            await cancel_set_up("daytona", remote, part)
            await cancel_set_up("modal", ModalSandbox(), part)
        assert daytona.state()["snapshots"] == []
        assert not modal_standin.ask("state")["sandboxes"]

        # The worker's flow run continues without it, and `reap` does not remove sandboxes of a live process.
        orphan = await begin("local:none", forever)
        await open_in(local, orphan)
        (engine,) = list_engine_pids(processes(), orphan)
        worker.kill()
        worker.wait()
        assert await reap("local:none") == []
        assert len(await ids(local, orphan)) == 2
        os.kill(engine, signal.SIGKILL)
        await wait_until_async(lambda: engine not in processes())
        assert len(await reap("local:none")) == 2
        assert await ids(local, orphan) == set()


# ------------------------------------------------------------------------------------------------------------- a server


@pytest.mark.full
async def test_a_batch_survives_some_seconds_without_the_server(
    processes: Callable[[], dict[int, str]], results: Path
) -> None:
    (pid,) = [pid for pid, command in processes().items() if "rlm_batch.flows.server.app" in command]
    ledger, go = results / "here", results / "go"
    code = f"import os, time\nwhile x >= 4 and not os.path.exists({str(go)!r}): time.sleep(0.05)\nSUBMIT(x=x)"
    inputs = [{"x": x} for x in range(24)]
    running = asyncio.create_task(batch(code, inputs, provider="local:none", max_workers=2, results_path=str(ledger)))
    await wait_until_async(lambda: count_results(ledger) == 4)
    os.kill(pid, signal.SIGSTOP)
    try:
        go.touch()
        await wait_until_async(lambda: count_results(ledger) > 8)  # executions start and end meanwhile
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [result.x for result in await running] == list(range(24))


@pytest.mark.full
def test_losing_the_server_ends_the_command_and_keeps_results(
    tmp_path: Path,
) -> None:
    (tmp_path / "code.py").write_text(
        f"import os, time\nwhile x >= 4 and not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\nSUBMIT(x=x)"
    )
    (tmp_path / "in.csv").write_text("x\n" + "\n".join(map(str, range(20))))
    words = [COMMAND, "batch", "code.py", "--inputs", "in.csv", "--provider", "local:none", "--results-path", "here"]
    words += ["--timeout", "1000"]
    with ServerProcess.start(make_prefect_home(tmp_path / "home")) as first:
        environment = os.environ | {"PREFECT_API_URL": first.url, "PREFECT_HOME": str(tmp_path / "home")}
        command = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: count_results(tmp_path / "here") == 4)
            os.killpg(first.process.pid, signal.SIGKILL)
            (tmp_path / "go").touch()
            _, errors = command.communicate()
        finally:
            command.kill()
            command.wait()
    assert command.returncode == 2
    assert "the Prefect server failed during the run" in errors
    assert "run again with --results-path" in errors
    assert "Traceback" not in errors
    assert not list(Path(tempfile.gettempdir()).glob("rlm-batch-*"))
    assert count_results(tmp_path / "here") == 20  # executions need no server


# --------------------------------------------------------------------------------------------------------------- a disk


@pytest.fixture
async def small_disk(tmp_path: Path) -> AsyncIterator[Path]:
    """Return a file system of 256 KiB, or skip the test if it cannot mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = await asyncio.create_subprocess_exec(
        *("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)), stderr=asyncio.subprocess.PIPE
    )
    _, said = await mounted.communicate()
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {said.decode().strip()}")
    yield place
    await (await asyncio.create_subprocess_exec("umount", str(place))).wait()


@pytest.mark.full
async def test_a_full_disk_is_reported_and_the_batch_can_resume(
    small_disk: Path,
) -> None:
    code, inputs = "SUBMIT(x=x, text='y' * 20_000)", [{"x": x} for x in range(20)]
    ledger = small_disk / "ledger"

    async def run() -> Sequence[Any]:
        return await batch(code, inputs, provider="local:none", max_workers=2, results_path=str(ledger))

    with pytest.raises(OSError, match="No space left on device") as caught:
        await run()
    assert str(caught.value).startswith(
        f"a result could not be written to the ledger {ledger}: No space left on device."
    )
    kept = {
        line.data["variables"]["x"] if "variables" in line.data else line.data["index"]
        for line in Ledger(ledger).read_lines()
    }
    assert 8 <= len(kept) <= 12
    whole = [line for part in ledger.glob("part-*") for line in part.read_bytes().splitlines(keepends=True)]
    assert sum(line.endswith(b"\n") for line in whole) == len(kept)
    with pytest.raises(OSError, match="No space left on device"):
        await run()
    done = await asyncio.create_subprocess_exec("mount", "-o", "remount,size=4m", str(small_disk))
    assert await done.wait() == 0
    results = await run()
    assert [result.x for result in results] == list(range(20))
    lines = list(Ledger(ledger).read_lines())
    assert len(lines) == len({line.key for line in lines}) == 20  # no execution ran again after its result was written


@pytest.mark.full
async def test_a_second_run_on_one_ledger_gets_a_warning(
    results: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, go, output = str(results / "shared"), tmp_path / "go", OutputListener()
    code = f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    first = asyncio.create_task(
        run_with_listener(batch, output, [code], provider="local:none", results_path=place, timeout=1000)
    )
    await output.wait_for(1)
    await batch(["SUBMIT(1)"], provider="local:none", results_path=place)
    go.touch()
    await first
    warnings = [record.getMessage() for record in caplog.records if "another run is writing" in record.getMessage()]
    assert len(warnings) == 1
    caplog.clear()
    await batch(["SUBMIT(2)"], provider="local:none", results_path=place)
    assert "another run" not in caplog.text
