"""Users without a home directory, as in a container with a custom user id: the error says which setting to change."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ..infra.prefect_database import make_prefect_home
from ..infra.programs import run_program
from .conftest import COMMAND


@pytest.mark.requires("bubblewrap")
def test_a_missing_home_is_a_one_sentence_error_with_working_fixes(tmp_path: Path) -> None:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    (tmp_path / "one.py").write_text("SUBMIT(x=1)")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "PREFECT_HOME", "PREFECT_API_URL", "XDG_DATA_HOME")
    }
    # The user has no entry in passwd, and can write only below tmp_path.
    words = [bwrap, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--ro-bind", "/dev/null", "/etc/passwd"]
    words += ["--bind", str(tmp_path), str(tmp_path), "--die-with-parent"]

    def run(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return run_program(
            [*words, COMMAND, *command], env={**environment, "TMPDIR": str(tmp_path), **settings}, cwd=tmp_path
        )

    batch = ("batch", "one.py", "--provider", "local:none", "--json")
    refused = run(*batch)
    assert refused.returncode == 2
    error_lines = refused.stderr.splitlines()
    assert error_lines[-1].startswith("rlm-batch: PREFECT_HOME is /")
    assert error_lines[-1].endswith("set HOME to a directory where it can, or PREFECT_HOME and RLM_BATCH_RESULTS")
    assert len(error_lines) == 2, error_lines  # the other line is the progress
    made = make_prefect_home(tmp_path / "home" / ".prefect")
    for remedy in ({"HOME": str(made.parent)}, {"PREFECT_HOME": str(made), "RLM_BATCH_RESULTS": str(tmp_path / "r")}):
        done = run(*batch, **remedy)
        assert done.returncode == 0, done.stderr
