"""Ways to run the command: in this process, which is fast, or in a new process, as a user does."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.cli.main import main
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import RunRecord

from ..infra.programs import COMMAND, run_program

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(tmp_path: Path) -> dict[str, str]:
    """Return this process's environment, with a results root for the test."""
    return {**os.environ, "RLM_BATCH_RESULTS": str(tmp_path / "results"), "COLUMNS": "120"}


def write_run(path: Path, outcomes: list[Outcome], flow: str = "batch", **record: Any) -> None:
    """Write a ledger with those outcomes, as the flow run `quick-fox` would leave it."""
    ledger = Ledger(path)
    ledger.create()
    for outcome in outcomes:
        ledger.write_outcome(f"{outcome.meta.index:064x}", outcome)
    ledger.close()
    RunRecord(flow, str(path), "id-of-run", "quick-fox", total=len(outcomes), began=1.7e9, **record).finish()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the results root of `run`, and set the URL of a server that does not answer."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return tmp_path / "results"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `rlm-batch` in the test's directory and returns its output and status."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
        monkeypatch.setenv("COLUMNS", "120")
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(words)
        printed = capfd.readouterr()
        return subprocess.CompletedProcess(words, int(end.value.code or 0), printed.out, printed.err)

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Return a function that checks that the command refuses its arguments, and returns the error sentence."""

    def call(*arguments: object) -> str:
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr.startswith("rlm-batch: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    return call


@pytest.fixture
def run_alone(server: str, no_process_left: None, tmp_path: Path) -> Run:
    """Return a function that runs the command as `run` does, but in a new process."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_program([COMMAND, *arguments], cwd=tmp_path, **{"env": environment(tmp_path), **options})

    return call
