"""Running the command as a person does, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.cli.main import QUIET_PREFECT, main

from ..conftest import STANDINS
from ..infra.bound_process import start_bound_process
from ..infra.machine import list_descendants

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("rlm-batch"))
Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(tmp_path: Path) -> dict[str, str]:
    """This process's, with a results root of the test's own."""
    return {**os.environ, "RLM_BATCH_RESULTS": str(tmp_path / "results"), "COLUMNS": "120"}


@pytest.fixture(scope="session")
def kept(server: str) -> Iterator[subprocess.Popen[str]]:
    """The process that commands are forked from."""
    kept = Path(__file__).with_name("fork_server.py")
    process = start_bound_process(
        [sys.executable, str(kept)],
        env={**QUIET_PREFECT, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    STANDINS.update((process.pid, *list_descendants(process.pid)))
    yield process
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.fixture
def run(kept: subprocess.Popen[str], no_process_left: None, tmp_path: Path) -> Run:
    """Runs `rlm-batch` with these arguments in a directory of the test's own, in a process of its own."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        assert kept.stdin is not None
        assert kept.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "stdout", Path(folder) / "stderr"
            request = {
                "arguments": arguments,
                "cwd": str(tmp_path),
                "environment": environment(tmp_path),
                "stdout": str(out),
                "stderr": str(err),
            }
            kept.stdin.write(json.dumps(request) + "\n")
            kept.stdin.flush()
            status = int(kept.stdout.readline())
            return subprocess.CompletedProcess(["rlm-batch", *arguments], status, out.read_text(), err.read_text())

    return call


@pytest.fixture
def run_alone(server: str, no_process_left: None, tmp_path: Path) -> Run:
    """The same from the very start, imports and settings included."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *arguments],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            **options,
        )

    return call


@pytest.fixture
def refused(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The one sentence of a command that is used wrongly. It runs in this process, for that is quick."""

    def call(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(os, "environ", environment(tmp_path))  # the command adds to it
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        assert left.value.code == 2
        said = capfd.readouterr().err
        (sentence,) = [line for line in said.splitlines() if line.startswith("rlm-batch: ")]
        assert "Traceback" not in said
        return sentence

    return call
