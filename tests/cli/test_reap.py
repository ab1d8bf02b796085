"""`rlm-batch reap`, as a user calls it."""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_batch.blocks.provider import SandboxInfo
from rlm_batch.blocks.registry import PROVIDERS

from ..infra.programs import run_program
from ..infra.waiting import wait_until
from ..standins.mount_namespace import make_command
from .conftest import COMMAND, Run, environment

pytestmark = pytest.mark.usefixtures("server", "no_process_left")


def test_reap_lists_then_deletes_sandboxes_and_reports_the_cost(run: Run) -> None:
    left = Path(tempfile.gettempdir()) / "rlm-batch-0123456789ab"
    (left / "work").mkdir(parents=True)
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    would = run("reap", "--dry-run")
    assert would.returncode == 0, would.stderr
    assert [line.split() for line in would.stdout.splitlines()[:2]] == [
        ["sandbox", "host", "why"],
        [left.name, "its", "host", "has", "died"],
    ]
    here = f"local on {socket.gethostname()}"
    assert f"1 sandbox of {here} would be removed, after 0 sandbox seconds (of 1 it is not known)" in would.stdout
    assert left.exists()
    done = run("reap", "--json")
    assert f"1 sandbox of {here} removed" in done.stderr
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert (line["sandbox"], line["reason"]) == (left.name, "its host has died")
    assert not left.exists()


@pytest.mark.full
@pytest.mark.requires("namespaces")
@pytest.mark.usefixtures("running_daytona", "modal_process")  # starts before processes are counted
@pytest.mark.parametrize("provider", ["daytona", "modal"])
def test_reap_deletes_sandboxes_of_a_process_killed_on_the_same_machine(
    provider: str, account: Callable[..., None], run: Run, tmp_path: Path
) -> None:
    account(provider)

    def list_sandboxes() -> list[SandboxInfo]:
        return asyncio.run(PROVIDERS[provider].load_provider()().list_sandboxes())

    (tmp_path / "slow.py").write_text("import time; time.sleep(3600)")
    words = ["--provider", provider, "--timeout", "3600", "--max-workers", "2"]
    reap = ["reap", "--provider", provider]
    # A simulated machine: in its PID namespace, the killed process's id can belong to another process.
    elsewhere = make_command([COMMAND, *reap], [("bind", "/", "/"), ("proc", "/proc")], str(tmp_path))
    batch = [COMMAND, "batch", "slow.py", "slow.py", *words]
    with subprocess.Popen(batch, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: len(list_sandboxes()) == 2, "two sandboxes")
            done = run(*reap)
            assert "left: 2 sandboxes of flow run " in done.stderr
            assert "whose process is alive on this machine" in done.stderr
            assert len(list_sandboxes()) == 2
        finally:
            process.kill()
    other = run_program(elsewhere, env=environment(tmp_path))
    assert other.returncode == 0, other.stderr
    assert f"no unused sandboxes of {provider}\n" in other.stdout
    assert "`--older-than SECONDS` removes those of silent runs" in other.stderr
    assert len(list_sandboxes()) == 2
    done = run(*reap)
    assert f"2 sandboxes of {provider} removed" in done.stdout
    assert done.stdout.count("its process has ended") == 2
    assert list_sandboxes() == []
