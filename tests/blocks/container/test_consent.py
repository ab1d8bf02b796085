"""What may be asked of containers, and what a deployment's run may ask of them on its worker's host."""

import uuid
from typing import Any

import pytest
from pydantic import ValidationError

from rlm_batch import ConfigurationError, ContainerSandbox, batch
from rlm_batch.blocks.container.creation import check_consent

from ...infra.podman.store import name_image

pytestmark = pytest.mark.anyio


NAMES = ["python", "python:3.13-slim", "docker.io/library/python:3", "host:5000/a/b:1", "a@sha256:" + "0" * 64]
PLACES = [
    "/etc",
    "dir:/etc",
    "dir:etc",
    "docker-archive:a.tar",
    "oci:layout",
    "docker://python",
    "--rootfs",
    "",
    "../a",
]


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' process has the environment that a worker starts a flow run with, and that allows nothing."""
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))


@pytest.mark.parametrize("image", NAMES)
def test_an_image_is_a_name(image: str) -> None:
    assert ContainerSandbox(image=image).image == image


@pytest.mark.parametrize("image", PLACES)
def test_what_leads_to_the_hosts_files_is_no_image(image: str) -> None:
    with pytest.raises(ValidationError, match="is no name of an image"):
        ContainerSandbox(image=image)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"disk_mib": 2000}, "a container's files are in its memory"),
        ({"packages": ["a @ https://host/a.whl"]}, "names a place"),
        ({"packages": "environment"}, "local sandboxes alone"),
        ({"runtime": "/usr/bin/env"}, "runtime"),
        ({"processes": 5000}, "processes"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ContainerSandbox(**fields)


@pytest.mark.parametrize("name", ["engine", "runtime"])
def test_a_run_names_neither_the_engine_nor_its_runtime(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is no option of a single run"):
        ContainerSandbox().with_options({name: "docker"})


@pytest.mark.requires("podman")
@pytest.mark.usefixtures("as_worker")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"network": True}, "this worker gives containers no network"),
        ({"runtime": "bash"}, "do not name the runtime 'bash'"),
        ({"volume_name": "a", "volume_root": "/etc"}, "this worker does not let runs of deployments use /etc"),
        ({"repo_url": "/srv/repository"}, "this worker does not let runs of deployments use"),
    ],
)
async def test_a_deployments_run_needs_its_workers_consent(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        await ContainerSandbox(**fields).open({})


@pytest.mark.requires("podman")
@pytest.mark.usefixtures("as_worker")
async def test_packages_for_an_image_of_the_runs_own_need_it_too(container: ContainerSandbox) -> None:
    provider = container.with_options({"image": name_image(), "packages": ["a-shape"]})
    with pytest.raises(ConfigurationError, match="packages for an image of the run's own"):
        await provider.open({})


@pytest.mark.usefixtures("as_worker")
def test_with_the_workers_consent_containers_may_have_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="RLM_BATCH_ALLOW_NETWORK=1"):
        check_consent(ContainerSandbox(network=True))
    monkeypatch.setenv("RLM_BATCH_ALLOW_NETWORK", "1")
    check_consent(ContainerSandbox(network=True, runtime="runsc"))


@pytest.mark.requires("podman")
@pytest.mark.usefixtures("server", "no_process_left")
async def test_a_flow_runs_in_containers_with_the_options_of_its_run(
    container: ContainerSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"memory_mib": 256, "disk_mib": 32}
    path = tmp_path_factory.mktemp("results")
    code = "import os; SUBMIT(y=x + 1, room=os.statvfs('/tmp').f_blocks * os.statvfs('/tmp').f_frsize)"
    results = await batch(
        code, inputs=[{"x": 1}, {"x": 2}], provider="container:podman", provider_options=options, results_path=str(path)
    )
    assert [(result.y, result.room, result.meta.isolation) for result in results] == [
        (2, 32 << 20, "podman"),
        (3, 32 << 20, "podman"),
    ]
