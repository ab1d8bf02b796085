"""Tests that the project's files agree: the workflow, and the names in CONTRIBUTING.md."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_workflow_runs_all_checks_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["verdict"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    supported = SpecifierSet(PROJECT["requires-python"])
    assert job["strategy"]["matrix"]["python"] == [f"3.{n}" for n in range(30) if supported.contains(f"3.{n}.0")]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_contributing_names_every_package_and_only_existing_files() -> None:
    packages: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {name.partition(".")[2].replace(".", "/") for name in packages["packages"]} - {""}
    table = "".join(line.partition(" | ")[0] for line in CONTRIBUTING.splitlines() if line.startswith("| "))
    assert [room for room in rooms if f"`{room}/`" not in table] == []
    names = re.findall(r"`([\w./-]+/[\w.-]*|[\w-]+\.(?:md|toml|txt))`", CONTRIBUTING)
    assert len(names) > 20
    assert [
        name
        for name in names
        if name != "build/" and not (ROOT / name.replace("NAME.py", "__init__.py").replace("NAME", "local")).exists()
    ] == []


def test_contributing_names_only_existing_make_targets() -> None:
    targets = re.findall(r"^make ([a-z-]+)", CONTRIBUTING, re.MULTILINE)
    assert {"check", "test"} <= {*targets}
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
