"""Answers in ledgers: what is written is found again, and what is damaged or gone is asked again."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.tasks.ledger.answer_ledger import AnswerLedger, make_answer_index
from rlm_batch.tasks.ledger.ledger import Ledger

LONG = "a line\nand \ud800 more\0" * 50_000


def open_answers(place: Any, root: Path, warnings: list[str] | None = None) -> AnswerLedger:
    """The answers there, as a run that begins now has them. By default nothing may go wrong."""
    answers = AnswerLedger(place, make_answer_index(root), pytest.fail if warnings is None else warnings.append)
    answers.load()
    return answers


def test_an_answer_is_found_in_its_own_run_and_by_later_ones_until_its_line_is_damaged_or_gone(tmp_path: Path):
    root = tmp_path / "root"
    first = open_answers(root / "one", root)
    first.add_answer("a", "model", "yes")
    first.add_answer("b", "model", LONG)
    assert [first.find_answer(key) for key in "abc"] == ["yes", LONG.encode("utf-8", "replace").decode(), None]
    (part,) = (root / "one").glob("answers-*.jsonl")
    with part.open("ab") as file:
        file.write(b'[1]\n{"version": 1, "status": "answered", "key": "c"}\n')
        file.write(b'{"version": 1, "status": "answered", "key": 1, "answer": "x"}\n')
        file.write(b'{"status": "answered", "key": "c", "answer": "of no version"}\n')
        file.write(b"[" * 100_000 + b'\n{"status": "answered", "key": "c", "answer": "to')
    first.close()
    assert list(Ledger(root / "one").read_lines()) == []

    for place in (root / "one", root / "two", tmp_path / "elsewhere"):
        later = open_answers(place, root)
        assert [later.find_answer(key) for key in "ac"] == ["yes", None]
    part.write_bytes(part.read_bytes().replace(b'"a"', b'"z"'))
    assert later.find_answer("a") is None
    shutil.rmtree(root / "one")
    assert open_answers(root / "two", root).find_answer("b") is None
    warnings: list[str] = []
    later = open_answers(root / "two", root, warnings)
    (root / "answers.sqlite").write_bytes(b"no database at all" * 100)
    assert [later.find_answer(key) for key in "ab"] == [None, None]
    assert len(warnings) == 1
    assert "answers.sqlite, cannot be used" in warnings[0]


def test_an_answer_of_a_newer_version_is_refused(tmp_path: Path):
    open_answers(tmp_path / "one", tmp_path).add_answer("a", "model", "yes")
    (part,) = (tmp_path / "one").glob("answers-*.jsonl")
    part.write_bytes(part.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(ConfigurationError, match=f"^{part} was written by a newer version .*: upgrade rlm-batch"):
        open_answers(tmp_path / "one", tmp_path / "elsewhere")


def test_answers_in_a_bucket_are_found_in_their_own_run_and_by_later_ones(s3: Any, tmp_path: Path):
    first = open_answers("s3://results/answers/job", tmp_path)
    first.add_answer("a", "model", "yes")
    assert first.find_answer("a") == "yes"
    first.close()
    later = open_answers("s3://results/answers/job", tmp_path)
    assert [later.find_answer(key) for key in "ab"] == ["yes", None]
