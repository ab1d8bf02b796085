"""The deployments of prefect.yaml: the server has them as written, keeps users' changes, and can run them."""

import asyncio
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleUpdate, DeploymentUpdate
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError
from rlm_batch.deployments.deploy import WORK_POOL, deploy, load_entries

from ..infra.programs import run_program
from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer
from .conftest import ask

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
FLOWS = ("rlm-batch", "rlm-sweep", "rlm-chunks", "rlm-sequence", "rlm-query", "rlm-reap")
NAMES = [f"{load_flow_from_entrypoint(entry['entrypoint']).name}/{entry['name']}" for entry in load_entries()]
SHORT = ("rlm-batch/local", "rlm-sweep/local", "rlm-chunks/local", "rlm-sequence/local", "rlm-reap/local")


@pytest.fixture(scope="module")
def deployed(server: str) -> list[str]:
    return list(asyncio.run(deploy()))


def on_server() -> dict[str, dict[str, Any]]:
    """Return each deployment, without the fields that change each time it is created."""

    async def read(client: PrefectClient) -> dict[str, dict[str, Any]]:
        deployments = {name: (await client.read_deployment_by_name(name)).model_dump(mode="json") for name in NAMES}
        for deployment in deployments.values():
            for name in ("updated", "version", "version_id", "version_info", "last_polled", "status"):
                deployment.pop(name, None)
            deployment["global_concurrency_limit"] = (deployment["global_concurrency_limit"] or {}).get("limit")
            for schedule in deployment["schedules"]:
                for name in ("id", "created", "updated"):
                    del schedule[name]
        return deployments

    return ask(read)


def test_every_flow_has_a_deployment_for_this_machine(deployed: list[str]) -> None:
    assert deployed == NAMES
    assert len(set(NAMES)) == len(NAMES)
    assert {f"{flow}/local" for flow in FLOWS} <= set(NAMES)
    for name, deployment in on_server().items():
        assert deployment["description"], name
        assert deployment["enforce_parameter_schema"], name
        assert deployment["work_pool_name"] == WORK_POOL


@pytest.mark.full
def test_prefects_deploy_command_creates_the_same_deployments(deployed: list[str]) -> None:
    ours = on_server()
    command = [PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
    done = run_program(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("successfully created") == len(NAMES)
    assert on_server() == ours


@pytest.mark.full
def test_a_users_changes_are_kept_until_the_deployment_is_deleted(deployed: list[str]) -> None:
    async def change(client: PrefectClient) -> UUID:
        deployment = await client.read_deployment_by_name("rlm-sweep/nightly")
        await client.update_deployment(
            deployment.id,
            DeploymentUpdate(
                parameters={**deployment.parameters, "max_workers": 7},
                tags=["mine"],
                concurrency_limit=3,
                entrypoint="rlm_batch.flows.of_an_old_version",
                schedules=[DeploymentScheduleUpdate(slug="nightly", active=True)],
            ),
        )
        return deployment.id

    asyncio.run(deploy())  # Prefect's command gives deployments another version.
    deployed_id = ask(change)
    asyncio.run(deploy())
    kept = on_server()["rlm-sweep/nightly"]
    assert kept["parameters"]["max_workers"] == 7
    assert kept["tags"] == ["mine"]
    assert kept["global_concurrency_limit"] == 3
    assert kept["schedules"][0]["active"] is True
    assert kept["schedules"][0]["schedule"]["cron"] == "0 2 * * *"
    assert kept["entrypoint"] == "rlm_batch.flows.sweep.sweep"
    ask(lambda client: client.delete_deployment(deployed_id))
    asyncio.run(deploy())
    assert on_server()["rlm-sweep/nightly"]["global_concurrency_limit"] == 1


def test_a_missing_server_is_an_error_with_the_fix(server: str) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(ConfigurationError) as refused:
        asyncio.run(deploy())
    assert "no Prefect server is configured" in str(refused.value)
    assert "rlm-batch up" in str(refused.value)


def test_an_invalid_value_starts_no_run_of_a_deployment(deployed: list[str]) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "rlm-batch": {"timeout": 0},
        "rlm-sweep": {"direction": "upwards"},
        "rlm-chunks": {"on_failure": "ignore"},
        "rlm-sequence": {"retries": -1},
        "rlm-query": {"query": ""},
    }

    async def create(client: PrefectClient) -> None:
        for flow, parameters in wrong.items():
            deployment = await client.read_deployment_by_name(f"{flow}/local")
            with pytest.raises(PrefectHTTPStatusError, match=next(iter(parameters))):
                await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    ask(create)


@pytest.mark.parametrize(
    "entry",
    [
        # The others import the packages of a model, or repeat one of these.
        pytest.param(entry, id=name, marks=[] if name in SHORT else pytest.mark.full)
        for name, entry in zip(NAMES, load_entries(), strict=True)
        if entry["parameters"]  # a job sets the parameters of its shards
    ],
)
def test_a_run_with_the_default_parameters_of_a_deployment_succeeds(
    entry: dict[str, Any],
    server: str,
    openai: ChatServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A local server replaces the model."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    openai.script = make_script(("", "SUBMIT(answer='the spider')"))
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    state = asyncio.run(flow(**entry["parameters"], return_state=True))
    assert state.is_completed(), state.message
