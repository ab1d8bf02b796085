"""Limits of a deployment's run on its worker's host: it may do only what the worker's file allows."""

import asyncio
import json
import os
import sys
import sysconfig
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem

from rlm_batch import ConfigurationError, LocalInterpreter, LocalSandbox, RunReport, batch, check
from rlm_batch.blocks import worker_policy
from rlm_batch.blocks.registry import resolve_provider
from rlm_batch.blocks.worker_consent import check_location
from rlm_batch.flows.inputs import host_paths
from rlm_batch.flows.inputs.host_paths import locate_ledger
from rlm_batch.flows.inputs.readers import build_chunks
from rlm_batch.flows.inputs.spilling import spill_long_parameters
from rlm_batch.flows.parameters import find_contents
from rlm_batch.flows.plans.batch import BatchParameters
from rlm_batch.flows.plans.rlm import RlmParameters
from rlm_batch.tasks.execution import Execution
from rlm_batch.tasks.ledger.result_index import get_results_root

from ..infra.consent import move_home
from ..infra.deployed import Deployed
from ..infra.git import commit_all
from ..infra.logged_process import run_logged_process
from ..infra.planning import plan_batch, plan_points, plan_steps
from ..infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

SECRET = "a-secret-of-the-host"
ALLOWED = "allowed_paths"


def read_context(path: str) -> str:
    """Return the context that the rlm flow would upload."""
    parameters = RlmParameters.parse({"query": "Which?", "language_model": "m", "context_file": path})
    plan = parameters.make_plan()
    ((code, variables),) = plan.items
    assert plan.find_uploads is not None
    (file,) = plan.find_uploads(Execution(0, code, variables, "")).values()
    return file.read().decode()


# The read that a flow makes for each parameter with a path.
READERS: dict[str, Callable[[str], Any]] = {
    "inputs": lambda path: plan_batch("SUBMIT(id)", path),
    "points": plan_points,
    "chunks": lambda path: list(build_chunks(path, None, None)),
    "data": lambda path: list(build_chunks(None, path, 2)),
    "code": lambda path: plan_batch(f"@{path}"),
    "steps": lambda path: plan_steps(f"@{path}"),
    "context_file": read_context,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a file of the host that every parameter could read."""
    path = tmp_path / "outside" / "file.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"id": SECRET, "data": 1}))
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    commit_all(folder)
    return folder


def assert_refused(read: Callable[[str], Any], path: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(path)
    assert ALLOWED in str(refused.value)
    assert SECRET not in str(refused.value)


# --------------------------------------------------------------------------------------------------------- no isolation


async def test_a_deployments_run_needs_its_workers_consent_to_disable_isolation(
    allow: Callable[..., None],
) -> None:
    run = await Deployed.made(code=["SUBMIT(y=1)"], provider="local:none")
    state = await run.execute()
    assert state.is_failed()
    assert "set allow_no_isolation = true in the worker's file (" in str(state.message)
    allow(allow_no_isolation=True)
    run = await Deployed.made(code=["SUBMIT(y=1)"], provider="local:none")
    state = await run.execute()
    assert state.is_completed(), state
    (result,) = await state.result()
    assert result.meta.isolation == "none"


SERVED = """
import sys
from prefect import flow
from rlm_batch import batch


@flow
async def mine(provider: str) -> None:
    await batch(["SUBMIT(y=1)"], provider=provider)


if __name__ == "__main__":
    mine.serve(sys.argv[1])
"""


@pytest.mark.full
async def test_a_served_user_flow_can_call_ours_and_needs_consent(tmp_path: Path) -> None:
    program, name = tmp_path / "served.py", f"served-{uuid.uuid4().hex[:8]}"
    program.write_text(SERVED)
    environment = {**os.environ, **move_home(tmp_path / "user"), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with run_logged_process([sys.executable, str(program), name], tmp_path / "log", env=environment):
        async with get_client() as client:

            async def find_deployment() -> DeploymentResponse | None:
                with suppress(ObjectNotFound):
                    return await client.read_deployment_by_name(f"mine/{name}")

            deployment = await wait_until_async(find_deployment)
            assert deployment is not None

            async def run(provider: str) -> State[Any]:
                run = await client.create_flow_run_from_deployment(deployment.id, parameters={"provider": provider})

                async def find_end() -> State[Any] | None:
                    state = (await client.read_flow_run(run.id)).state
                    return state if state is not None and state.is_final() else None

                state = await wait_until_async(find_end)
                assert state is not None
                return state

            assert (await run("local")).is_completed()
            assert "allow_no_isolation = true" in str((await run("local:none")).message)


@pytest.mark.usefixtures("as_worker")
async def test_saved_blocks_and_interpreters_cannot_disable_a_deployments_isolation() -> None:
    await LocalSandbox(isolation="none").save("consent-none", overwrite=True)  # type: ignore[misc]
    block = await resolve_provider("rlm-local-sandbox/consent-none")
    with pytest.raises(ConfigurationError, match="allow_no_isolation = true"):
        await block.open(block.labels(""))
    with (
        pytest.raises(ConfigurationError, match="allow_no_isolation = true"),
        LocalInterpreter(isolation="none") as interpreter,
    ):
        interpreter.execute("SUBMIT(y=1)")


# ---------------------------------------------------------------------------------------------------------- input files


@pytest.mark.usefixtures("as_worker")
def test_only_files_below_the_allowed_paths_are_read(outside: Path, allow: Callable[..., None]) -> None:
    text = outside.with_suffix(".txt")
    text.write_text(SECRET)
    paths = {name: str(text if name in ("code", "steps") else outside) for name in READERS}
    for name, read in READERS.items():
        assert_refused(read, paths[name])
    assert_refused(READERS["code"], f"file://{text}")
    allow(allowed_paths=["/nowhere", str(outside.parent)])
    for name, read in READERS.items():
        assert read(paths[name]), name


@pytest.mark.usefixtures("as_worker")
def test_a_pipe_does_not_block_the_run(tmp_path: Path, allow: Callable[..., None]) -> None:
    """Code may leave a pipe on a volume."""
    allow(allowed_paths=[str(tmp_path)])
    for name in ("inputs.jsonl", "inputs.csv"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ConfigurationError, match="no regular file"):
            READERS["inputs"](str(tmp_path / name))


@pytest.mark.usefixtures("as_worker")
def test_links_and_dots_are_resolved_before_a_path_is_checked(
    outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    allow(allowed_paths=[str(allowed)])
    (allowed / "link.jsonl").symlink_to(outside)
    (allowed / "folder").symlink_to(outside.parent)
    (tmp_path / "allowed-too").mkdir()  # its name starts with the name of the allowed directory
    (tmp_path / "allowed-too" / "file.jsonl").write_text(outside.read_text())
    for path in (
        allowed / "link.jsonl",
        allowed / "folder" / "file.jsonl",
        f"{allowed}/../outside/file.jsonl",
        f"/proc/self/root{outside}",
        tmp_path / "allowed-too" / "file.jsonl",
        f"{allowed}\0",
    ):
        assert_refused(READERS["inputs"], str(path))
    (allowed / "file.jsonl").write_text('{"id": 1}')
    (tmp_path / "way-in").symlink_to(allowed)
    assert READERS["inputs"](f"{tmp_path}/way-in/file.jsonl") == [("SUBMIT(id)", {"id": 1})]
    allow(allowed_paths=[f"{tmp_path}/way-in"])
    assert READERS["inputs"](f"{allowed}/file.jsonl") == [("SUBMIT(id)", {"id": 1})]
    # A relative directory would be below the run's working directory.
    allow(allowed_paths=["."])
    monkeypatch.chdir(allowed)
    assert_refused(READERS["inputs"], "file.jsonl")


@pytest.mark.usefixtures("as_worker")
@pytest.mark.parametrize("name", ["inputs", "code"])
def test_a_directory_replaced_by_a_link_after_its_check_is_refused(
    name: str, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
) -> None:
    """On a volume, code can replace a directory by a link in this way, while a run reads the directory."""
    allow(allowed_paths=[str(tmp_path / "allowed")])
    folder = tmp_path / "allowed" / "folder"
    folder.mkdir(parents=True)
    (folder / "file.jsonl").write_text('{"id": "mine"}')
    check_path, seen = host_paths.check_path, list[Path]()

    def exchange_after(path: Path, **options: Any) -> Path:
        real = check_path(path, **options)
        seen.append(real)
        if len(seen) == 1:
            folder.rename(tmp_path / "moved")
            folder.symlink_to(outside.parent)
        return real

    monkeypatch.setattr(host_paths, "check_path", exchange_after)
    with pytest.raises(ConfigurationError) as refused:
        READERS[name](str(folder / "file.jsonl"))
    assert SECRET not in str(refused.value)
    assert len(seen) == 1


@pytest.mark.usefixtures("as_worker")
def test_files_spilled_by_our_command_are_allowed() -> None:
    lines = [{"x": "x" * 1000, "number": number} for number in range(400)]
    values = {"code": "#" * 300_000, "inputs": lines}
    short = spill_long_parameters(values, find_contents(BatchParameters))
    assert values == {name: getattr(BatchParameters.parse(short), name) for name in short}
    os.remove(short["inputs"].removeprefix("@"))
    with pytest.raises(ConfigurationError, match=r"`inputs` cannot be read: .*No such file"):
        BatchParameters.parse(short)


@pytest.mark.usefixtures("as_worker")
def test_other_files_are_not_taken_for_spilled_ones(outside: Path, results: Path) -> None:
    def read(path: str) -> Any:
        return BatchParameters.parse({"code": "SUBMIT(id)", "inputs": f"@{path}"})

    long_inputs = [{"x": "x" * 300_000}]
    reference = spill_long_parameters({"inputs": long_inputs}, find_contents(BatchParameters))["inputs"]
    spilled = Path(reference.removeprefix("@"))
    assert spilled.parent == results / "inputs"
    link, elsewhere = spilled.with_name(f"{'0' * 24}.json"), outside.parent
    link.symlink_to(outside)
    (elsewhere / spilled.name).write_text(outside.read_text())
    (spilled.parent / ("1" * 24)).mkdir()
    for path in (link, elsewhere / spilled.name, spilled.parent / ("1" * 24) / spilled.name):
        assert_refused(read, str(path))
    other = spilled.with_name("x.json")
    other.write_text(outside.read_text())
    for path in (str(other), f"{spilled}/.."):
        assert_refused(READERS["code"], path)
    if os.geteuid() == 0:
        os.chown(spilled, 12345, 12345)
        assert_refused(read, str(spilled))


# ------------------------------------------------------------------------------------------------------------ locations


@pytest.mark.usefixtures("as_worker")
def test_a_location_cannot_reach_the_hosts_files_or_network(outside: Path) -> None:
    for url in (
        "file://{path}",
        "FILE://{path}",
        "local://{path}",
        "asynclocal://{path}",
        "memory://x.jsonl::file://{path}",
        "s3://bucket/x.jsonl::file://{path}",
        "s3://bucket/x.jsonl::{path}",
        "zip://x.jsonl::{path}",
        "reference://x.jsonl::{path}",
        "dir://x.jsonl::file://{path}",
        "simplecache://{path}",
        "git://{path}",
        "http://127.0.0.1:1/x.jsonl",
        "https://127.0.0.1:1/x.jsonl",
    ):
        assert_refused(READERS["inputs"], url.format(path=outside))
        assert_refused(READERS["code"], url.format(path=outside))
        assert_refused(locate_ledger, url.format(path=outside.parent))  # type: ignore[arg-type]


@pytest.mark.usefixtures("as_worker")
def test_a_store_is_not_a_path_of_the_host() -> None:
    with fsspec.open("memory://bucket/x.jsonl", "w") as file:
        file.write('{"id": 1}')  # type: ignore[union-attr]
    assert READERS["inputs"]("memory://bucket/x.jsonl") == [("SUBMIT(id)", {"id": 1})]
    with pytest.raises(ConfigurationError, match="is not a location: write a text such as"):
        READERS["inputs"]("simplecache::memory://bucket/x.jsonl")


@pytest.mark.usefixtures("as_worker", "server")
async def test_a_storage_block_cannot_bypass_the_allowed_paths(outside: Path, allow: Callable[..., None]) -> None:
    name = f"consent-{uuid.uuid4().hex[:8]}"
    folder = str(outside.parent)
    blocks: dict[str, Any] = {
        f"{name}-local": LocalFileSystem(basepath=folder),
        f"{name}-protocol": RemoteFileSystem(basepath=f"memory://x/..{folder}", settings={"protocol": "file"}),
        f"{name}-chain": RemoteFileSystem(basepath="memory://x"),
        f"{name}-program": RemoteFileSystem(basepath="sftp://x/y", settings={"proxy_command": "touch /tmp/x"}),
    }
    for saved, block in blocks.items():
        await block.save(saved)
    for url in (
        f"block://local-file-system/{name}-local/file.jsonl",
        f"block://remote-file-system/{name}-protocol/file.jsonl",
        f"block://remote-file-system/{name}-chain/x.jsonl::file://{outside}",
        f"block://remote-file-system/{name}-program/file.jsonl",
    ):
        with pytest.raises(ConfigurationError, match=ALLOWED):
            await asyncio.to_thread(READERS["inputs"], url)
    allow(allowed_paths=[folder])
    assert await asyncio.to_thread(READERS["inputs"], f"block://local-file-system/{name}-local/file.jsonl")


@pytest.mark.usefixtures("as_worker")
def test_credentials_of_the_worker_for_a_store_go_only_to_named_addresses(allow: Callable[..., None]) -> None:
    own, elsewhere = "https://storage.example", "https://evil.example"
    allow(key_addresses=[own])
    for scheme, setting in (("gs", "endpoint_url"), ("hf", "endpoint"), ("az", "account_host")):
        check_location("block://x", f"{scheme}://bucket/x", {setting: own})
        with pytest.raises(ConfigurationError, match=f"does not send its credentials for {scheme} to {elsewhere}"):
            check_location("block://x", f"{scheme}://bucket/x", {setting: elsewhere})
    for scheme, setting in (("s3", "endpoint_url"), ("oss", "endpoint")):  # a request has only a signature
        check_location("block://x", f"{scheme}://bucket/x", {setting: elsewhere})


# ----------------------------------------------------------------------------------------------------- results, volumes


async def test_a_deployments_run_writes_results_only_where_allowed(results: Path, tmp_path: Path) -> None:
    run = await Deployed.made(code=["SUBMIT(y=1)"], results_path=str(tmp_path / "elsewhere"))
    state = await run.execute()
    assert state.is_failed()
    assert ALLOWED in str(state.message)
    assert not (tmp_path / "elsewhere").exists()
    run = await Deployed.made(code=["SUBMIT(y=1)"], provider="local", results_path=str(results / "mine"))
    state = await run.execute()
    assert state.is_completed()
    assert list((results / "mine").glob("part-*"))
    # The server has a reference to the run's report, and no file has it: code may replace a file, which Prefect would
    # unpickle. Here the caller gets the flow's return value.
    assert not list(get_results_root().rglob("result-*"))
    async with get_client() as client:
        stored = (await client.read_flow_run(run.run.id)).state
    assert stored is not None
    report = await stored.aresult()
    assert isinstance(report, RunReport)
    assert ([result.y for result in report.results], report.results_path) == ([1], str(results / "mine"))
    assert [result.y for result in await state.aresult()] == [1]


async def test_a_deployment_judges_only_runs_in_allowed_places(results: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"flow": check, "check": "SUBMIT(passed=submitted['y'] == 1)"}
    await batch(["SUBMIT(y=1)"], results_path=str(results / "mine"))
    run = await Deployed.made(run=str(results / "mine"), **options)
    state = await run.execute()
    assert state.is_completed(), state.message
    assert [result.passed for result in await state.aresult()] == [True]
    await batch(["SUBMIT(y=1)"], results_path=str(tmp_path / "elsewhere"))
    (record,) = (tmp_path / "elsewhere").glob("run-*.json")
    record.write_text(record.read_text().replace('"version": 1', '"version": 99'))  # Reading it would be an error.
    for place in ("elsewhere", "missing"):
        run = await Deployed.made(run=str(tmp_path / place), **options)
        state = await run.execute()
        assert state.is_failed()
        assert f"this worker does not let deployments use {tmp_path / place}" in str(state.message)


@pytest.mark.usefixtures("as_worker")
def test_results_are_written_below_the_results_root_or_allowed_paths(
    results: Path, tmp_path: Path, allow: Callable[..., None]
) -> None:
    results.mkdir()
    (results / "link").symlink_to(tmp_path)
    elsewhere = str(tmp_path / "elsewhere")
    for path in (elsewhere, f"file://{elsewhere}", f"{results}/link/elsewhere", f"{results}/../elsewhere"):
        with pytest.raises(ConfigurationError, match=ALLOWED):
            locate_ledger(path)
    assert locate_ledger(str(results / "mine")) == results / "mine"
    allow(allowed_paths=[elsewhere])
    assert locate_ledger(f"file://{elsewhere}/mine") == tmp_path / "elsewhere" / "mine"


@pytest.mark.usefixtures("as_worker")
async def test_volumes_are_below_the_workers_root_or_allowed_paths(
    tmp_path: Path, volumes: Path, allow: Callable[..., None]
) -> None:
    root = tmp_path / "elsewhere"
    block = LocalSandbox(volume_name="v", volume_root=str(root))
    with pytest.raises(ConfigurationError, match=ALLOWED):
        await block.open(block.labels(""))
    from_options = await resolve_provider("local", {"volume_name": "v", "volume_root": str(root)})
    with pytest.raises(ConfigurationError, match=ALLOWED):
        await from_options.open(from_options.labels(""))
    assert not root.exists()
    for name in ("../elsewhere", "a/b", "/etc", ".."):
        with pytest.raises(ConfigurationError, match="is not the name of a volume: use at most 100"):
            await (await resolve_provider("local")).volume(name)
    below = await LocalSandbox(volume_root=str(volumes / "mine")).volume("v")
    assert below.path == volumes / "mine" / "v"  # type: ignore[attr-defined]
    allow(allowed_paths=[str(tmp_path)])
    assert (await block.volume()).path == root / "v"  # type: ignore[attr-defined]
    # The worker's own processes run or unpickle files in these directories.
    site_packages = Path(sysconfig.get_path("purelib"))
    allow(allowed_paths=["/"])
    policy = worker_policy.MACHINE_FILE.parent
    for path in (site_packages, site_packages.parent, Path.home(), get_results_root() / "run", policy, policy.parent):
        with pytest.raises(ConfigurationError, match="the worker's own files"):
            await LocalSandbox(volume_root=str(path.parent)).volume(path.name)


@pytest.mark.usefixtures("as_worker")
async def test_a_link_that_code_left_is_not_a_volume(tmp_path: Path, volumes: Path) -> None:
    host = tmp_path / "host"
    host.mkdir(mode=0o755)
    (volumes / "v").mkdir(parents=True)
    (volumes / "v" / "link").symlink_to(host)
    block = LocalSandbox(volume_name="link", volume_root=str(volumes / "v"))
    with pytest.raises(ConfigurationError, match=ALLOWED):
        await block.open(block.labels(""))
    with pytest.raises(ConfigurationError, match=ALLOWED):
        await block.volume()
    assert host.stat().st_mode & 0o7777 == 0o755


@pytest.mark.usefixtures("as_worker")
async def test_a_repository_on_the_host_needs_the_workers_consent(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
) -> None:
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    for url in (
        str(repository),
        f"file://{repository}",
        f"file://host{repository}",  # git ignores the host
        f"file://{tmp_path}/%72epository",  # git decodes the path
        f"ext::cat {repository}",
    ):
        for ref in (None, "0" * 40):
            block = LocalSandbox(repo_url=url, repo_ref=ref)
            with pytest.raises(ConfigurationError, match=ALLOWED):
                await block.open(block.labels(""))
    allow(allowed_paths=[str(repository)])
    assert len(await LocalSandbox(repo_url=f"file://{tmp_path}/%72epository").commit() or "") == 40
    for url in ("https://127.0.0.1:1/x", "git@127.0.0.1:x"):  # remote URLs, not paths
        with pytest.raises(ConfigurationError, match="git ls-remote failed"):
            await LocalSandbox(repo_url=url).commit()
