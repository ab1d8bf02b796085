"""Chunked jobs, sequences and volumes from the terminal."""

import json
import os
import subprocess

import pytest

from .conftest import COMMAND, ROOT, environment

pytestmark = pytest.mark.usefixtures("volumes")


DOUBLE = """
import json
save_to_volume(f"results/chunk_{chunk_id}.json", json.dumps([x * 2 for x in data]))
SUBMIT(chunk_id=chunk_id, count=len(data))
"""
SUM = """
import json
SUBMIT(total=sum(sum(json.loads(load_from_volume(path))) for path in list_volume("results")))
"""


@pytest.mark.timeout(400)  # several commands, each of which imports Prefect
@pytest.mark.full
def test_chunks_prints_a_row_for_each_and_the_reduction_and_the_files_come_home(run, tmp_path):
    (tmp_path / "double.py").write_text(DOUBLE)
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "rows.jsonl").write_text("".join(f"{n}\n" for n in range(1, 10)))
    arguments = ["chunks", "double.py", "--data", "rows.jsonl", "--chunk-size", "3", "--volume-name", "doubled"]
    done = run(*arguments, "--reduce", "sum.py", "--max-workers", "3")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[1:4]] == [[str(n), str(n), "3"] for n in range(3)]
    assert "Reduction: total=90" in done.stdout
    again = run(*arguments, "--reduce", "sum.py")
    assert "4 succeeded, 4 from earlier runs, 0 failed" in again.stderr

    listed = run("volume", "ls", "doubled")
    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["9", "results/chunk_0.json"],
        ["11", "results/chunk_1.json"],
        ["12", "results/chunk_2.json"],
    ]
    run("volume", "get", "doubled", "results/chunk_1.json")
    assert json.loads((tmp_path / "chunk_1.json").read_text()) == [8, 10, 12]
    run("volume", "get", "doubled", "results", "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [f"chunk_{n}.json" for n in range(3)]
    put = run("volume", "put", "doubled", "rows.jsonl", "inputs/")
    assert put.returncode == 0, put.stderr
    assert "inputs/rows.jsonl" in run("volume", "ls", "doubled", "inputs").stdout


@pytest.mark.full
def test_chunks_from_a_file_of_ids_say_which_wrote_the_same_file(run, tmp_path):
    (tmp_path / "same.py").write_text("save_to_volume('same.txt', data)\nSUBMIT(n=len(data))")
    (tmp_path / "chunks.jsonl").write_text('{"id": "a", "data": "x"}\n{"id": "b", "data": "yy"}\n')
    done = run("chunks", "same.py", "--chunks", "chunks.jsonl", "--volume-name", "same")
    assert done.returncode == 0, done.stderr
    assert "same.txt on the volume was written by the chunks a, b" in done.stderr


@pytest.mark.full
def test_a_failing_chunk_exits_with_1_and_the_reduction_is_not_run(run, tmp_path):
    (tmp_path / "divide.py").write_text("SUBMIT(y=1 / data[0])")
    (tmp_path / "reduce.py").write_text("SUBMIT(n=len(results))")
    (tmp_path / "rows.jsonl").write_text("1\n0\n")
    done = run("chunks", "divide.py", "--data", "rows.jsonl", "--chunk-size", "1", "--reduce", "reduce.py")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "Reduction" not in done.stdout
    assert "1 of 2 chunks have no result" in done.stderr


@pytest.mark.full
def test_a_sequence_prints_a_row_for_each_step(run, tmp_path):
    (tmp_path / "one.py").write_text("x = 20\nSUBMIT(x=x)")
    (tmp_path / "two.py").write_text("SUBMIT(y=x + 1)")
    done = run("sequence", "one.py", "two.py", "--timeout", "20")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1:3] == [["0", "one.py", "20"], ["1", "two.py", "21"]]


@pytest.mark.parametrize("flags", [[], pytest.param(["--no-stop-on-error"], marks=pytest.mark.full)])
def test_a_sequence_stops_at_the_first_error_unless_told_otherwise(run, tmp_path, flags):
    (tmp_path / "bad.py").write_text("x = 1\nraise ValueError('broken')")
    (tmp_path / "next.py").write_text("SUBMIT(x=x)")
    done = run("sequence", "bad.py", "next.py", *flags)
    assert done.returncode == 1
    assert ("NotRun" in done.stdout) is (not flags)
    assert "ValueError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chunks", "code.py"], "one of the two"),
        (["chunks", "code.py", "--data", "rows.jsonl"], "chunk_size is missing"),
        (["chunks", "code.py", "--data", "nosuch.jsonl", "--chunk-size", "2"], "No such file"),
        (["chunks", "code.py", "--data", "rows.jsonl", "--chunk-size", "0"], "chunk_size"),
        (["chunks", "code.py", "--chunks", "rows.jsonl"], "line 1"),
        (
            ["chunks", "code.py", "--data", "rows.jsonl", "--chunk-size", "1", "--volume-name", "a/b"],
            "no name of a volume",
        ),
        (
            ["chunks", "code.py", "--data", "rows.jsonl", "--chunk-size", "1", "--reduce", "nosuch.py"],
            "nosuch.py cannot",
        ),
        (["sequence"], "FILE"),
        (["sequence", "nosuch.py"], "nosuch.py cannot be read"),
        (["sequence", "code.py", "--max-workers", "2"], "--max-workers"),
        (["volume", "ls", "nosuch"], "no volume 'nosuch'"),
        (["volume", "ls", "../x"], "no name of a volume"),
        (["volume", "ls", "there", "../x"], "no path on a volume"),
        (["volume", "ls", "there", "--provider", "nosuch"], "unknown provider"),
        (["volume", "get", "there", "nosuch"], "no 'nosuch' on the volume"),
        (["volume", "put", "there", "nosuch.txt"], "nosuch.txt cannot be read"),
        (["volume", "rm", "there", "nosuch"], "no 'nosuch' on the volume"),
        (["volume", "rm", "there", "."], "no path is named"),
        (["volume", "rm", "there", "../there"], "no path on a volume"),
        (["volume", "list", "--provider", "nosuch"], "unknown provider"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_status_2(refused, tmp_path, volumes, arguments, said):
    (tmp_path / "code.py").write_text("SUBMIT(fine=1)")
    (tmp_path / "rows.jsonl").write_text("1\n2\n")
    (volumes / "there").mkdir()
    assert said in refused(*arguments)


def test_volumes_are_listed_and_files_are_removed_but_no_directory_unasked(run, refused, volumes):
    for path in ("a/one.txt", "a/deep/two.txt", "b/three.txt"):
        (volumes / path).parent.mkdir(parents=True, exist_ok=True)
        (volumes / path).write_text("x")
    (volumes / "link").symlink_to(volumes / "a")
    (volumes / ".hidden").mkdir()
    (volumes / "a-file").write_text("")
    assert run("volume", "list").stdout.splitlines() == ["a", "b"]
    assert run("volume", "list", "--json").stdout.splitlines() == ['{"name": "a"}', '{"name": "b"}']
    assert run("volume", "ls", "a", "one.txt", "--json").stdout == '{"path": "one.txt", "bytes": 1}\n'
    assert run("volume", "rm", "a", "one.txt").stderr.splitlines() == ["1 file removed from a"]
    assert "deep is a directory with 1 file: --recursive removes it" in refused("volume", "rm", "a", "deep")
    assert (volumes / "a" / "deep" / "two.txt").exists()
    assert run("volume", "rm", "a", "deep", "--recursive").returncode == 0
    assert list((volumes / "a").iterdir()) == []


def test_what_is_here_is_overwritten_only_with_consent(run, refused, volumes, tmp_path):
    (volumes / "here" / "results").mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (volumes / "here" / "results" / name).write_text("new")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "results").mkdir()
    (tmp_path / "home" / "results" / "b.txt").write_text("old")
    sentence = refused("volume", "get", "here", "results", "home")
    assert "home/results/b.txt would be overwritten, and nothing was written: --force overwrites" in sentence
    assert not (tmp_path / "home" / "results" / "a.txt").exists()
    assert run("volume", "get", "here", "results", "home", "--force").returncode == 0
    assert (tmp_path / "home" / "results" / "b.txt").read_text() == "new"


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [("y", 0, "new"), ("n", 2, "old"), pytest.param("", 2, "old", marks=pytest.mark.full)],
)
def test_at_a_terminal_it_is_asked(volumes, tmp_path, answer, status, text):
    (volumes / "here").mkdir()
    (volumes / "here" / "a.txt").write_text("new")
    (tmp_path / "a.txt").write_text("old")
    ours, terminal = os.openpty()
    command = [COMMAND, "volume", "get", "here", "a.txt"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdin=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(ours, 1024)
    assert b"Overwrite a.txt?" in shown
    os.write(ours, answer.encode() + b"\n")
    assert process.wait(30) == status
    os.close(ours)
    assert (tmp_path / "a.txt").read_text() == text


@pytest.mark.full
def test_a_name_that_would_move_the_cursor_is_shown_as_text(run, volumes):
    (volumes / "odd").mkdir()
    (volumes / "odd" / "a\x1b[2J.txt").write_text("x")
    (volumes / "odd" / os.fsdecode(b"b\xff")).write_text("y")
    listed = run("volume", "ls", "odd")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines() == [r"1  a\x1b[2J.txt", r"1  b\udcff"]


@pytest.mark.timeout(400)  # several commands, each of which imports Prefect
@pytest.mark.full
def test_the_examples_run(run, tmp_path):
    import sys

    for name, said in {"word_counts.py": "  the\n", "five_steps.py": "87178291200"}.items():
        program = str(ROOT / "examples" / name)
        done = subprocess.run(
            [sys.executable, program],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
