"""The cookbook's recipes that need pytest, a schedule or workers."""

import asyncio
import shlex
import sys
from pathlib import Path

import pytest
from prefect.client.schemas.schedules import CronSchedule

from rlm_batch.cli.commands import app
from rlm_batch.deployments.deploy import deploy

from ..deployments.conftest import ask
from ..infra.consent import move_home
from ..infra.programs import run_program
from ..infra.workers import Worker, wait_until_online
from .pages import blocks, commands
from .test_programs import write_files

PAGE = "docs/cookbook.md"


def read_command(start: str, word: str) -> list[str]:
    """Return the words of the page's command that starts so and contains the word, without the program's name."""
    (line,) = [line for line in commands(PAGE) if line.startswith(f"rlm-batch {start}") and word in line]
    return shlex.split(line)[1:]


def run_command(words: list[str]) -> None:
    assert app(words, exit_on_error=False, result_action="return_value") in (None, 0)


def test_the_tests_of_the_recipe_pass_in_pytest(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("python") if block.page == PAGE and "def test_" in block.text]
    (tmp_path / "test_mine.py").write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = run_program(command, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_nightly_sweep_has_its_schedule(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    asyncio.run(deploy())
    run_command(read_command("deploy", "--cron"))
    deployment = ask(lambda client: client.read_deployment_by_name("rlm-sweep/nightly-lr"))
    ask(lambda client: client.delete_deployment(deployment.id))
    assert deployment.parameters["grid"] == {"lr": [0.1, 0.01], "seed": [0, 1, 2]}
    (schedule,) = deployment.schedules
    assert isinstance(schedule.schedule, CronSchedule)
    assert schedule.schedule.cron == "0 2 * * *"


@pytest.mark.full
def test_a_worker_runs_the_shards(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    asyncio.run(deploy())
    words = [word.replace("/mnt", str(tmp_path)) for word in read_command("batch", "--shards")]
    allowed = move_home(tmp_path / "user", allowed_paths=[str(tmp_path)])
    with Worker(tmp_path / "machine", server, "worker-of-the-cookbook", limit=3, environment=allowed) as worker:
        asyncio.run(wait_until_online(worker.name))
        run_command(words)
    assert "2 of 2 executions succeeded" in capsys.readouterr().err
