"""Containers for tests: those of Podman, from the tests' own image."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_batch import ContainerSandbox
from rlm_batch.blocks.container import engine
from rlm_batch.blocks.local import isolation_level

# What Docker says of itself, as far as it is read.
DOCKER_INFO = {
    "ServerVersion": "28.2.2",
    "DefaultRuntime": "runc",
    "CgroupVersion": "2",
    "SecurityOptions": ["name=seccomp,profile=builtin", "name=cgroupns"],
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
    "KernelVersion": "of-a-virtual-machine",
}


@pytest.fixture
def container(no_container_left: None, no_process_left: None) -> ContainerSandbox:
    """The provider of containers, with its usual settings; fails a test that leaves one, or a process."""
    provider = ContainerSandbox(engine="podman")
    asyncio.run(provider.check())
    return provider


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that PATH consists of, where a test puts the engines that there are; none has been asked yet."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(isolation_level, "_reasons", {})  # what is found there is not for other tests
    before = dict(engine._engines)
    engine._engines.clear()
    yield folder
    engine._engines.clear()
    engine._engines.update(before)


def make_program(path: Path, text: str) -> None:
    """A shell script, which is an engine's client."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make_docker(path: Path, info: dict[str, object], others: str) -> None:
    """A client of Docker's, whose daemon says that of itself; `others` is what its other commands do."""
    make_program(path, f"if [ \"$1\" = info ]; then echo '{json.dumps(info)}'; exit; fi\n{others}")


def list_names(pid: int | None = None) -> set[str]:
    """The names of the containers that a process has opened, by default this one: other tests run beside."""
    infos = asyncio.run(ContainerSandbox(engine="podman").list_sandboxes())
    return {info.id for info in infos if info.process.split(".")[2:3] == [str(pid or os.getpid())]}


def run_podman(*words: str) -> str:
    """What Podman prints, here without us."""
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True, timeout=200).stdout
