"""What .ci/run does with a checkout: its stages, what it cannot install, and a machine that is made to look fresh."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEEN = """
import json, os, shutil, sys
sys.path.insert(0, sys.argv[1])
from tests.infra import postgres
print(json.dumps({
    "found": [name for name in sys.argv[2:] if shutil.which(name)],
    "postgres": postgres.find_programs() is not None,
    "path": os.environ["PATH"].split(":"),
    "home": os.listdir(os.environ["HOME"]),
    "pip": os.environ.get("PIP_CONFIG_FILE"),
    "pyenv": os.environ.get("PYENV_ROOT"),
}))
"""


def make_program(path: Path, text: str = "exit 0") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make_checkout(path: Path) -> Path:
    """A checkout that has only what the verdict itself is made of: `build/` is one of its own."""
    shutil.copytree(ROOT / ".ci", path / ".ci")
    return path


def run(command: list[str | Path], path: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs it with that in front of this machine's PATH; a variable that is empty is not there."""
    given = {**os.environ, **environment, "PATH": f"{path}:{os.environ['PATH']}"}
    given = {name: value for name, value in given.items() if value}
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=60, check=False)


# ------------------------------------------------------------------------------------------- as on a fresh machine


def test_a_program_that_a_fresh_machine_lacks_is_not_found_and_its_neighbours_work(tmp_path: Path) -> None:
    hide = make_checkout(tmp_path / "checkout") / ".ci" / "hide-programs"
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("bwrap", "initdb", "pg_ctl", "uv"):
        make_program(first / name)
    make_program(first / "neighbour", "echo hello from the neighbour")
    make_program(second / "other")
    names = ("bwrap", "initdb", "postgres", "psql", "chromium", "docker", "uv", "neighbour", "other")
    ask = [hide, sys.executable, "-c", SEEN, str(ROOT), *names]
    done = run(ask, f"{first}:{second}", tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["found"] == ["neighbour", "other"]
    assert seen["postgres"] is False
    assert seen["home"] == []
    assert str(first) not in seen["path"]
    assert str(second) in seen["path"]
    assert run([hide, "neighbour"], str(first), tmp_path).stdout == "hello from the neighbour\n"


def test_the_status_of_the_command_is_handed_on(tmp_path: Path) -> None:
    hide = make_checkout(tmp_path) / ".ci" / "hide-programs"
    assert run([hide, "sh", "-c", "exit 7"], "", tmp_path).returncode == 7
    assert run([hide], "", tmp_path).returncode == 2


def test_programs_are_hidden_in_whatever_path_has_them(tmp_path: Path) -> None:
    hide = make_checkout(tmp_path / "checkout") / ".ci" / "hide-programs"
    for name in ("relative", "with a space", "unlisted", "."):
        make_program(tmp_path / name / "bwrap")
    make_program(tmp_path / "relative" / "neighbour")
    (tmp_path / "unlisted").chmod(0o111)
    path = f"relative::missing:relative:{tmp_path / 'with a space'}:{tmp_path / 'unlisted'}:plain"
    done = run([hide, sys.executable, "-c", SEEN, str(ROOT), "bwrap", "neighbour"], path, tmp_path)
    (tmp_path / "unlisted").chmod(0o755)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["found"] == ["neighbour"]
    assert [entry for entry in seen["path"] if entry in ("missing", "plain")] == ["missing", "plain"]
    assert len(seen["path"]) == len(f"{path}:{os.environ['PATH']}".split(":"))


def test_packages_and_pythons_come_from_where_they_did(tmp_path: Path) -> None:
    hide = make_checkout(tmp_path / "checkout") / ".ci" / "hide-programs"
    home, there = tmp_path / "home", {"PIP_CONFIG_FILE": "", "PYENV_ROOT": "", "XDG_CONFIG_HOME": ""}
    ask = [hide, sys.executable, "-c", SEEN, str(ROOT)]
    home.mkdir()
    seen = json.loads(run(ask, "", tmp_path, HOME=str(home), **there).stdout)
    assert (seen["pip"], seen["pyenv"]) == (None, None)
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").touch()
    (home / ".pyenv").mkdir()
    seen = json.loads(run(ask, "", tmp_path, HOME=str(home), **there).stdout)
    assert (seen["pip"], seen["pyenv"]) == (str(home / ".config/pip/pip.conf"), str(home / ".pyenv"))
    there["PYENV_ROOT"] = "/elsewhere"
    assert json.loads(run(ask, "", tmp_path, HOME=str(home), **there).stdout)["pyenv"] == "/elsewhere"


# ------------------------------------------------------------------------------------------------------ the stages


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Stands for make, apt-get and sudo: each writes into `calls` what it was asked for, and does none of it."""
    there = tmp_path / "programs"
    make_program(
        there / "make",
        'cat; echo "$*${RLM_BATCH_TESTS_PATH_ONLY:+ alone}${CI:+ CI}" >> "$CALLS"; [ "$*" != "$FAILS" ]',
    )
    make_program(there / "apt-get", 'echo "apt-get $*" >> "$CALLS"; exit 100')
    make_program(there / "sudo", '[ -n "$SUDO" ] && [ "$1" = -n ] && shift && exec "$@"')
    make_program(there / "id", "echo 1000")
    return there


def run_verdict(tmp_path: Path, programs: Path, **environment: str) -> tuple[int, list[str], list[str]]:
    """Its status, the lines that it prints and the calls that it makes, on a machine without bubblewrap."""
    checkout = make_checkout(tmp_path / "checkout")
    hide = make_checkout(tmp_path / "machine") / ".ci" / "hide-programs"
    calls = tmp_path / "calls"
    given = {"CALLS": str(calls), "CI": "", "FAILS": "", "VENV": "", "RLM_BATCH_TESTS_PATH_ONLY": "", **environment}
    command = [hide, "env", "-u", "RLM_BATCH_TESTS_PATH_ONLY", checkout / ".ci" / "run"]
    done = run(command, str(programs), tmp_path, **given)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines(), calls.read_text().splitlines()


STAGES = (
    "make check, as on a fresh machine",
    "make test, as on a fresh machine",
    "the programs that the tests can use",
    "the packages that the tests can use",
    "make test",
    "make test-full",
)


def test_the_verdict_is_of_the_tests_on_a_fresh_machine_and_of_all_of_them_with_the_programs(
    tmp_path: Path, programs: Path
) -> None:
    status, lines, calls = run_verdict(tmp_path, programs, SUDO="yes")
    assert status == 0
    assert [call.removeprefix("--no-print-directory ") for call in calls if not call.startswith("apt-get")] == [
        *("check alone CI", "test alone CI", "test CI", "test-full CI")
    ]
    assert [line.rstrip("0123456789 s") for line in lines[-7:]] == [
        "The verdict:",
        *(f"  {name}: passed in" for name in STAGES),
    ]


def test_a_stage_that_fails_is_the_verdict(tmp_path: Path, programs: Path) -> None:
    status, lines, calls = run_verdict(tmp_path, programs, FAILS="--no-print-directory test")
    assert status == 1
    assert len(calls) == 2
    assert lines[-1].startswith("  make test, as on a fresh machine: FAILED in ")


@pytest.mark.parametrize("sudo", ["", "yes"])
def test_the_verdict_tells_what_it_could_not_install(tmp_path: Path, programs: Path, sudo: str) -> None:
    status, lines, calls = run_verdict(tmp_path, programs, SUDO=sudo)
    asked = [call for call in calls if call.startswith("apt-get")]
    assert status == 0
    assert [line for line in lines if "bubblewrap" in line] == [
        "bubblewrap is not here and could not be installed: the stronger level of local isolation is not tested."
    ]
    assert "Ray could not be installed: tasks of a cluster of it are not tested." in lines
    assert ("apt-get -qq install --yes --no-install-recommends bubblewrap" in asked) == bool(sudo)
