"""Fixtures of the fault tests: a server, the stand-ins, and a process that starts flows."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import STANDINS
from ..infra.execution_counter import ExecutionCounter
from .faults import Daytona, Hosts, Local, Modal, Provider
from .stage import Stage

STANDIN_OF = {"daytona": "daytona", "modal": "modal_standin"}  # provider names and fixtures


@pytest.fixture(scope="session")
def hosts(server: str) -> Iterator[Hosts]:
    """Start the process that forks a process for each flow run."""
    with Hosts(server, Path(tempfile.mkdtemp(prefix="chaos-"))) as hosts:
        STANDINS.add(hosts.pid)
        yield hosts


@pytest.fixture
def provider(request: pytest.FixtureRequest, hosts: Hosts) -> Provider:
    """Return the named provider without sandboxes; fail a test that leaves a sandbox or a process."""
    standin = None if request.param == "local" else request.getfixturevalue(STANDIN_OF[request.param])
    request.getfixturevalue("no_process_left")
    return Local() if standin is None else Daytona(standin) if request.param == "daytona" else Modal(standin)


@pytest.fixture
def stage(provider: Provider, hosts: Hosts, server: str, counter: ExecutionCounter, tmp_path: Path) -> Stage:
    """Return a stage with a saved block of the provider, which batches run on."""
    return Stage(provider, hosts, server, counter, tmp_path)
