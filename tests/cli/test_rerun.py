"""The command `rerun`: one execution of an earlier run, alone, with the run's own code, variables and options."""

import json
from pathlib import Path

import pytest

from .conftest import Run

CODE = "print(f'x is {x}', flush=True)\nif x == 2:\n    raise ValueError('two')\nSUBMIT(y=x * 10)"


def find_results(printed: str) -> str:
    """Return the path in the last line that the command printed."""
    return printed.splitlines()[-1].rpartition(": ")[2]


@pytest.mark.parametrize(
    ("command", "number", "status", "output"),
    [
        (["batch", "code.py", "--inputs", "in.jsonl"], 1, 1, "x is 2"),
        (["batch", "code.py", "--inputs", "in.jsonl"], 2, 0, "x is 3"),
        (["sweep", "code.py", "--grid", "x=1,3", "--maximize", "y"], 1, 0, "x is 3"),
        (["sweep", "code.py", "--space", "x=5..5", "--trials", "2", "--maximize", "y"], 1, 0, "x is 5"),
    ],
    ids=["a failure", "a success", "a point of a grid", "a point of a search"],
)
def test_an_execution_runs_again_with_its_output_live(
    run_alone: Run, tmp_path: Path, command: list[str], number: int, status: int, output: str
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"x": x}) + "\n" for x in (1, 2, 3)))
    first = run_alone(*command)
    path = find_results(first.stdout)
    (tmp_path / "code.py").write_text("raise RuntimeError('a later version of the code')")
    done = run_alone("rerun", path, str(number))
    assert done.returncode == status, done.stderr
    assert output in done.stderr
    assert ("ValueError" in done.stderr) == bool(status)
    assert path not in done.stdout


def test_a_chunk_runs_again_with_its_data(run_alone: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("print(chunk_id, data, flush=True)\nSUBMIT(total=sum(data))")
    (tmp_path / "data.jsonl").write_text("1\n2\n3\n")
    first = run_alone("chunks", "code.py", "--data", "data.jsonl", "--chunk-size", "2")
    done = run_alone("rerun", find_results(first.stdout), "1", "--json")
    assert json.loads(done.stdout.splitlines()[0])["outputs"] == {"total": 3}
    assert "[3]" in done.stderr


def test_what_cannot_run_again_is_one_sentence(run_alone: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("SUBMIT(y=1)")
    path = find_results(run_alone("batch", "code.py").stdout)
    for words, reason in (
        (["nothing", "0"], "there is no run 'nothing'"),
        ([path, "7"], "no execution 7, or it needs others: rlm-batch report"),
        ([path, "-1"], "no execution -1"),
    ):
        done = run_alone("rerun", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert reason in done.stderr
    path = find_results(run_alone("sequence", "code.py").stdout)
    assert "rerun takes runs of batch, sweep and chunks" in run_alone("rerun", path, "0").stderr
