"""The examples, run from a terminal: their output must match the documentation."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.full
def test_the_word_counts_example_prints_the_most_frequent_words(
    server: str,
    volumes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "word_counts.py"), run_name="__main__")
    assert "  the\n" in capsys.readouterr().out
