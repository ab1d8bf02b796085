"""What a machine lacks is told by one skip for each thing, and no test that it can run is left out."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.requires("bubblewrap")
@pytest.mark.parametrize("number", range(5))
def test_of_bubblewrap(number):
    raise AssertionError

@pytest.mark.parametrize("level", [pytest.param("bubblewrap", marks=pytest.mark.requires("bubblewrap")), "none"])
def test_of_a_level(level):
    assert level == "none"

def test_of_a_browser(ui):
    raise AssertionError

@pytest.fixture
def ui():
    raise AssertionError
"""


def test_what_is_missing_is_one_skip_that_says_how_many_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is nothing
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "leave_out_tests = importlib.import_module('tests.infra.requirements').leave_out_tests\n"
        "def pytest_collection_modifyitems(config, items): leave_out_tests(config, items)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "1 passed, 2 skipped, 5 deselected" in done.stdout, done.stdout + done.stderr
    assert "6 tests: there is no bwrap here" in done.stdout
    assert "install bubblewrap" in done.stdout
    assert "1 tests: there is no chromium here" in done.stdout
