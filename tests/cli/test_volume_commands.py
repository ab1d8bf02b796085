"""Chunked jobs, sequences and volumes from the terminal."""

import json
import os

import pytest

pytestmark = pytest.mark.usefixtures("volumes", "no_process_left")


DOUBLE = """
import json
save_to_volume(f"results/chunk_{chunk_id}.json", json.dumps([x * 2 for x in data]))
save_to_volume("same.txt", "x")
SUBMIT(chunk_id=chunk_id, count=len(data))
"""
SUM = """
import json
SUBMIT(total=sum(sum(json.loads(load_from_volume(path))) for path in list_volume("results")))
"""


@pytest.mark.usefixtures("server")
def test_chunks_prints_each_chunk_and_the_reduction_and_downloads_files(run, tmp_path):
    (tmp_path / "double.py").write_text(DOUBLE)
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "rows.jsonl").write_text("".join(f"{n}\n" for n in range(1, 10)))
    words = ["chunks", "double.py", "--data", "rows.jsonl", "--chunk-size", "3", "--volume-name", "doubled"]
    done = run(*words, "--reduce", "sum.py", "--max-workers", "3")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[1:4]] == [[str(n), str(n), "3"] for n in range(3)]
    assert "Reduction: total=90" in done.stdout
    assert "several chunks (0, 1, 2) wrote same.txt on the volume" in done.stderr

    assert [line.split() for line in run("volume", "ls", "doubled").stdout.splitlines()] == [
        ["9", "results/chunk_0.json"],
        ["11", "results/chunk_1.json"],
        ["12", "results/chunk_2.json"],
        ["1", "same.txt"],
    ]
    run("volume", "get", "doubled", "results/chunk_1.json")
    assert json.loads((tmp_path / "chunk_1.json").read_text()) == [8, 10, 12]
    run("volume", "get", "doubled", "results", "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [f"chunk_{n}.json" for n in range(3)]
    put = run("volume", "put", "doubled", "rows.jsonl", "inputs/")
    assert put.returncode == 0, put.stderr
    assert "inputs/rows.jsonl" in run("volume", "ls", "doubled", "inputs").stdout


@pytest.mark.usefixtures("server")
def test_a_sequence_prints_each_step_and_stops_at_the_first_error(run, tmp_path):
    (tmp_path / "one.py").write_text("x = 20\nSUBMIT(x=x)")
    (tmp_path / "two.py").write_text("SUBMIT(y=x + 1)")
    (tmp_path / "bad.py").write_text("raise ValueError('broken')")
    done = run("sequence", "one.py", "two.py", "bad.py", "one.py")
    assert done.returncode == 1
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1][:3] == ["0", "one.py", "20"]
    assert rows[2][:3] == ["1", "two.py", "21"]
    assert rows[4][:3] == ["3", "one.py", "NotRun:"]
    assert "ValueError" in done.stderr


def test_volumes_are_listed_and_directories_are_deleted_only_on_request(run, refused, volumes):
    for path in ("a/one.txt", "a/deep/two.txt", "b/a\x1b[2J.txt", os.fsdecode(b"b/b\xff")):
        (volumes / path).parent.mkdir(parents=True, exist_ok=True)
        (volumes / path).write_text("x")
    (volumes / "link").symlink_to(volumes / "a")
    (volumes / ".hidden").mkdir()
    (volumes / "a-file").write_text("")
    assert run("volume", "list").stdout.splitlines() == ["a", "b"]
    assert run("volume", "list", "--json").stdout.splitlines() == ['{"name": "a"}', '{"name": "b"}']
    assert run("volume", "ls", "b").stdout.splitlines() == [r"1  a\x1b[2J.txt", r"1  b\udcff"]
    assert run("volume", "ls", "a", "one.txt", "--json").stdout == '{"path": "one.txt", "bytes": 1}\n'
    assert run("volume", "rm", "a", "one.txt").stderr.splitlines() == ["removed 1 file from the volume a"]
    assert "deep is a directory with 1 file: --recursive removes it" in refused("volume", "rm", "a", "deep")
    assert (volumes / "a" / "deep" / "two.txt").exists()
    assert run("volume", "rm", "a", "deep", "--recursive").returncode == 0
    assert list((volumes / "a").iterdir()) == []


def test_volume_get_overwrites_files_only_with_force(run, refused, volumes, tmp_path):
    for folder, text in ((volumes / "here" / "results", "new"), (tmp_path / "home" / "results", "old")):
        folder.mkdir(parents=True)
        (folder / "b.txt").write_text(text)
    (volumes / "here" / "results" / "a.txt").write_text("new")
    old = tmp_path / "home" / "results" / "b.txt"
    words = ("volume", "get", "here", "results", "home")
    assert "home/results/b.txt exists, and nothing was written: --force overwrites" in refused(*words)
    assert not old.with_name("a.txt").exists()

    assert run(*words, "--force").returncode == 0
    assert old.read_text() == "new"
