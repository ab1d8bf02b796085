"""Container settings that are always refused, and settings that need the worker's consent in a deployment's run."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from rlm_batch import ConfigurationError, ContainerSandbox
from rlm_batch.blocks.container.creation import check_consent

from ...infra.podman.store import name_image

pytestmark = pytest.mark.anyio

NAMES = ["python", "python:3.13-slim", "docker.io/library/python:3", "host:5000/a/b:1", "a@sha256:" + "0" * 64]
PLACES = [
    "/etc", "dir:/etc", "dir:etc", "docker-archive:a.tar", "oci:layout", "docker://python", "--rootfs", "", "../a",
]  # fmt: skip


def test_an_image_is_a_name_and_never_a_path() -> None:
    for image in NAMES:
        assert ContainerSandbox(image=image).image == image
    for image in PLACES:
        with pytest.raises(ValidationError, match="is not the name of an image"):
            ContainerSandbox(image=image)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"disk_mib": 1 << 44}, "disk_mib"),
        ({"packages": ["a @ https://host/a.whl"]}, "is not the name of a package"),
        ({"packages": "environment"}, "works only in local sandboxes"),
        ({"runtime": "/usr/bin/env"}, "runtime"),
        ({"processes": 5000}, "processes"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ContainerSandbox(**fields)


def test_a_run_cannot_choose_the_engine_or_its_runtime() -> None:
    for name in ("engine", "runtime"):
        with pytest.raises(ConfigurationError, match=f"{name} cannot be set for one run"):
            ContainerSandbox().with_options({name: "docker"})


@pytest.mark.requires("podman")
@pytest.mark.usefixtures("as_worker")
async def test_a_deployments_run_needs_its_workers_consent(
    container: ContainerSandbox, allow: Callable[..., None]
) -> None:
    own_image = container.with_options({"image": name_image(), "packages": ["a-shape"]})
    for provider, words in (
        (ContainerSandbox(network=True), "this worker gives containers no network.*allow_network = true"),
        (ContainerSandbox(runtime="bash"), "may not choose the runtime 'bash'"),
        (ContainerSandbox(volume_name="a", volume_root="/etc"), "does not let deployments use /etc"),
        (ContainerSandbox(repo_url="/srv/repository"), "does not let deployments use"),
        (own_image, "to install packages"),
        (ContainerSandbox(setup="true"), "to run setup"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            await provider.open({})
    allow(allow_network=True)
    check_consent(ContainerSandbox(network=True, runtime="runsc"))
