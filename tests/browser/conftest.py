"""Fixtures for tests in a browser: a Chromium on a Prefect server with the deployments and a worker."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_batch.flows.child_process import build_module_command

from .chromium import Chromium

POOL = "rlm-batch"


@pytest.fixture(scope="session")
def ui(server: str) -> str:
    """Return the address of the UI."""
    return server.removesuffix("/api")


@pytest.fixture
def page(ui: str) -> Iterator[Chromium]:
    """Return a new browser."""
    with Chromium(1280, 900) as browser:
        yield browser


@pytest.fixture(scope="module")
def served(ui: str, server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a worker that serves rlm-sweep/local, and return its results root."""
    folder = tmp_path_factory.mktemp("served")
    environment = {
        **os.environ,
        "PREFECT_API_URL": server,
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "RLM_BATCH_RESULTS": str(folder / "results"),
    }
    command = str(Path(sys.executable).with_name("rlm-batch"))
    done = subprocess.run([command, "deploy"], env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (folder / "worker.log").open("w")
    worker = subprocess.Popen(
        build_module_command("prefect", "worker", "start", "--pool", POOL, "--type", "process"),
        env=environment,
        cwd=folder,
        stdout=log,
        stderr=log,
    )
    try:
        yield folder / "results"
    finally:
        worker.terminate()
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        log.close()


def sandboxes() -> list[str]:
    """Return the names of these tests' open local sandboxes."""
    return [path.name for path in Path(tempfile.gettempdir()).glob("rlm-batch-*")]
