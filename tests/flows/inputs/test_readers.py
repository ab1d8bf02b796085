"""How often a file of inputs is read: once, whether its values fit in memory or not."""

import json
import os
import threading
from pathlib import Path

import pytest

from rlm_batch.flows.batch import executions
from rlm_batch.flows.inputs.chunking import build_chunks
from rlm_batch.flows.sweep import list_points


@pytest.mark.parametrize("filler", [1, 10_000_000], ids=["in memory", "on disk"])
def test_a_pipe_that_is_checked_and_then_run_is_read_once(tmp_path: Path, filler: int) -> None:
    lines, cells = tmp_path / "in.jsonl", tmp_path / "in.csv"
    for pipe, text in ((lines, '{"x": 1}\n{"x": 2}\n'), (cells, "x\n1\n2\nthree\n")):
        os.mkfifo(pipe)
        data = text + "\n" * filler  # blank lines are none
        threading.Thread(target=pipe.write_text, args=(data,), daemon=True).start()
    checked = executions("SUBMIT(y=x)", str(lines))
    assert [variables for _, variables in executions("SUBMIT(y=x)", str(lines))] == [{"x": 1}, {"x": 2}]
    assert len(checked) == 2
    points = list_points(None, str(cells))  # a column of numbers that ends with text
    assert list(list_points(None, str(cells))) == [{"x": "1"}, {"x": "2"}, {"x": "three"}]
    assert len(points) == 3


def test_a_file_that_has_changed_is_read_again_and_who_has_read_it_keeps_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"id": n, "data": n}) + "\n" for n in range(5)))
    held, whole, cut = (
        list_points(None, str(file)), build_chunks(str(file), None, None), build_chunks(None, str(file), 2)
    )  # fmt: skip
    assert (len(held), len(list(whole)), len(list(cut))) == (5, 5, 3)
    with file.open("a") as more:
        more.write('{"id": 5, "data": 5}\n')
    assert len(list_points(None, str(file))) == 6
    assert len(list(held)) == 5
