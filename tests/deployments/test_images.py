"""Deployments in work pools that start containers: each has an image, or none is made."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.slugify import slugify
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from rlm_batch.cli.main import main
from rlm_batch.flows.sharding.work_pool import SHARD_DEPLOYMENT

from .conftest import ask
from .test_deploy import NAMES

OWN = "rlm-batch/own"
OWN_COMMAND = ("batch", "code.py", "--name", "own", "--work-pool")
TEMPLATE = json.loads((Path(__file__).resolve().parents[2] / "deployments" / "kubernetes.json").read_text())
Answer = tuple[int, str, str]


class ManifestConfiguration(BaseJobConfiguration):
    """The part of prefect-kubernetes's configuration that Prefect fills from a pool's template."""

    job_manifest: dict[str, Any]


def read_job_variables(name: str) -> dict[str, Any]:
    return ask(lambda client: client.read_deployment_by_name(name)).job_variables or {}


def list_deployments() -> set[str]:
    """Return those of our deployments that the server has."""
    existing: set[str] = set()
    for name in (*NAMES, OWN):
        with suppress(ObjectNotFound):
            ask(lambda client: client.read_deployment_by_name(name))  # noqa: B023 - called at once
            existing.add(name)
    return existing


def delete_deployments() -> None:
    for name in list_deployments():
        deployment = ask(lambda client: client.read_deployment_by_name(name))  # noqa: B023 - called at once
        ask(lambda client: client.delete_deployment(deployment.id))  # noqa: B023 - called at once


@pytest.fixture
def command(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Answer]]:
    """Yield a function that runs `rlm-batch deploy` on a server without our deployments."""
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text("SUBMIT(y=1)\n")

    def run(*words: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            main(["deploy", *words])
        assert isinstance(end.value.code, int)
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    delete_deployments()
    yield run
    delete_deployments()


def create_pool(kind: str, template: dict[str, Any] | None = None) -> str:
    """Create a work pool as Prefect's command does, with the default template of its type, and return its name."""
    name = f"images-{slugify(kind)}"

    async def create(client: PrefectClient) -> None:
        own = template or await get_default_base_job_template_for_infrastructure_type(kind)
        assert own is not None
        await client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=own), overwrite=True)

    ask(create)
    return name


@pytest.mark.parametrize("kind", ["kubernetes", "docker", "ecs", "cloud-run-v2"])
def test_no_deployment_is_made_without_an_image_where_runs_are_containers(
    kind: str, command: Callable[..., Answer]
) -> None:
    pool = create_pool(kind)
    for words in (("--work-pool", pool), (*OWN_COMMAND, pool)):
        status, out, err = command(*words)
        assert (status, out) == (2, "")
        assert f"rlm-batch deploy --work-pool {pool} --image IMAGE" in err
        assert err.count("\n") == 1
    assert list_deployments() == set()


def test_all_deployments_of_a_pool_get_the_image_and_keep_other_job_variables(command: Callable[..., Answer]) -> None:
    pool = create_pool("kubernetes")
    status, out, err = command("--work-pool", pool, "--image", "registry.example/rlm-batch:1")
    assert status == 0, err
    assert "with this package installed" not in out  # A Kubernetes worker only starts pods.
    for name in NAMES:
        assert read_job_variables(name) == {"image": "registry.example/rlm-batch:1"}, name

    status, out, err = command(*OWN_COMMAND, pool)
    assert status == 0, err
    assert f"Run it now: prefect deployment run {OWN} --watch" in out
    assert read_job_variables(OWN) == {"image": "registry.example/rlm-batch:1"}

    async def set_memory(client: PrefectClient) -> None:
        for name in (SHARD_DEPLOYMENT, OWN):
            deployment = await client.read_deployment_by_name(name)
            variables = {**(deployment.job_variables or {}), "memory_limit": "4Gi"}
            await client.update_deployment(deployment.id, DeploymentUpdate(job_variables=variables))

    ask(set_memory)
    status, _, err = command("--work-pool", pool)  # An upgrade without a new image is no error.
    assert status == 0, err
    assert read_job_variables(SHARD_DEPLOYMENT)["image"] == "registry.example/rlm-batch:1"
    for words in (("--work-pool", pool, "--image", "registry.example/rlm-batch:2"), (*OWN_COMMAND, pool)):
        status, _, err = command(*words)
        assert status == 0, err
    for name in (SHARD_DEPLOYMENT, OWN):
        assert read_job_variables(name) == {"image": "registry.example/rlm-batch:2", "memory_limit": "4Gi"}


def test_an_image_for_a_pool_of_processes_or_a_missing_pool_is_refused(command: Callable[..., Answer]) -> None:
    pool = create_pool("process")
    status, _, err = command("--work-pool", pool, "--image", "x")
    assert (status, err.partition(": ")[2]) == (
        2,
        f"work pool {pool!r} takes no image from deployments: omit --image\n",
    )
    status, _, err = command("--work-pool", "no-such-pool", "--image", "x")
    for other_deployments in (False, True):
        status, _, err = command("--work-pool", "no-such-pool", "--image", "x")
        assert (status, err) == (2, "rlm-batch: Work pool 'no-such-pool' not found.\n")
        if not other_deployments:
            assert list_deployments() == set()
            command("--work-pool", pool)


def test_runs_change_nothing_of_our_template_for_pods(
    command: Callable[..., Answer],
) -> None:
    pool = create_pool("kubernetes")
    assert command("--work-pool", pool, "--image", "registry.example/rlm-batch:1")[0] == 0
    create_pool("kubernetes", TEMPLATE)  # The pool is closed later.
    status, _, err = command("--work-pool", pool)
    assert status == 0, err
    assert read_job_variables(SHARD_DEPLOYMENT) == {}

    async def start(client: PrefectClient) -> None:
        deployment = await client.read_deployment_by_name("rlm-batch/local")
        run = await client.create_flow_run_from_deployment(deployment.id)
        await client.delete_flow_run(run.id)
        with pytest.raises(PrefectHTTPStatusError, match="'image' was unexpected"):
            await client.create_flow_run_from_deployment(deployment.id, job_variables={"image": "another"})

    ask(start)
    wanted = {"image": "another", "env": {"RLM_BATCH_RESULTS": "/etc"}, "command": "sh", "namespace": "kube-system"}

    async def render(client: PrefectClient) -> ManifestConfiguration:
        base = (await client.read_work_pool(pool)).base_job_template
        return await ManifestConfiguration.from_template_and_values(base, wanted, client=client)

    configuration = ask(render)
    assert configuration.env == {}
    assert configuration.command is None
    pod = configuration.job_manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example/rlm-batch:1"
    assert configuration.job_manifest == TEMPLATE["job_configuration"]["job_manifest"]
    # Prefect starts a drained pod's run again only with this limit. It requires the pod's other two fields.
    assert configuration.job_manifest["spec"]["backoffLimit"] == 0
    assert (pod["parallelism"], pod["completions"], pod["terminationGracePeriodSeconds"]) == (1, 1, 60)
