"""Fixtures for tests of Modal: blocks signed in to its stand-in, and a repository to clone."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from rlm_batch import ModalSandbox

from ...standins.git_server import GitServer


@pytest.fixture
def modal_sandbox(modal_standin: Any, no_process_left: None) -> Callable[..., ModalSandbox]:
    """Return a function that makes blocks signed in to Modal's stand-in. The function takes the block's fields."""
    hello = modal_standin.hello
    return partial(ModalSandbox, token_id=hello["token_id"], token_secret=hello["token_secret"])


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
