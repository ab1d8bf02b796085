"""Fixtures of the fault suite: a server, the stand-ins, and a process that starts flows."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import STANDINS
from ..infra.execution_counter import ExecutionCounter
from .faults import Daytona, Hosts, Local, Modal, Provider
from .stage import Stage

STANDIN_OF = {"daytona": "daytona", "modal": "modal_standin"}  # the fixtures


@pytest.fixture(scope="session")
def hosts(server: str) -> Iterator[Hosts]:
    """Start the process that flows' processes are forks of."""
    with Hosts(server, Path(tempfile.mkdtemp(prefix="chaos-"))) as hosts:
        STANDINS.add(hosts.pid)
        yield hosts


@pytest.fixture
def provider(request: pytest.FixtureRequest, hosts: Hosts) -> Provider:
    """Return the provider of the parametrized name, empty; fails a test that leaves a sandbox or a process."""
    standin = None if request.param == "local" else request.getfixturevalue(STANDIN_OF[request.param])
    request.getfixturevalue("no_process_left")
    return Local() if standin is None else Daytona(standin) if request.param == "daytona" else Modal(standin)


@pytest.fixture
def stage(provider: Provider, hosts: Hosts, server: str, counter: ExecutionCounter, tmp_path: Path) -> Stage:
    """Save a block of the provider, on which batches run."""
    return Stage(provider, hosts, server, counter, tmp_path)
