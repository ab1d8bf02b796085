"""An interrupt while a sandbox is set up: nothing is left at the provider, and the next run is set up."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..infra.waiting import HANG_SECONDS, wait_until
from ..standins.git_server import GitServer
from .conftest import COMMAND, Run, environment

CODE = """
import os
import wheel_of_a_set_up
from helper_of_the_repository import NAME
SUBMIT(name=NAME)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[GitServer]:
    server = GitServer(tmp_path / "served")
    yield server
    server.close()


@pytest.mark.full
@pytest.mark.requires("pip", "namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("part", ["clone", "wheel"])
@pytest.mark.parametrize("provider", ["daytona", "modal"])
def test_an_interrupted_set_up_leaves_nothing_and_the_next_run_is_set_up(
    run_alone: Run,
    tmp_path: Path,
    account: Callable[..., None],
    repository: GitServer,
    request: pytest.FixtureRequest,
    provider: str,
    part: str,
    number: int,
) -> None:
    account(provider)
    (tmp_path / "code.py").write_text(CODE)
    words = ["batch", "code.py", "--provider", provider, "--repo-url", repository.url, "--setup-snapshot", "always"]
    words += ["--packages", repository.add_wheel("wheel_of_a_set_up"), "--json"]
    repository.delays[part] = 3600.0
    process = subprocess.Popen(
        [COMMAND, *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: repository.downloads[part], "the set-up has begun")
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    if number != signal.SIGKILL:
        assert process.returncode == 130, errors
        assert "interrupted; the results so far are in" in errors
        assert "Traceback" not in errors
    else:
        done = run_alone("reap", "--provider", provider)
        assert done.returncode == 0, done.stderr
    assert list_leftovers(request, provider) == []
    repository.end_delays()  # Modal goes on with the build of an image.
    done = run_alone(*words)
    assert done.returncode == 0, done.stderr
    assert '"name": "main"' in done.stdout


def list_leftovers(request: pytest.FixtureRequest, provider: str) -> list[Any]:
    """Return the sandboxes and the snapshots at the provider."""
    if provider == "daytona":
        state = request.getfixturevalue("daytona").state()
        return [*state["sandboxes"], *state["snapshots"]]
    return [*request.getfixturevalue("modal_standin").ask("state")["sandboxes"]]
