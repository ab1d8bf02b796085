"""How often a file of inputs is parsed: once, whether its values fit in memory or not."""

import gc
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.flows.batch import executions
from rlm_batch.flows.inputs import block_spool, csv_blocks, readers
from rlm_batch.flows.inputs.chunking import build_chunks
from rlm_batch.flows.sweep import list_points

OPENERS: dict[str, Callable[[str], Any]] = {
    "inputs": lambda path: executions("SUBMIT(x=id)", path),
    "points": lambda path: list_points(None, path),
    "chunks": lambda path: build_chunks(path, None, None),
    "data": lambda path: build_chunks(None, path, 2),
}


@pytest.fixture(params=["jsonl", "csv"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"in.{request.param}"
    lines = {
        "jsonl": [json.dumps({"id": n, "data": n}) for n in range(5)],
        "csv": ["id,data", *(f"{n},{n}" for n in range(5))],
    }
    path.write_text("\n".join(lines[request.param]))
    return path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were parsed, as often as that happened."""
    parsed: list[str] = []
    for name in ("_parse_json_lines", "_parse_table"):
        parse = getattr(readers.InputFile, name)

        def counted(self: readers.InputFile, *arguments: Any, parse: Any = parse) -> Any:
            parsed.append(Path(str(self.path)).name)
            return parse(self, *arguments)

        monkeypatch.setattr(readers.InputFile, name, counted)
    return parsed


@pytest.mark.parametrize("what", OPENERS)
@pytest.mark.parametrize("limit", [block_spool.MEMORY_BYTES, 1], ids=["small", "large"])
def test_a_file_that_is_checked_and_then_run_is_parsed_once(
    file: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch, what: str, limit: int
) -> None:
    monkeypatch.setattr(block_spool, "MEMORY_BYTES", limit)
    checked = OPENERS[what](str(file))  # as the command line does before there is a server
    run = OPENERS[what](str(file))  # as the flow does
    assert len(checked) == len(run) == (3 if what == "data" else 5)
    values = list(run)
    assert len(values) == len(run)
    assert parsed == [file.name]


def test_a_file_that_has_changed_or_that_nobody_holds_is_read_again(file: Path, parsed: list[str]) -> None:
    held = list_points(None, str(file))
    file.write_text(file.read_text() + "\n" + file.read_text().splitlines()[-1])
    assert len(list_points(None, str(file))) == len(held) + 1
    del held
    gc.collect()
    list_points(None, str(file))
    assert len(parsed) == 3


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text('{"x": 1}\n{"x": 2}\n'), daemon=True).start()
    checked = executions("SUBMIT(y=x)", str(pipe))
    assert [variables for _, variables in executions("SUBMIT(y=x)", str(pipe))] == [{"x": 1}, {"x": 2}]
    assert len(checked) == 2


def test_a_pipe_whose_column_of_numbers_ends_with_text_is_read_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_blocks, "BLOCK_CHARACTERS", 2)
    pipe = tmp_path / "in.csv"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text("x\n1\n2\nthree\n"), daemon=True).start()
    assert list(list_points(None, str(pipe))) == [{"x": "1"}, {"x": "2"}, {"x": "three"}]
