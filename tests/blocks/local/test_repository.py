"""Repositories, cloned for each local sandbox, and packages, installed once for all sandboxes."""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import os
import subprocess
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, LocalInterpreter, LocalSandbox
from rlm_batch.blocks.git import resolve_commit, run_git
from rlm_batch.blocks.host_files.cache import check_out_repository
from rlm_batch.blocks.local.packages import install_packages

from ...infra.git import commit_all
from ...infra.hostile_files import fill_with_hostile_files
from ...standins.wheels import write_wheel

pytestmark = pytest.mark.anyio
Commit = Callable[[str], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test its own cache and return it."""
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    tmp_path.chmod(0o755)
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create a repository without a commit."""
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main", str(folder)], check=True)
    return folder


@pytest.fixture
def commit(repository: Path) -> Commit:
    """Return a function that commits a version of the module and returns the commit."""

    def commit(answer: str) -> str:
        (repository / "answers.py").write_text(f"ANSWER = {answer!r}\n")
        (repository / "data").mkdir(exist_ok=True)
        (repository / "data" / "numbers.txt").write_text("1 2 3\n")
        return commit_all(repository, answer)

    return commit


async def test_code_runs_in_the_clones_directory_and_may_write_there(
    local: LocalSandbox, repository: Path, commit: Commit
) -> None:
    commit("first")
    provider = local.model_copy(update={"repo_url": str(repository)})
    code = """
from answers import ANSWER
numbers = [int(n) for n in open("data/numbers.txt").read().split()]
open("data/numbers.txt", "a").write("4")
SUBMIT(answer=ANSWER, numbers=numbers)
"""
    for _ in range(2):  # each sandbox has its own copy
        async with provider.interpreter() as interpreter:
            assert (await interpreter.execute(code)).outputs == {"answer": "first", "numbers": [1, 2, 3]}


async def test_git_obeys_no_configuration_of_the_working_directory(
    repository: Path, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit("first")
    folder = tmp_path / "here"
    folder.mkdir()
    mark = fill_with_hostile_files(folder)
    monkeypatch.chdir(folder)
    assert await resolve_commit(f"file://{repository}", None, None) == first
    assert not mark.exists(), mark.read_text()


@pytest.fixture
def branches_only(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a server of files, which serves branches and tags, but no other commits."""
    # `git init` gives the clone in the cache the same branch as the repository that it fetches.
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "init.defaultBranch")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "main")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")

    class Files(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            subprocess.run(["git", "-C", str(repository), "update-server-info"], check=True)
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = partial(Files, directory=str(repository))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/.git"
        server.shutdown()


def test_a_server_that_serves_only_branches_works_after_a_forced_push(
    repository: Path, commit: Commit, branches_only: str
) -> None:
    def check_out(ref: str) -> str:
        async def main() -> Path:
            commit_id = await LocalSandbox(repo_url=branches_only, repo_ref=ref).commit()
            return await check_out_repository(branches_only, commit_id or "", None)

        return (asyncio.run(main()) / "answers.py").read_text()

    first, second = commit("first"), commit("second")
    subprocess.run(["git", "-C", str(repository), "tag", "v1"], check=True)
    commit("third")
    for ref, expected in (("main", "third"), ("v1", "second"), (first, "first")):
        assert check_out(ref) == f"ANSWER = {expected!r}\n", ref
    subprocess.run(["git", "-C", str(repository), "reset", "--quiet", "--hard", second], check=True)
    forced = commit("forced")
    for ref in ("main", forced):
        assert check_out(ref) == "ANSWER = 'forced'\n", ref


async def test_a_blocks_sandboxes_share_one_commit_and_it_is_in_the_key(
    repository: Path, commit: Commit, cache: Path
) -> None:
    first = commit("first")
    block = LocalSandbox(repo_url=str(repository), repo_ref="main")
    before = await block.fingerprint()
    commit("second")

    async def run_one() -> str:
        async with block.interpreter() as interpreter:
            return (await interpreter.execute("from answers import ANSWER\nSUBMIT(answer=ANSWER)")).answer

    assert await asyncio.gather(*(run_one() for _ in range(4))) == ["first"] * 4
    assert len([path for path in cache.glob("repositories/*/*") if path.is_dir()]) == 1
    assert first in str(before)
    assert before != await LocalSandbox(repo_url=str(repository), repo_ref="main").fingerprint()


async def test_a_missing_repository_revision_or_git_is_a_one_sentence_error(
    tmp_path: Path, repository: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit("first")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"repo_url": str(tmp_path / "nothing")}, "git ls-remote failed.*nothing"),
        ({"repo_url": str(repository), "repo_ref": "gone"}, "no branch or tag 'gone'.*its branches: main"),
        ({"repo_url": str(repository), "repo_ref": "f" * 40}, "git checkout failed"),
    ]
    for fields, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            await LocalSandbox(**fields).open({})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="repo_url needs git"):
        await resolve_commit(str(repository), None, None)


@pytest.mark.parametrize("url", ["https://user:hunter2secret@example.com/x.git", "https://:hunter2secret@[::1]:8443/x"])
def test_an_address_with_a_password_is_refused_and_not_shown(url: str) -> None:
    for make in (LocalSandbox, LocalInterpreter):
        with pytest.raises((ConfigurationError, ValueError), match="and set repo_token") as refused:
            make(repo_url=url)
        assert "hunter2secret" not in "".join(traceback.format_exception(refused.value))
    # A user name alone is not a password.
    assert LocalSandbox(repo_url="https://organisation@example.com/x.git").repo_url


def test_a_password_in_gits_error_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    message = "fatal: unable to access 'https://user:hunter2secret@host.example/x/': gone"
    git.write_text(f'#!/bin/sh\necho "{message}" >&2\nexit 1\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigurationError, match=r"access 'https://\*\*\*@host.example/x/': gone") as failed:
        asyncio.run(run_git("ls-remote", "--", "https://host.example/x"))
    assert "hunter2secret" not in str(failed.value)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a package index and make it the only source of packages for pip and uv."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP", "UV"):
        monkeypatch.setenv(f"{name}_FIND_LINKS", str(folder))
        monkeypatch.setenv(f"{name}_NO_INDEX", "1")
    return folder


@pytest.mark.full
@pytest.mark.strongest_first
async def test_packages_are_installed_and_read_only_in_isolation(local: LocalSandbox, index: Path, cache: Path) -> None:
    write_wheel(index, "little_package")
    provider = local.model_copy(update={"packages": ["little-package>=1"]})
    code = """
import little_package
try:
    open(little_package.__file__, "a").close()
    writable = True
except OSError:
    writable = False
SUBMIT(value=little_package.NAME, writable=writable)
"""
    for _ in range(2):
        async with provider.interpreter() as interpreter:
            result = await interpreter.execute(code)
            assert result.outputs == {"value": "little_package", "writable": local.isolation == "none"}
    assert len([path for path in cache.glob("packages/*") if path.is_dir()]) == 1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Create a source package whose build writes the file `built` next to the package."""
    folder = tmp_path / "source"
    folder.mkdir()
    program = f"open({str(tmp_path / 'built')!r}, 'w').close()\nimport setuptools\nsetuptools.setup(name='source')\n"
    (folder / "setup.py").write_text(program)
    return folder


PLACES = (
    "source @ file://{folder}",
    "{folder}",
    "./source",
    "source/",
    "file://{folder}",
    "source[x] @ file://{folder}",
    "git+file://{folder}",
    "source @ git+file://{folder}",
    "https://me:geheim@127.0.0.1:9/source-1.0.tar.gz",
    "{folder}.zip",
    "source @ https://me:geheim@127.0.0.1:9/source.zip ; python_version > '3'",
)


def test_a_package_from_a_path_or_address_is_refused_without_a_build(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for package in PLACES:
        packages = [package.format(folder=source)]
        with pytest.raises(ConfigurationError, match="wheels from the index") as refused:
            LocalInterpreter(packages=packages).start()
        assert "geheim" not in str(refused.value)
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    "needs",
    [
        "source @ file://{folder}",
        pytest.param("source @ git+file://{folder}", marks=pytest.mark.full),
        pytest.param("source", marks=pytest.mark.full),
    ],
)
def test_dependencies_of_a_wheel_are_not_built(needs: str, source: Path, index: Path, tmp_path: Path) -> None:
    commit_all(source)
    write_wheel(index, "harmless", needs.format(folder=source))
    with tarfile.open(index / "source-1.0.tar.gz", "w:gz") as file:
        file.add(source / "setup.py", "source-1.0/setup.py")
    with (
        pytest.raises(ConfigurationError, match=r"Local sandboxes install only wheels|no wheel for this"),
        LocalInterpreter(packages=["harmless"]),
    ):
        pass
    assert not (tmp_path / "built").exists()


def test_the_installer_gets_only_the_environment_variables_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uv").write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\npwd > {tmp_path}/folder\n")
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    theirs = {"UV_DEFAULT_INDEX": "https://index.example.org", "https_proxy": "http://proxy.example.org", "HOME": "/h"}
    others = {"OPENAI_API_KEY": "sk-1", "AWS_SECRET_ACCESS_KEY": "2", "PREFECT_API_KEY": "3", "UV_NO_BINARY": "1"}
    for name, value in {**theirs, **others}.items():
        monkeypatch.setenv(name, value)
    asyncio.run(install_packages(["numpy"]))
    lines = (tmp_path / "environment").read_text().splitlines()
    environment = {name: value for name, _, value in (line.partition("=") for line in lines)}
    assert theirs.items() <= environment.items()
    assert not others.keys() & environment.keys()
    assert "/packages/half-" in (tmp_path / "folder").read_text()


@pytest.mark.parametrize("place", ["environment", "file"])
def test_settings_of_pip_do_not_decide_where_or_whether_it_installs(
    place: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, "outer", "inner")
    write_wheel(index, "inner")
    settings = dict.fromkeys(("dry-run", "no-deps", "user", "require-virtualenv"), "1")
    settings |= {name: str(tmp_path / "elsewhere") for name in ("root", "prefix", "target")}
    if place == "environment":
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name.upper().replace('-', '_')}", value)
    else:
        lines = ["[install]", *(f"{name} = {value}" for name, value in settings.items())]
        (tmp_path / "pip.conf").write_text("\n".join(lines))
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    folder = asyncio.run(install_packages(["outer"]))
    assert {"outer.py", "inner.py"} <= {path.name for path in folder.iterdir()}
    assert not (tmp_path / "elsewhere").exists()


def test_unavailable_packages_are_a_one_sentence_error(index: Path) -> None:
    with pytest.raises(ConfigurationError, match="No matching distribution found for no-such-package"):
        LocalInterpreter(packages=["no-such-package"]).start()
    for package in (
        "--index-url=http://example.org",
        "-rrequirements.txt",
        "numpy --index-url=https:x",
        "numpy pandas",
        " ",
    ):
        with pytest.raises(ConfigurationError, match=r"is not a requirement|is not the name of a package"):
            LocalInterpreter(packages=[package]).start()


@pytest.mark.requires("bubblewrap")
async def test_files_of_a_sandbox_with_a_limit_on_disk_reach_the_host(repository: Path, commit: Commit) -> None:
    """They are in memory that only the sandbox has mounted. A kept sandbox has them on disk."""
    commit("first")
    provider = LocalSandbox(isolation="bubblewrap", repo_url=str(repository), disk_mib=16)
    interpreter = provider.interpreter()
    await interpreter.start()
    work = interpreter.sandbox.folder / "work"  # type: ignore[attr-defined]
    try:
        await interpreter.sandbox.upload("folder/sent", b"sent")
        code = "import os\nwith open('folder/sent', 'a') as file:\n    file.write(' and changed')\n"
        tracked = (await interpreter.execute(code + "SUBMIT(names=sorted(os.listdir()))")).names
        assert await interpreter.sandbox.download("folder/sent") == b"sent and changed"
        assert list(work.iterdir()) == []
        await interpreter.keep(time.time() + 600)
        assert sorted(path.name for path in work.iterdir()) == tracked
        assert (work / "folder" / "sent").read_bytes() == b"sent and changed"
    finally:
        await provider.delete_sandbox(work.parent.name)
