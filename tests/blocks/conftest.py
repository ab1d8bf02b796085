"""Fixtures for tests of several providers: a repository to clone."""

from collections.abc import Iterator

import pytest

from ..standins.git_server import GitServer


@pytest.fixture(scope="session")
def git_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    server = GitServer(tmp_path_factory.mktemp("repositories"))
    yield server
    server.close()


@pytest.fixture
def repository(git_server: GitServer) -> GitServer:
    """Return a git server whose repository needs no token."""
    git_server.token = None
    git_server.downloads.clear()
    return git_server
