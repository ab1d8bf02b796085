"""An environment whose modules are not compiled: the command says what to do, and that helps."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_batch.cli.bytecode import describe_missing_bytecode

PROGRAM = "from rlm_batch.cli.bytecode import describe_missing_bytecode as describe; print(describe())"


def describe(modules: Path, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(modules), **settings}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Return a directory with a package `prefect` that is not compiled."""
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "__init__.py").write_text("x = 1\n")
    return tmp_path


def test_modules_that_are_compiled_for_every_command_are_reported_with_a_working_fix(modules: Path) -> None:
    said = describe(modules, PYTHONDONTWRITEBYTECODE="1")
    assert "because PYTHONDONTWRITEBYTECODE is set: run this once" in said
    subprocess.run(shlex.split(said.partition("write there: ")[2]), check=True, timeout=60)
    assert describe(modules, PYTHONDONTWRITEBYTECODE="1") == "None"


def test_modules_that_python_will_compile_and_keep_are_not_reported(modules: Path) -> None:
    assert describe(modules) == "None"


def test_modules_in_a_directory_that_cannot_be_written_are_reported(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.delitem(sys.modules, "prefect", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr("os.access", lambda _path, _mode: False)  # Root can write everywhere.
    said = describe_missing_bytecode()
    assert said is not None
    assert f"because {modules} cannot be written: run this once" in said
