"""Running the command as a person does, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("rlm-batch"))
Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(tmp_path: Path) -> dict[str, str]:
    """This process's, with a results root of the test's own."""
    return {**os.environ, "RLM_BATCH_RESULTS": str(tmp_path / "results"), "COLUMNS": "120"}


@pytest.fixture
def run(server: str, no_process_left: None, tmp_path: Path) -> Run:
    """Runs `rlm-batch` with these arguments in a directory of the test's own."""

    def call(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        command = [COMMAND, *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            **options,  # type: ignore[call-overload]
        )

    return call
