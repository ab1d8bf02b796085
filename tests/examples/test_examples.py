"""The examples, run from a terminal: their output must match the documentation."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.full
@pytest.mark.parametrize(("name", "text"), [("word_counts.py", "  the\n"), ("five_steps.py", "87178291200")])
def test_an_example_runs(
    name: str,
    text: str,
    server: str,
    volumes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert text in capsys.readouterr().out
