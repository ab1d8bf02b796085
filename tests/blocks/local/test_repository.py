"""A repository that is cloned for each local sandbox, and packages that are installed for all of them."""

from __future__ import annotations

import asyncio
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, LocalInterpreter, LocalSandbox, batch

pytestmark = pytest.mark.anyio
Commit = Callable[[str], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    tmp_path.chmod(0o755)
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository without a commit yet."""
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main", str(folder)], check=True)
    return folder


@pytest.fixture
def commit(repository: Path) -> Commit:
    """Commits a version of the module; returns the commit."""

    def commit(answer: str) -> str:
        (repository / "answers.py").write_text(f"ANSWER = {answer!r}\n")
        (repository / "data").mkdir(exist_ok=True)
        (repository / "data" / "numbers.txt").write_text("1 2 3\n")
        git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", answer], check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

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
    for _ in range(2):  # each has a copy of its own
        async with provider.interpreter(timeout=20) as interpreter:
            assert (await interpreter.execute(code)).outputs == {"answer": "first", "numbers": [1, 2, 3]}


async def test_a_branch_a_tag_a_commit_and_by_default_the_head(repository: Path, commit: Commit) -> None:
    first = commit("first")
    for name in (("tag", "v1"), ("branch", "old")):
        await asyncio.to_thread(subprocess.run, ["git", "-C", str(repository), *name], check=True)
    commit("second")
    for ref, expected in ((None, "second"), ("v1", "first"), ("old", "first"), ("main", "second"), (first, "first")):
        async with LocalSandbox(repo_url=str(repository), repo_ref=ref).interpreter(timeout=20) as interpreter:
            result = await interpreter.execute("from answers import ANSWER\nSUBMIT(answer=ANSWER)")
            assert result.answer == expected, ref


async def test_all_sandboxes_of_a_block_see_one_commit_and_a_new_commit_is_another_key(
    repository: Path, commit: Commit
) -> None:
    first = commit("first")
    block = LocalSandbox(repo_url=str(repository), repo_ref="main")
    before = await block.fingerprint()
    commit("second")
    async with block.interpreter(timeout=20) as interpreter:
        assert (await interpreter.execute("from answers import ANSWER\nSUBMIT(answer=ANSWER)")).answer == "first"
    assert first in str(before)
    assert before != await LocalSandbox(repo_url=str(repository), repo_ref="main").fingerprint()


def test_a_repository_or_a_revision_that_is_not_there_is_one_sentence(
    tmp_path: Path, repository: Path, commit: Commit, server: str
) -> None:
    commit("first")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"repo_url": str(tmp_path / "nothing")}, "git ls-remote failed.*nothing"),
        ({"repo_url": str(repository), "repo_ref": "gone"}, "no branch or tag 'gone'.*its branches: main"),
        ({"repo_url": str(repository), "repo_ref": "f" * 40}, "git checkout failed"),
    ]
    for fields, message in wrong:
        with pytest.raises(ConfigurationError, match=message), LocalInterpreter(**fields):
            pass
        LocalSandbox(**fields).save("with-repository", overwrite=True)
        with pytest.raises(ConfigurationError, match=message):
            asyncio.run(batch(["SUBMIT(x=1)"], provider="local-sandbox/with-repository"))


def test_four_interpreters_at_once_fetch_the_repository_once(repository: Path, commit: Commit, cache: Path) -> None:
    commit("first")

    async def main() -> list[str]:
        block = LocalSandbox(repo_url=str(repository))

        async def one() -> str:
            async with block.interpreter(timeout=20) as interpreter:
                return (await interpreter.execute("from answers import ANSWER\nSUBMIT(answer=ANSWER)")).answer

        return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(main()) == ["first"] * 4
    assert len([path for path in cache.glob("repositories/*/*") if path.is_dir()]) == 1


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package that no index has."""
    path = tmp_path / "little_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("little_package.py", "VALUE = 42\n")
        file.writestr(
            "little_package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: little-package\nVersion: 1.0\n"
        )
        file.writestr(
            "little_package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("little_package-1.0.dist-info/RECORD", "")
    return path


async def test_packages_are_there_and_cannot_be_written_unless_nothing_is_isolated(
    local: LocalSandbox, wheel: Path, cache: Path
) -> None:
    provider = local.model_copy(update={"packages": [str(wheel)]})
    code = """
import little_package
try:
    open(little_package.__file__, "a").close()
    writable = True
except OSError:
    writable = False
SUBMIT(value=little_package.VALUE, writable=writable)
"""
    for _ in range(2):
        async with provider.interpreter(timeout=20) as interpreter:
            result = await interpreter.execute(code)
            assert result.outputs == {"value": 42, "writable": local.isolation == "none"}
    assert len([path for path in cache.glob("packages/*") if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (["/no/such/package.whl"], "the packages could not be installed"),
        (["--index-url=http://example.org"], "is no requirement"),
        ([" "], "is no requirement"),
    ],
)
def test_packages_that_cannot_be_had_are_one_sentence(packages: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message), LocalInterpreter(packages=packages):
        pass
