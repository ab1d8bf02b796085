"""Output that fails or cannot be encoded: the command still exits with the status of its run."""

import json
import subprocess
from pathlib import Path

import pytest

from rlm_batch import Result
from rlm_batch.sandbox.meta import Meta

from .conftest import COMMAND, environment, write_run

HARD_TEXT = "✓ 😀\x9b\x7f\u2028\u202e\u2067"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a run whose code submitted text that is hard to print."""
    write_run(tmp_path / "results" / "first", [Result({"text": HARD_TEXT}, Meta(index=0))])
    return tmp_path


def run_shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command, in which `$rlm` is `rlm-batch`."""
    settings = {**environment(folder), "rlm": COMMAND, **variables}
    return subprocess.run(
        ["bash", "-c", command], env=settings, cwd=folder, capture_output=True, check=False, encoding="utf-8",
        errors="replace",
    )  # fmt: skip


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "variables", [{}, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}, ASCII, {"PYTHONOPTIMIZE": "2"}]
)
def test_unencodable_text_is_escaped_and_json_stays_valid(folder: Path, variables: dict[str, str]) -> None:
    table = run_shell('"$rlm" report results/first', folder, **variables)
    assert (table.returncode, "Traceback" in table.stderr) == (0, False)
    shown = "✓ 😀" if variables.keys() <= {"PYTHONOPTIMIZE"} else r"\u2713 \U0001f600"
    assert rf"{shown}\x9b\x7f\u2028\u202e\u2067" in table.stdout
    lines = run_shell('"$rlm" report results/first --json', folder, **variables)
    assert json.loads(lines.stdout)["outputs"] == {"text": HARD_TEXT}
    assert not set(lines.stdout) & set("\x9b\x7f\u2028\u202e\u2067")
    usage = run_shell('"$rlm" sweep --help', folder, **variables)
    assert (usage.returncode, "Submitted field that is least" in usage.stdout) == (0, True)


@pytest.mark.parametrize("redirection", [">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("output", ["", "--json"])
def test_a_full_or_closed_stream_fails_no_command(folder: Path, redirection: str, output: str) -> None:
    done = run_shell(f'"$rlm" report results/first {output} {redirection}', folder)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert ("standard output could not be written (No space left on device)" in done.stderr) == (
        redirection == ">/dev/full"
    )
    assert (HARD_TEXT[:3] in done.stdout or "\\u007f" in done.stdout) == redirection.startswith("2>")
    wrong = run_shell(f'"$rlm" report nothing {output} {redirection}', folder)
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
