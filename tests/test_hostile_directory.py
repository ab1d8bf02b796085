"""Tests that files of the working directory, which a model may have written, run only in sandboxes."""

import os
import sys
from pathlib import Path

from .infra.hostile_files import fill_with_hostile_files
from .infra.prefect_database import make_prefect_home
from .infra.programs import COMMAND, run_program


def test_a_batch_runs_no_file_of_the_working_directory(tmp_path: Path, no_process_left: None) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    mark = fill_with_hostile_files(folder)
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {
        "PREFECT_HOME": str(make_prefect_home(tmp_path / "home")),
        "RLM_BATCH_RESULTS": str(tmp_path / "results"),
        "PYTHONPATH": ":",  # Empty entries mean the working directory.
        "PATH": f":.:{os.environ['PATH']}",
    }
    # The user starts the command itself. The option -I makes this process ignore PYTHONPATH; its children inherit the
    # variable.
    command = [sys.executable, "-I", COMMAND, "batch", "calendar.py"]
    done = run_program(command, cwd=folder, env=environment)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr
    assert "ignored Prefect's settings in prefect.toml, .env, pyproject.toml of the working directory" in done.stderr
