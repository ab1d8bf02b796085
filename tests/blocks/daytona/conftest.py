"""The local Daytona of each test, and a repository to clone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ...infra.waiting import wait_until_async
from ...standins.git_server import GitServer


@pytest.fixture(autouse=True)
def standin(running_daytona: object, no_process_left: None, daytona: Any) -> Any:
    """Gives each test the local Daytona, which was there before processes are counted."""
    return daytona


@pytest.fixture
def wait_for_call(standin: Any) -> Callable[..., Any]:
    """Waits until a call has come so many times, while tasks go on that must not end before."""

    async def wait(call: str, times: int = 1) -> None:
        await wait_until_async(lambda: standin.state()["counts"].get(call, 0) >= times, f"{times} times {call}")

    return wait


@pytest.fixture(scope="session")
def git_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    server = GitServer(tmp_path_factory.mktemp("repositories"))
    yield server
    server.close()


@pytest.fixture
def repository(git_server: GitServer) -> GitServer:
    """A repository that wants no token."""
    git_server.token = None
    return git_server
