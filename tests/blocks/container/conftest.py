"""Fixtures for tests of containers: they run in Podman, from the tests' own image."""

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

# The part of `docker info` that the project reads.
DOCKER_INFO = {
    "ServerVersion": "28.2.2",
    "DefaultRuntime": "runc",
    "CgroupVersion": "2",
    "SecurityOptions": ["name=seccomp,profile=builtin", "name=cgroupns"],
    "KernelVersion": "of-a-virtual-machine",
}


@pytest.fixture
def container(no_container_left: None, no_process_left: None) -> ContainerSandbox:
    """Return the container provider with default settings, and fail the test if it leaves a container or a process."""
    provider = ContainerSandbox(engine="podman")
    asyncio.run(provider.check())
    return provider


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the only directory on PATH, for a test's own engines, and clear the cache of known engines."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(isolation_level, "_reasons", {})  # keep this test's results out of the cache for other tests
    before = dict(engine._engines)
    engine._engines.clear()
    yield folder
    engine._engines.clear()
    engine._engines.update(before)


def make_program(path: Path, text: str) -> None:
    """Write a shell script that acts as an engine's client."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make_docker(path: Path, info: dict[str, object], others: str) -> None:
    """Write a Docker client whose daemon reports `info`, and which runs `others` for every other command."""
    make_program(path, f"if [ \"$1\" = info ]; then echo '{json.dumps(info)}'; exit; fi\n{others}")


def list_names(pid: int | None = None) -> set[str]:
    """Return the names of the containers that a process opened, by default this process."""
    infos = asyncio.run(ContainerSandbox(engine="podman").list_sandboxes())
    return {info.id for info in infos if info.process.split(".")[2:3] == [str(pid or os.getpid())]}


def run_podman(*words: str) -> str:
    """Run Podman directly and return its output."""
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True, timeout=200).stdout
