"""The deployments of prefect.yaml: on the server as they stand there, changed by nobody but a person, and runnable."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleUpdate, DeploymentUpdate
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, LocalSandbox
from rlm_batch.deployments.deploy import DeployReport, deploy, load_entries
from rlm_batch.deployments.server import WORK_POOL

from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
ACCOUNTS = ("daytona", "modal")
FLOWS = ("batch", "sweep", "chunks", "sequence", "rlm", "reap")
NAMES = [f"{entry['entrypoint'].rpartition('.')[2]}/{entry['name']}" for entry in load_entries()]
SHORT = ("batch/local", "sweep/local", "chunks/local", "sequence/local", "reap/local")
T = TypeVar("T")


def ask(question: Callable[[PrefectClient], Awaitable[T]]) -> T:
    """What a server answers."""

    async def call() -> T:
        async with get_client() as client:
            return await question(client)

    return asyncio.run(call())


@pytest.fixture(scope="module")
def deployed(server: str) -> DeployReport:
    return asyncio.run(deploy(reset=True, providers=ACCOUNTS))


def on_server() -> dict[str, dict[str, Any]]:
    """Each deployment, without what differs from one time of making it to the next."""

    async def read(client: PrefectClient) -> dict[str, dict[str, Any]]:
        found = {name: (await client.read_deployment_by_name(name)).model_dump(mode="json") for name in NAMES}
        for deployment in found.values():
            for name in ("updated", "version", "version_id", "version_info", "last_polled", "status"):
                deployment.pop(name, None)
            deployment["global_concurrency_limit"] = (deployment["global_concurrency_limit"] or {}).get("limit")
            for schedule in deployment["schedules"]:
                for name in ("id", "created", "updated"):
                    del schedule[name]
        return found

    return ask(read)


def different(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """The fields that are not the same, with both values."""
    return {
        f"{name}: {field}": (value, expected[name][field])
        for name, deployment in found.items()
        for field, value in deployment.items()
        if value != expected[name][field]
    }


def test_every_flow_has_a_deployment_for_this_machine(deployed: DeployReport) -> None:
    assert {*deployed.created, *deployed.updated} == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    assert {f"{flow}/local" for flow in FLOWS} <= set(NAMES)
    found = on_server()
    for name, deployment in found.items():
        assert deployment["description"], name
        assert "rlm-batch" in deployment["tags"], name
        assert deployment["enforce_parameter_schema"], name
        assert deployment["work_pool_name"] == WORK_POOL
    nightly = found["sweep/nightly"]["schedules"]
    assert [(schedule["active"], schedule["schedule"]["timezone"]) for schedule in nightly] == [(False, "Etc/UTC")]
    reaping = {name: found[name]["schedules"][0] for name in ("reap/local", "reap/daytona", "reap/modal")}
    assert [schedule["active"] for schedule in reaping.values()] == [True, False, False]
    assert {schedule["schedule"]["cron"] for schedule in reaping.values()} == {"*/15 * * * *"}
    assert found["sweep/nightly"]["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"


@pytest.mark.full
def test_templates_are_made_when_they_are_asked_for_and_internal_ones_are_tagged_also_where_they_were_before(
    deployed: DeployReport,
) -> None:
    templates = {name for name in NAMES if name.endswith(("/daytona", "/modal"))}

    async def go_back(client: PrefectClient) -> None:
        for name in templates - {"batch/modal"}:
            await client.delete_deployment((await client.read_deployment_by_name(name)).id)
        for name, tags in (("reap/local", ["rlm-batch", "local", "reap"]), ("shard/shards", ["mine"])):
            found = await client.read_deployment_by_name(name)
            await client.update_deployment(found.id, DeploymentUpdate(tags=tags))

    ask(go_back)
    done = asyncio.run(deploy())
    assert done.created == []
    assert {*done.updated} == {*NAMES} - templates | {"batch/modal"}  # one that is there is kept up to date
    with pytest.raises(ConfigurationError, match=r"no templates for 'local'.* daytona and modal"):
        asyncio.run(deploy(providers=["local"]))
    assert {*asyncio.run(deploy(providers=ACCOUNTS)).created} == templates - {"batch/modal"}
    found = on_server()
    assert "internal" in found["reap/local"]["tags"]
    assert found["shard/shards"]["tags"] == ["mine"]
    asyncio.run(deploy(work_pool="elsewhere", reset=True, providers=ACCOUNTS))
    assert {deployment["work_pool_name"] for deployment in on_server().values()} == {"elsewhere"}
    asyncio.run(deploy(reset=True, providers=ACCOUNTS))
    internal = {name for name, deployment in on_server().items() if "internal" in deployment["tags"]}
    assert internal == {"reap/local", "reap/daytona", "reap/modal", "shard/shards"}


@pytest.mark.full
def test_a_deployment_that_has_another_name_now_keeps_what_a_person_has_changed(deployed: DeployReport) -> None:
    changes = {"tags": ["mine"], "paused": True, "job_variables": {"env": {"X": "1"}}}

    async def go_back(client: PrefectClient) -> Any:
        new = await client.read_deployment_by_name("shard/shards")
        former = await client.create_deployment(new.flow_id, "batch-shard", work_pool_name=WORK_POOL, **changes)
        await client.delete_deployment(new.id)
        return (await client.create_flow_run_from_deployment(former)).id

    run = ask(go_back)
    assert asyncio.run(deploy()).created == ["shard/shards"]
    found = on_server()["shard/shards"]
    assert {name: found[name] for name in changes} == changes
    assert found["parameter_openapi_schema"]
    ask(lambda client: client.read_deployment_by_name("shard/batch-shard"))  # it has a run to come
    ask(lambda client: client.delete_flow_run(run))
    assert asyncio.run(deploy()).created == []
    with pytest.raises(ObjectNotFound):
        ask(lambda client: client.read_deployment_by_name("shard/batch-shard"))
    asyncio.run(deploy(reset=True))
    found = on_server()["shard/shards"]
    assert (found["paused"], found["job_variables"], "mine" in found["tags"]) == (False, {}, False)


@pytest.mark.full
def test_prefects_own_command_in_a_clone_makes_the_same(deployed: DeployReport) -> None:
    ours = on_server()
    command = [PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("successfully created") == len(NAMES)
    theirs = on_server()
    assert different(theirs, ours) == {}


@pytest.mark.full
def test_what_a_person_has_changed_is_kept_until_it_is_put_back(deployed: DeployReport) -> None:
    async def change(client: PrefectClient) -> None:
        found = await client.read_deployment_by_name("sweep/nightly")
        await client.update_deployment(
            found.id,
            DeploymentUpdate(
                parameters={**found.parameters, "max_workers": 7},
                tags=["mine"],
                concurrency_limit=3,
                entrypoint="rlm_batch.flows.of_an_old_version",
                schedules=[DeploymentScheduleUpdate(slug="nightly", active=True)],
            ),
        )

    before = on_server()
    ask(change)
    done = asyncio.run(deploy())
    assert done.created == []
    kept = on_server()["sweep/nightly"]
    assert kept["parameters"]["max_workers"] == 7
    assert kept["tags"] == ["mine"]
    assert kept["global_concurrency_limit"] == 3
    assert kept["schedules"][0]["active"] is True
    assert kept["schedules"][0]["schedule"]["cron"] == "0 2 * * *"
    assert kept["entrypoint"] == "rlm_batch.flows.sweep.sweep"
    asyncio.run(deploy(reset=True))
    assert different(on_server(), before) == {}


@pytest.mark.full
def test_parameters_that_this_version_does_not_take_are_one_sentence(deployed: DeployReport) -> None:
    async def change(client: PrefectClient) -> None:
        found = await client.read_deployment_by_name("batch/local")
        old = {"type": "object", "properties": {"max_workers": {"type": "string"}}}
        await client.update_deployment(
            found.id, DeploymentUpdate(parameters={"max_workers": "all"}, parameter_openapi_schema=old)
        )

    ask(change)
    with pytest.raises(ConfigurationError, match=r"batch/local has parameters that .* --reset") as refused:
        asyncio.run(deploy())
    assert "\n" not in str(refused.value)
    asyncio.run(deploy(reset=True))


@pytest.mark.full
def test_the_limits_of_saved_blocks_are_on_the_server(deployed: DeployReport) -> None:
    LocalSandbox(max_sandboxes=3, creations_per_second=0.5).save("limited-by-deploy", overwrite=True)

    async def forget(client: PrefectClient) -> None:
        await client.delete_global_concurrency_limit_by_name(name)

    async def read(client: PrefectClient) -> tuple[int, float]:
        sandboxes = await client.read_global_concurrency_limit_by_name(name)
        creations = await client.read_global_concurrency_limit_by_name(f"{name}.creations")
        return sandboxes.limit, creations.slot_decay_per_second

    name = "rlm-batch.local-sandbox.limited-by-deploy"
    try:
        with suppress(ObjectNotFound):
            ask(forget)
        assert "local-sandbox/limited-by-deploy" in asyncio.run(deploy()).limited_blocks
        assert ask(read) == (3, 0.5)
    finally:
        LocalSandbox.delete("limited-by-deploy")


def test_without_a_server_the_sentence_says_what_to_do(server: str) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(ConfigurationError) as refused:
        asyncio.run(deploy())
    assert "no Prefect server is configured" in str(refused.value)
    assert "rlm-batch up" in str(refused.value)
    url = "http://127.0.0.1:9/api"  # where nobody listens
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ConfigurationError) as refused:
        asyncio.run(deploy())
    assert f"the Prefect server at {url} does not answer" in str(refused.value)


def test_a_value_that_a_flow_would_refuse_makes_no_run_of_its_deployment(deployed: DeployReport) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "batch": {"timeout": 0},
        "sweep": {"direction": "upwards"},
        "chunks": {"on_failure": "ignore"},
        "sequence": {"retries": -1},
        "rlm": {"query": ""},
    }

    async def create(client: PrefectClient) -> None:
        for flow, parameters in wrong.items():
            found = await client.read_deployment_by_name(f"{flow}/local")
            with pytest.raises(PrefectHTTPStatusError, match=next(iter(parameters))):
                await client.create_flow_run_from_deployment(found.id, parameters=parameters)

    ask(create)


@pytest.mark.parametrize(
    "entry",
    [
        # The others start a stand-in or import what a model needs: a quarter of a minute of CPU together.
        pytest.param(entry, id=name, marks=[] if name in SHORT else pytest.mark.full)
        for name, entry in zip(NAMES, load_entries(), strict=True)
        if entry["parameters"]  # those of a shard come from its job, which makes its runs
    ],
)
def test_the_parameters_that_a_deployment_has_make_a_run_that_works(
    entry: dict[str, Any],
    server: str,
    openai: ChatServer,
    account: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they want an account or a model, a server here answers in its place."""
    account(entry["parameters"]["provider"])
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    openai.script = make_script(("", "SUBMIT(answer='the spider')"))
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    state = asyncio.run(flow(**entry["parameters"], return_state=True))
    assert state.is_completed(), state.message
