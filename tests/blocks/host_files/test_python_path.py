"""The `python_path` parameter: the files read from a directory, refusals, and the access that local code gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, LocalInterpreter, batch, sequence
from rlm_batch.blocks.host_files import source_tree
from rlm_batch.blocks.host_files.python_path import read_python_path

from ...infra.requirements import mark_level

WRITE = """
import os, shutil
import mine
folder = os.path.dirname(mine.__file__)
done = []
for name, attempt in {
    "append": lambda: open(mine.__file__, "a").write("x"),
    "truncate": lambda: os.truncate(mine.__file__, 0),
    "add": lambda: open(os.path.join(folder, "added.py"), "w").close(),
    "remove": lambda: os.unlink(mine.__file__),
    "cover": lambda: os.replace(shutil.copy(mine.__file__, os.environ["HOME"]), mine.__file__),
}.items():
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
SUBMIT(value=mine.VALUE, done=done, beside=sorted(os.listdir(folder)))
"""


@pytest.fixture(params=[pytest.param(level, marks=mark_level(level)) for level in ("bubblewrap", "landlock")])
def level(request: pytest.FixtureRequest) -> Any:
    """Return each level that isolates code."""
    return request.param


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test its own cache and results root, and return the cache."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Create a directory with one module and return it."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "mine.py").write_text("VALUE = 42\n")
    return folder


def describe(folder: Path) -> dict[str, Any]:
    """Return every path in a folder with its contents and permissions."""
    return {
        str(path): (path.stat().st_mode, path.stat().st_uid, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def test_code_cannot_change_its_modules_and_equal_modules_are_stored_once(
    level: Any, source: Path, cache: Path
) -> None:
    source.chmod(0o700)  # if this process is root, code runs as another user but can still read modules
    before = describe(source)
    fields: Any = {"isolation": level, "packages": "environment", "python_path": [str(source)]}
    for _ in range(2):
        with LocalInterpreter(**fields) as interpreter:
            kept = describe(cache)
            result = interpreter.execute(WRITE)
            assert describe(cache) == kept
            path = interpreter.execute("import mine, numpy, sys\nSUBMIT(y=numpy.int64(mine.VALUE), first=sys.path[0])")
        assert result.outputs == {"value": 42, "done": [], "beside": ["mine.py"]}
        assert path.y == 42
        assert path.first.startswith("/python-path" if level == "bubblewrap" else "/")
    assert describe(source) == before
    assert len([path for path in cache.glob("python-path/*") if path.is_dir()]) == 1


def test_links_secrets_and_caches_are_left_out(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("SECRET = 1\n")
    (source / "linked.py").symlink_to(tmp_path / "secret.py")
    (source / "folder").symlink_to(tmp_path)
    os.mkfifo(source / "pipe.py")
    for name in (".env", ".git/config", ".venv/x.py", "venv/x.py", "__pycache__/mine.pyc", "node_modules/x.js"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("left out")
    (source / "package").mkdir()
    (source / "package" / "data.json").write_text("{}")
    assert read_python_path([str(source)]).files == {"0/mine.py": b"VALUE = 42\n", "0/package/data.json": b"{}"}


def test_the_key_covers_the_modules_and_their_order(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text("VALUE = 42\n")
    both = [str(source), str(other)]
    # The digest does not depend on the directory's path.
    assert read_python_path(both[:1]).digest == read_python_path(both[1:]).digest
    (other / "more.py").write_text("")
    digests = {read_python_path(paths).digest for paths in (both, both[::-1], both[:1], both[1:])}
    assert len(digests) == 4
    (source / "mine.py").rename(source / "yours.py")
    assert read_python_path(both).digest not in digests


def test_a_path_without_modules_is_refused_with_a_sentence(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    refused: list[tuple[Any, str]] = [
        ("src", "is a text: pass a list"),
        (["nowhere"], "there is no 'nowhere' on this machine"),
        (["src/mine.py"], "cannot be read: Not a directory"),
        (["/"], "is the whole machine"),
        ([" "], "there is no ' '"),
        (["src\0"], "there is no 'src"),
    ]
    for paths, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            LocalInterpreter(python_path=paths)
    with pytest.raises(ConfigurationError, match="for your own modules use `python_path`"):
        LocalInterpreter(packages=["./src"])
    read_python_path([str(source)])
    (source / "data.bin").write_bytes(b"x" * 10)
    for name, most in (("MAX_FILES", 1), ("MAX_BYTES", 20)):
        with monkeypatch.context() as limited:
            limited.setattr(source_tree, name, most)
            with pytest.raises(ConfigurationError, match=r"there are more than .* put data on a volume"):
                read_python_path([str(source)])


@pytest.mark.anyio
@pytest.mark.usefixtures("server")
async def test_a_flow_takes_relative_paths_and_reruns_after_an_edit(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    data = source.parent / "rows.csv"
    data.write_text("1,2")
    parameters: Any = {"provider": "local:none", "python_path": [Path("src")], "mounts": {str(data): Path("rows.csv")}}
    code = f"import mine, os\nSUBMIT(y=mine.VALUE, rows=open('{data}').read(), pid=os.getpid())"

    async def run() -> dict[str, Any]:
        return (await batch([code], cache_results=True, **parameters))[0].outputs

    first = await run()
    assert (first["y"], first["rows"]) == (42, "1,2")
    assert await run() == first
    (source / "mine.py").write_text("VALUE = 43\n")
    second = await run()
    assert (second["y"], second["rows"]) == (43, "1,2")
    data.write_text("3,4,5")
    assert (await run())["rows"] == "3,4,5"
    steps = await sequence(["import mine", "SUBMIT(y=mine.VALUE)"], provider="local:none", python_path=["src"])
    assert steps[1]["y"] == 43


def test_without_isolation_changed_modules_do_not_reach_other_sandboxes(source: Path) -> None:
    with LocalInterpreter(isolation="none", python_path=[str(source)]) as interpreter:
        assert "append" in interpreter.execute(WRITE).done
    isolation: Any
    for isolation in ("none", "auto"):
        with LocalInterpreter(isolation=isolation, python_path=[str(source)]) as interpreter:
            assert interpreter.execute("import mine; SUBMIT(text=open(mine.__file__).read())").text == "VALUE = 42\n"
    assert (source / "mine.py").read_text() == "VALUE = 42\n"
