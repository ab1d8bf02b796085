"""The choice of an engine: the installed engine that answers, or an error that says what to do."""

import json
import os
import sys
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError, ContainerSandbox
from rlm_batch.blocks.container.engine import find_engine
from rlm_batch.blocks.registry import make_unsaved_provider
from rlm_batch.cli.doctor import doctor

from .conftest import DOCKER_INFO, make_docker, make_program

PATH = os.environ["PATH"]

pytestmark = pytest.mark.anyio

NO_DAEMON = 'echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock." >&2; exit 1'


async def test_a_client_without_a_daemon_is_not_an_engine(programs: Path) -> None:
    make_program(programs / "docker", NO_DAEMON)
    with pytest.raises(ConfigurationError, match="podman: it is not on the PATH; docker: Cannot connect to the Docker"):
        await find_engine("auto")
    make_docker(programs / "docker", {"ServerErrors": ["the daemon is away"]}, "exit 1")
    with pytest.raises(ConfigurationError, match="the daemon is away"):
        await find_engine("docker")
    make_docker(programs / "docker", {**DOCKER_INFO, "SecurityOptions": ["name=rootless"]}, "exit 1")
    assert (await find_engine("auto")).is_rootless  # an engine that failed before is tried again


async def test_the_engine_that_answers_is_chosen(programs: Path) -> None:
    make_program(programs / "podman", "echo 'Error: cannot re-exec process' >&2; exit 125")
    make_docker(programs / "docker", DOCKER_INFO, "exit 1")
    engine = await find_engine("auto")
    assert engine.name == "docker"
    assert (engine.version, engine.runtime, engine.is_rootless, engine.is_local) == ("28.2.2", "runc", False, False)
    with pytest.raises(ConfigurationError, match="podman: cannot re-exec process"):
        await find_engine("podman")


async def test_a_client_called_docker_may_be_podman(programs: Path) -> None:
    host = {"ociRuntime": {"name": "crun"}, "cgroupVersion": "v2", "serviceIsRemote": True}
    info = {"host": {**host, "security": {"rootless": True}}, "version": {"Version": "5.0.0"}}
    make_docker(programs / "docker", info, "exit 1")
    engine = await find_engine("auto")
    assert engine.name == "podman"
    assert (engine.version, engine.runtime, engine.is_rootless, engine.is_local) == ("5.0.0", "crun", True, False)


async def test_a_providers_name_may_include_the_engine() -> None:
    provider = make_unsaved_provider("container:docker")
    assert isinstance(provider, ContainerSandbox.__mro__[1])
    assert provider.engine == "docker"  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"unknown provider 'container:lxc': use one of "):
        make_unsaved_provider("container:lxc")


@pytest.mark.requires("podman")
async def test_a_sandbox_runs_with_dockers_command_line(
    no_container_left: None, no_process_left: None, programs: Path
) -> None:
    """Check that both engines know all options: Podman runs the commands, and answers `info` as Docker does."""
    # Podman without root's rights may not be able to set its own default limits.
    podman = 'case $1 in run) shift; set -- run --ulimit nproc=1024:1024 "$@" ;; esac; exec podman "$@"'
    make_docker(programs / "docker", DOCKER_INFO, f"export PATH={PATH}; {podman}")
    provider = ContainerSandbox(engine="docker", environment={"HTTP_PROXY": "http://own"})  # type: ignore[arg-type]
    async with provider.interpreter() as interpreter:
        assert interpreter.sandbox.isolation == "docker"
        assert (await interpreter.execute("import os; SUBMIT(p=os.environ['HTTP_PROXY'])")).p == "http://own"
        await interpreter.upload("a/file", b"data")
        assert await interpreter.sandbox.download("a/file") == b"data"
        name = interpreter.sandbox.id
        assert name in [info.id for info in await provider.list_sandboxes()]
    assert name not in [info.id for info in await provider.list_sandboxes()]


def test_doctor_lists_the_engines_with_their_kind(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_program(programs / "podman", NO_DAEMON.replace("Docker", "Podman"))
    make_docker(programs / "docker", DOCKER_INFO, '[ "$1" = ps ] || exit 1')
    assert doctor(json=True) == 0
    rows = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["container, docker"]["works"]
    assert "docker 28.2.2 (with root's rights, runc, cgroup v2)" in rows["container, docker"]["details"]
    assert "is pulled when the first sandbox is opened" in rows["container, docker"]["details"]
    assert not rows["container, podman"]["works"]
    assert "Cannot connect" in rows["container, podman"]["details"]


@pytest.mark.requires("podman")
def test_doctor_starts_a_container_if_the_image_exists(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(json=True)
    rows = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    details = rows["container, podman"]["details"]
    assert f"with Python {'.'.join(map(str, sys.version_info[:3]))}" in details
    assert "for a sandbox as a whole: memory_mib, processes, disk_mib" in details
