"""Tests of the installed package: all of its directories, a light import, and imports in one direction only."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlm_batch
from rlm_batch.sandbox.driver_bundle import MODULES

from .infra.programs import run_program

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Floor of each package directory. A module may import from its own floor or a lower one.
FLOORS = {"cli": 4, "deployments": 4, "flows": 3, "tasks": 2, "blocks": 1, "sandbox": 0}


def git_files() -> list[str]:
    """List the files that git tracks or would track; empty if this is no git checkout."""
    if not (ROOT / ".git").exists():
        return []
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def module_files() -> dict[str, Path]:
    """Map the dotted name of every module of the package to its file."""
    files = {"rlm_batch": ROOT / "__init__.py"}
    for room in FLOORS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(("rlm_batch", *(p for p in parts if p != "__init__")))] = path
    return files


def run_isolated(program: str, *arguments: str, cwd: Path) -> str:
    """Run a program that imports neither from the working directory nor from PYTHONPATH, and return its output."""
    environment = os.environ | {"PREFECT_HOME": str(cwd / "prefect"), "PREFECT_LOGGING_LEVEL": "ERROR"}
    done = run_program([sys.executable, "-I", "-c", textwrap.dedent(program), *arguments], cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel offline from a copy, because an old build/lib in the checkout could hide a missing directory."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md", "py.typed", "__init__.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for room in FLOORS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    done = run_program(build)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_contains_the_driver_and_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {f"rlm_batch/{p.relative_to(ROOT)}" for p in (ROOT / "deployments").iterdir() if p.suffix in ("", ".yaml")}
    data = {name for name in data if not name.endswith("__pycache__")}
    data |= {f"rlm_batch/{path.relative_to(ROOT)}" for path in (ROOT / "flows" / "reporting").glob("*.jinja")}
    assert {f"rlm_batch/deployments/{name}" for name in ("prefect.yaml", "compose.yaml", "Dockerfile")} <= data
    assert {
        "rlm_batch/py.typed",
        *(f"rlm_batch/sandbox/{name.replace('.', '/')}.py" for name in MODULES),
    } | data <= names
    assert not [n for n in names if not n.startswith(("rlm_batch/", "rlm_batch-"))]


@pytest.mark.full
def test_every_module_can_be_imported_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target"]
    subprocess.run([sys.executable, *options, str(site), str(wheel)], check=True)
    imported = run_isolated(
        """
        import importlib, json, pkgutil, sys
        sys.path.insert(0, sys.argv[1])
        import rlm_batch
        assert rlm_batch.__file__.startswith(sys.argv[1]), rlm_batch.__file__

        def fail(name):
            raise

        found = ["rlm_batch"]
        for module in pkgutil.walk_packages(rlm_batch.__path__, "rlm_batch.", onerror=fail):
            importlib.import_module(module.name)
            found.append(module.name)
        print(json.dumps(found))
        """,
        str(site),
        cwd=tmp_path,
    )
    assert sorted(json.loads(imported.splitlines()[-1])) == sorted(module_files())


# -------------------------------------------------------------------------------------------- the public face


def test_importing_the_package_is_light(tmp_path: Path) -> None:
    program = """
        import json, sys
        import rlm_batch
        print(json.dumps([name for name in ("prefect", "daytona", "modal", "pydantic") if name in sys.modules]))
        """
    assert json.loads(run_isolated(program, cwd=tmp_path)) == []


def test_every_public_name_loads() -> None:
    other_names = {"RunReport": "TrialsReport", "SweepReport": "TrialsReport"}
    for name in rlm_batch.__all__:
        assert getattr(rlm_batch, name).__name__ == other_names.get(name, name)
    assert set(rlm_batch.__all__) <= set(dir(rlm_batch))
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        getattr(rlm_batch, "nothing_like_it")  # noqa: B009  # type checkers reject the attribute


# ------------------------------------------------------------------------------------------------- the floors


def imports(module: str, is_package: bool, source: str) -> Iterator[tuple[str, bool]]:
    """Yield each import of a module: its absolute name, and whether the import is relative."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or "", False
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package]
            if node.module:
                yield ".".join((*base, node.module)), True
            else:
                yield from ((".".join((*base, alias.name)), True) for alias in node.names)


# Modules that are sent to sandboxes, and modules that the host shares with them.
IN_SANDBOX = ("rlm_batch.sandbox.driver.", "rlm_batch.sandbox.wire.")


def broken_rules(module: str, source: str, is_package: bool = False) -> list[str]:
    room = module.split(".")[1]
    broken: list[str] = []
    for name, relative in imports(module, is_package, source):
        top, _, rest = name.partition(".")
        if top == "rlm_batch":
            target = rest.partition(".")[0]
            if not relative:
                broken.append(f"{module} imports {name} absolutely")
            elif target not in FLOORS:
                broken.append(f"{module} imports {name}, which is in no room")
            elif FLOORS[target] > FLOORS[room]:
                broken.append(f"{module} imports {name}, which is a floor above")
        elif room == "sandbox" and top in {"prefect", "daytona", "modal"}:
            broken.append(f"{module} imports {top}")
        if module.startswith(IN_SANDBOX) and not (
            name.startswith(IN_SANDBOX) if relative else top in sys.stdlib_module_names
        ):
            broken.append(f"{module} imports {name}, which the sandbox's Python may not have")
        if name.startswith(IN_SANDBOX[0]) and not module.startswith(IN_SANDBOX[0]):
            broken.append(f"{module} imports {name}, which runs in sandboxes only")
    return broken


def test_imports_follow_the_layers() -> None:
    rooms = {name: path for name, path in module_files().items() if name != "rlm_batch"}
    assert {name.split(".")[1] for name in rooms} == set(FLOORS)
    broken = [
        rule
        for name, path in rooms.items()
        for rule in broken_rules(name, path.read_text(), path.name == "__init__.py")
    ]
    assert broken == []


# ----------------------------------------------------------------------------- dependencies and tracked files


def test_every_dependency_has_a_lower_bound_and_a_valid_pin() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.+!]*", line)] == []
    pins = {name: version for name, _, version in (line.partition("==") for line in lines)}
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras]):
        assert {s.operator for s in requirement.specifier} & {">=", "==", "~="}, requirement
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_no_file_names_a_registry_or_a_machine_path() -> None:
    names = git_files()
    if not names:
        pytest.skip("not a git checkout: nothing says which files are the project's")
    hosts = r"pypi[.]org|pythonhosted[.]org|registry[.]npmjs|(deb|security)[.]debian[.]org"
    # Daytona's own sandboxes have the folder /home/daytona.
    places = r"(?<![\w.])/(root|work|Users|home/(?!daytona\b)\w+)/"
    pattern = re.compile(rf"{hosts}|{places}|{re.escape(str(ROOT))}/")
    matches = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in names
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert matches == []
