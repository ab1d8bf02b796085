"""Patterns of files as inputs: one execution for each file, with the variable `path`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, Failure, batch, chunks, sweep
from rlm_batch.flows.inputs.file_patterns import MAX_FILE_BYTES, MatchedFiles
from rlm_batch.flows.plans.batch import BatchParameters
from rlm_batch.tasks.execution import Execution

READ = "with open(path, newline='') as file: SUBMIT(text=file.read())"


def write_files(folder: Path, names: list[str]) -> None:
    """Write a file of its own name at each path below the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def match(pattern: Path | str) -> list[str]:
    """Return the paths of the executions for a pattern."""
    plan = BatchParameters.parse({"code": READ, "inputs": pattern}).make_plan()
    assert plan.total == len(list(plan.items))
    return [variables["path"] for _, variables in plan.items]


def test_each_file_is_an_execution_that_reads_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, ["csv/a.csv", "csv/b.csv"])
    monkeypatch.chdir(tmp_path)
    results = batch.sync("SUBMIT(size=len(open(path).read()))", inputs="csv/*.csv")
    assert results.to_dataframe()[["path", "size"]].values.tolist() == [["inputs/a.csv", 9], ["inputs/b.csv", 9]]


def test_a_pattern_finds_files_by_their_names(tmp_path: Path) -> None:
    names = ["a b.csv", "line\nbreak.csv", "été.csv", "x.txt", "deep/c.csv", "deep/er/d.csv", ".hidden.csv"]
    write_files(tmp_path, names)
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "deep" / "c.csv")
    assert match(tmp_path / "*.csv") == [
        f"inputs/{name}" for name in ("a b.csv", "line%0Abreak.csv", "link.csv", "été.csv")
    ]
    assert match(f"{tmp_path}/**/[cd].csv") == ["inputs/deep/c.csv", "inputs/deep/er/d.csv"]
    assert match(tmp_path / "*" / "c.csv") == ["inputs/deep/c.csv"]
    results = batch.sync(READ, inputs=tmp_path / "*.csv", reuse_sandboxes=True, max_workers=1)
    assert [result.text for result in results] == ["a b.csv", "line\nbreak.csv", "deep/c.csv", "été.csv"]


def test_links_to_directories_give_no_file_twice(tmp_path: Path) -> None:
    write_files(tmp_path, ["texts/a.txt", "texts/sub/b.txt"])
    texts = tmp_path / "texts"
    for name, target in {
        "self": ".", "self2": "..", "sub/up": "..", "0alias": "sub", "broken.txt": "missing", "loop.txt": "loop.txt",
        "link.txt": "a.txt", "chain.txt": "link.txt", "sub/other.txt": "../a.txt",
    }.items():  # fmt: skip
        (texts / name).symlink_to(target)
    both = ["inputs/a.txt", "inputs/chain.txt", "inputs/link.txt", "inputs/sub/b.txt", "inputs/sub/other.txt"]
    assert match(f"{texts}/**/*.txt") == both
    assert match(f"{texts}/**") == both
    assert match(f"{texts}/*/*.txt") == ["inputs/sub/b.txt", "inputs/sub/other.txt"]
    assert match(f"{texts}/0alias/*.txt") == ["inputs/b.txt"]
    with pytest.raises(ConfigurationError, match=r"sub/other\.txt leads out of .*sub, so it is left out"):
        match(f"{texts}/sub/o*.txt")


def test_a_pattern_follows_no_link_out_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path / "volumes"))
    write_files(tmp_path, ["secret/x.txt", "secret/x.csv", "volumes/own/ok.txt", "volumes/own/deep/ok.txt"])
    own = tmp_path / "volumes" / "own"
    parquet.write_table(arrow.table({"x": [1]}), own / "deep" / "x.parquet")
    for name, target in {
        "x.txt": "../../secret/x.txt", "y.txt": "x.txt", "z.txt": "ok.txt", "dir": tmp_path / "secret",
        "dots": "deep/../../../secret", "x.csv": tmp_path / "secret" / "x.csv", "again": "dots",
    }.items():  # fmt: skip
        (own / name).symlink_to(target)
    assert match(own / "**" / "*.txt") == ["inputs/deep/ok.txt", "inputs/ok.txt"]
    assert match(own / "*" / "*.txt") == ["inputs/deep/ok.txt"]
    lines: list[str] = []
    MatchedFiles(str(own / "*.txt"), lines.append)
    assert lines == [f"{own}/x.txt leads out of {own}, so it is left out, as 2 more links"]
    (own / "deep" / "y.parquet").symlink_to(tmp_path / "secret" / "x.txt")
    (tmp_path / "mine").symlink_to(own / "again")
    for source in (own / "dir" / "*", own / "again" / "*.txt", own / "x.csv", own / "dir", tmp_path / "mine" / "*"):
        with pytest.raises(ConfigurationError, match=r"own/\w+(\.csv)? is a link on a volume"):
            match(source)
    with pytest.raises(ConfigurationError, match=r"y\.parquet is a link that leads out of .*deep"):
        match(own / "deep")
    for parameters in ({"mounts": {"/data": own / "dir"}}, {"python_path": [own / "dir"]}):
        with pytest.raises(ConfigurationError, match="is a link on a volume"):
            BatchParameters.parse({"code": READ, **parameters})
    # A link of the person is named without wildcards.
    (tmp_path / "data").symlink_to(tmp_path / "secret")
    assert match(tmp_path / "data" / "*.txt") == ["inputs/x.txt"]


def test_a_file_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    write_files(tmp_path, ["in/a.txt", "in/deep/b.txt", "secret/a.txt", "secret/b.txt"])
    plan = BatchParameters.parse({"code": READ, "inputs": tmp_path / "in" / "**" / "*.txt"}).make_plan()
    (tmp_path / "in" / "a.txt").unlink()
    (tmp_path / "in" / "a.txt").symlink_to(tmp_path / "secret" / "a.txt")
    (tmp_path / "in" / "deep").rename(tmp_path / "moved")
    (tmp_path / "in" / "deep").symlink_to(tmp_path / "secret")
    assert plan.find_uploads is not None
    for _, variables in plan.items:
        (upload,) = plan.find_uploads(Execution(0, READ, variables, "key")).values()
        with pytest.raises(ConfigurationError, match="cannot be read any more"):
            upload.read()


def test_a_file_whose_name_looks_like_a_pattern_is_read_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "in[1].csv").write_text("x\n1\n2\n")
    plan = BatchParameters.parse({"code": "SUBMIT(x)", "inputs": tmp_path / "in[1].csv"}).make_plan()
    assert [variables for _, variables in plan.items] == [{"x": 1}, {"x": 2}]


def test_resuming_goes_by_the_content_of_each_file(tmp_path: Path) -> None:
    folder = tmp_path / "csv"
    places: Any = {"results_path": tmp_path / "ledger", "inputs": folder / "*"}
    code = "import uuid\nSUBMIT(text=open(path).read(), run=uuid.uuid4().hex)"
    write_files(folder, ["a", "b", "c"])
    first = batch.sync(code, **places)
    os.utime(folder / "a", (time.time() + 99, time.time() + 99))  # as a new checkout of a repository has
    (folder / "b").write_text("B")
    write_files(folder, ["aa"])
    again = batch.sync(code, **places)
    assert [result.text for result in again] == ["a", "aa", "B", "c"]
    kept = {result.meta.variables["path"] for result in again if result.run in {result.run for result in first}}
    assert kept == {"inputs/a", "inputs/c"}


def test_a_file_that_changes_during_the_run_fails_its_execution_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, ["a", "b", "c"])
    plan = BatchParameters.make_plan

    def make_plan(*arguments: Any, **options: Any) -> Any:
        made = plan(*arguments, **options)
        (tmp_path / "a").write_text("changed")
        (tmp_path / "b").unlink()
        return made

    monkeypatch.setattr(BatchParameters, "make_plan", make_plan)
    changed, missing, same = batch.sync(READ, inputs=tmp_path / "*", on_failure="return")
    assert isinstance(changed, Failure)
    assert changed.error.summary == f"the file {tmp_path / 'a'} has changed since the run began: run it again"
    assert isinstance(missing, Failure)
    assert missing.error.summary.startswith(f"the file {tmp_path / 'b'} cannot be read any more: No such file")
    assert same.text == "c"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("*.csv", {}, r"no file matches .*\*\.csv: only \*\* searches directories below$"),
    ("nowhere/*.csv", {}, r"no file matches .*nowhere"),
    ("two/*", {}, r"two files would have the path inputs/a%0A: rename .*a%0A$"),
    ("large*", {}, r"has 256 MiB, and a file of `inputs` at most 256: pass the paths as variables"),
    ("**/*.csv", {"types": {"x": "int"}}, "`types` needs a CSV file"),
    ("**/*.csv", {"shards": 2}, "shards run on others"),
]


@pytest.mark.parametrize(("pattern", "options", "words"), WRONG)
def test_a_wrong_pattern_is_refused_with_a_remedy(
    tmp_path: Path, pattern: str, options: dict[str, Any], words: str
) -> None:
    write_files(tmp_path, ["deep/a.csv", "two/a\n", "two/a%0A"])
    with (tmp_path / "large").open("w") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    parameters = BatchParameters.parse({"code": READ, "inputs": tmp_path / pattern, **options})
    with pytest.raises(ConfigurationError, match=words) as raised:
        parameters.make_plan()
    assert "\n" not in str(raised.value)


def test_other_parameters_refuse_a_pattern(tmp_path: Path) -> None:
    write_files(tmp_path, ["a.csv"])
    pattern = str(tmp_path / "*.csv")
    calls: tuple[Callable[[], object], ...] = (
        lambda: sweep.sync("SUBMIT()", points=pattern),
        lambda: chunks.sync("SUBMIT()", data=pattern, chunk_size=1),
        lambda: chunks.sync("SUBMIT()", chunks=pattern),
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match="is a pattern, which only `inputs` of batch takes: name one file"):
            call()


def test_a_check_reads_the_original_file(tmp_path: Path) -> None:
    write_files(tmp_path, ["a"])
    code = "open(path, 'w').write('damaged')\nSUBMIT()"
    for reuse in (False, True):
        (result,) = batch.sync(code, inputs=tmp_path / "*", check=READ, reuse_sandboxes=reuse)
        assert result.text == "a"


def test_a_deployments_run_reads_only_allowed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "1")  # a worker sets this variable
    write_files(tmp_path, ["open/a.csv", "closed/b.csv"])
    with pytest.raises(ConfigurationError, match="allowed_paths"):
        match(tmp_path / "open" / "*.csv")
    allow(allowed_paths=[str(tmp_path / "open")])
    assert match(tmp_path / "open" / "*.csv") == ["inputs/a.csv"]
    (tmp_path / "open" / "link.csv").symlink_to(tmp_path / "closed" / "b.csv")
    with pytest.raises(ConfigurationError, match="allowed_paths"):
        match(tmp_path / "open" / "*.csv")


def test_each_execution_gets_a_new_copy_in_a_reused_sandbox(tmp_path: Path) -> None:
    write_files(tmp_path, ["a", "b"])
    code = """
import os
text, sizes = open(path).read(), {name: os.path.getsize(f'inputs/{name}') for name in os.listdir('inputs')}
open(path, 'w').write('damaged')
SUBMIT(text=text, sizes=sizes)
"""
    results = batch.sync(code, inputs=tmp_path / "*", repeats=2, reuse_sandboxes=True, max_workers=1)
    assert [result.text for result in results] == ["a", "a", "b", "b"]
    assert [result.sizes for result in results] == [{"a": 1}, {"a": 1}, {"a": 0, "b": 1}, {"a": 0, "b": 1}]
    assert (tmp_path / "a").read_text() == "a"
