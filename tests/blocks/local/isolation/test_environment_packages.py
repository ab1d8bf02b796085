"""The running environment's packages in local sandboxes: importable, read-only, and part of the key."""

from __future__ import annotations

import asyncio
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaInterpreter, LocalInterpreter, LocalSandbox
from rlm_batch.blocks.registry import resolve_provider

WRITE = """
import os, shutil
import {module}
folder = os.path.dirname({module}.__file__)
done = []
for name, attempt in {{
    "append": lambda: open({module}.__file__, "a").write("x"),
    "truncate": lambda: os.truncate({module}.__file__, 0),
    "add": lambda: open(os.path.join(folder, "added.py"), "w").close(),
    "make": lambda: os.mkdir(os.path.join(folder, "made")),
    "remove": lambda: os.unlink({module}.__file__),
    "move": lambda: os.rename({module}.__file__, {module}.__file__ + ".moved"),
    "link": lambda: os.link({module}.__file__, os.path.join(folder, "linked.py")),
    "cover": lambda: os.replace(shutil.copy({module}.__file__, os.environ["HOME"]), {module}.__file__),
    "open to all": lambda: os.chmod(folder, 0o777),
}}.items():
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
SUBMIT(value={module}.VALUE, done=done)
"""


def put_package(folder: Path, name: str, version: str = "1.0") -> None:
    """Install a package with one module of the same name."""
    (folder / f"{name}.py").write_text("VALUE = 42\n")
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


SCRIPT = "import of_purelib, sys\nprint(of_purelib.VALUE, sys.prefix, sys.argv[1:])\n"
# The first lines of scripts as installers write them, for a short and a long path of the host's Python.
SCRIPT_HEADS = {
    "short": f"#!{sys.executable}\n",
    "long": f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Create an environment with a separate folder for compiled packages, and use it as the running environment."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    folders = {"purelib": tmp_path / "lib", "platlib": tmp_path / "lib64", "scripts": tmp_path / "bin"}
    for folder in folders.values():
        folder.mkdir(mode=0o755)
    for name in ("purelib", "platlib"):
        put_package(folders[name], f"of_{name}")
    for name, head in SCRIPT_HEADS.items():
        (folders["scripts"] / name).write_text(head + SCRIPT)
        (folders["scripts"] / name).chmod(0o755)
    shutil.copy("/bin/true", folders["scripts"] / "compiled")
    get_path = sysconfig.get_path

    def get_own_path(name: str, *arguments: Any, **options: Any) -> str:
        return str(folders[name]) if name in folders else get_path(name, *arguments, **options)

    monkeypatch.setattr(sysconfig, "get_path", get_own_path)
    return {name: folders[name] for name in ("purelib", "platlib")}


def describe(folder: Path) -> dict[str, Any]:
    """Return every path in a folder with its contents and permissions."""
    return {
        str(path): (path.stat().st_mode, path.stat().st_uid, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def test_code_imports_packages_of_the_hosts_environment(level: Any) -> None:
    with LocalInterpreter(isolation=level, packages="environment") as interpreter:
        result = interpreter.execute("import numpy\nSUBMIT(total=numpy.arange(4).sum(), version=numpy.__version__)")
    import numpy

    assert result.outputs == {"total": 6, "version": numpy.__version__}


LOOK_BESIDE = """
import os, {module}
folder = os.path.dirname({module}.__file__)
read = []
for path in (os.path.join(folder, "way_out"), os.path.join(folder, "..", "secret"), {secret!r}):
    try:
        read.append(open(path).read())
    except OSError:
        pass
SUBMIT(read=read)
"""


def test_isolated_code_cannot_change_or_leave_the_environment(level: Any, environment: dict[str, Path]) -> None:
    secret = environment["purelib"].parent / "secret"
    secret.write_text("of the host")
    secret.chmod(0o644)
    with LocalInterpreter(isolation=level, packages="environment") as interpreter:
        for name, folder in environment.items():
            (folder / "way_out").symlink_to(secret)
            before = describe(folder)
            look = LOOK_BESIDE.format(module=f"of_{name}", secret=str(secret))
            assert interpreter.execute(look)["read"] == (["of the host"] * 3 if level == "none" else [])
            result = interpreter.execute(WRITE.format(module=f"of_{name}"))
            assert result.value == 42
            assert (describe(folder) == before) == (level != "none")
            # For an ordinary user on landlock, chmod reports success but changes nothing.
            assert "add" in result.done if level == "none" else {*result.done} <= {"open to all"}


@pytest.mark.usefixtures("environment")
def test_programs_of_packages_run_on_the_sandboxs_python(level: Any) -> None:
    code = """
import os, shutil, subprocess, sys, sysconfig
def start(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, **options)
found = {name: start(name, "a b").stdout for name in ("short", "long")}
found |= {name + " alone": start(shutil.which(name), "a b", env={}).stdout for name in ("short", "long")}
found["by its path"] = start(os.path.join(sysconfig.get_path("scripts"), "short"), "a b").stdout
SUBMIT(found=found, expected=f"42 {sys.prefix} ['a b']\\n", compiled=start("compiled").returncode,
       pip=start(sys.executable, "-m", "pip", "--version").stderr)
"""
    with LocalInterpreter(isolation=level, packages="environment") as interpreter:
        result = interpreter.execute(code)
    assert set(result.found.values()) == {result.expected}
    assert result.compiled == 0
    assert "No module named pip" in result.pip  # only the host's Python has pip


@pytest.mark.requires("root", "isolation")
def test_as_root_an_environment_closed_to_other_users_is_refused(environment: dict[str, Path]) -> None:
    environment["platlib"].chmod(0o700)
    with (
        pytest.raises(ConfigurationError, match="is not readable by other users"),
        LocalInterpreter(packages="environment"),
    ):
        pass


def test_an_upgrade_changes_the_key(environment: dict[str, Path]) -> None:
    from rlm_batch.blocks.local.packages import digest_installed_versions

    provider = LocalSandbox(packages="environment")  # type: ignore[arg-type]
    first = asyncio.run(provider.fingerprint())
    assert first["packages"][0] == "environment"
    (environment["platlib"] / "of_platlib-1.0.dist-info").rename(environment["platlib"] / "of_platlib-2.0.dist-info")
    metadata = environment["platlib"] / "of_platlib-2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "2.0"))
    assert asyncio.run(provider.fingerprint()) == first  # each process computes the digest once
    digest_installed_versions.cache_clear()
    assert asyncio.run(provider.fingerprint()) != first


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalInterpreter(packages=["environment", "numpy"]), "and allows no others"),
        (lambda: DaytonaInterpreter(packages="environment"), "works only in local sandboxes"),
        (lambda: asyncio.run(resolve_provider("modal", {"packages": "environment"})), "works only in local sandboxes"),
    ],
)
def test_incompatible_settings_are_refused_with_a_sentence(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.anyio
@pytest.mark.usefixtures("as_worker")
async def test_a_deployments_run_needs_its_workers_consent_for_environment_packages(
    environment: dict[str, Path], allow: Callable[..., None]
) -> None:
    allow(allow_no_isolation=True)
    provider = LocalSandbox(isolation="none", packages="environment")  # type: ignore[arg-type]
    for ask in (provider.fingerprint, lambda: provider.open({})):
        with pytest.raises(ConfigurationError, match="allowed_paths"):
            await ask()
    allow(allow_no_isolation=True, allowed_paths=list(map(str, environment.values())))
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute("import of_platlib\nSUBMIT(y=of_platlib.VALUE)")).y == 42
