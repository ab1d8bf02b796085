"""The contents of a ledger: outcomes, a search's points and reports, models' answers, and collected files."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.queries.budget import Usage
from rlm_batch.tasks.ledger.collected_files import CollectedFilesStore
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.ledger_line import (
    AskedTrial,
    LedgerLine,
    TrialReport,
    count_usage,
    encode_asked_trial,
    encode_trial_report,
)
from rlm_batch.tasks.ledger.model_ledgers import AnswerLedger
from rlm_batch.tasks.ledger.result_index import ResultIndex
from rlm_batch.tasks.ledger.run_record import RunRecord, list_run_records, read_known_runs


def read_value(line: LedgerLine | None):
    assert line is not None
    return line.to_outcome().value


def success(value: int, index: int = 0) -> Result:
    return Result({"value": value}, Meta(index=index, submitted=True))


def failure(index: int = 0) -> Failure:
    return Failure(CodeError("it failed", type="ValueError", line=3), Meta(index=index))


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "run")
    ledger.create()
    yield ledger
    ledger.close()


def test_outcomes_are_read_as_they_were_written(ledger):
    for outcome in (failure(), success(2), success(1), failure()):  # A success replaces a failure.
        ledger.write_outcome("a", outcome)
    ledger.write_outcome("b", failure())
    lines = ledger.load_latest_lines()
    assert lines["a"].to_outcome() == success(1)
    error = lines["b"].to_outcome().error
    assert (type(error), str(error), error.type, error.line) == (CodeError, "it failed", "ValueError", 3)


def test_a_follower_gets_each_line_once_it_is_complete(ledger):
    read_new_lines = partial(ledger.read_new_lines, {})
    ledger.write_outcome("a", success(1))
    (part,) = ledger.path.glob("part-*.jsonl")
    line = part.read_bytes()
    for piece, keys in ((b"", ["a"]), (line[:9], []), (line[9:], ["a"]), (b"", [])):
        with part.open("ab") as file:
            file.write(piece)
        assert [line.key for line in read_new_lines()] == keys


def test_incomplete_and_damaged_lines_pipes_and_devices_are_skipped(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_outcome("b", success(2))
    ledger.close()
    (part,) = ledger.path.glob("part-*.jsonl")
    whole = part.read_bytes()
    part.write_bytes(whole[:-10])
    assert set(ledger.load_latest_lines()) == {"a"}
    part.write_bytes(b"not json\n{}\n" + whole)
    os.mkfifo(ledger.path / "part-a-1.jsonl")
    (ledger.path / "part-b-1.jsonl").symlink_to("/dev/zero")
    (ledger.path / "part-c-1.jsonl").touch()
    os.truncate(ledger.path / "part-c-1.jsonl", 1 << 40)
    assert set(ledger.load_latest_lines()) == {"a", "b"}
    assert count_usage(ledger.list_parts()) == Usage()


def test_a_write_after_an_incomplete_line_starts_a_new_line(ledger):
    """A disk can be full for one writer's line and have room again for the next line."""
    ledger.write_outcome("a", success(1))
    (part,) = ledger.path.glob("part-*.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (part.stat().st_size + 20, hard))
    try:
        with pytest.raises(OSError, match=str(ledger.path)):
            ledger.write_outcome("b", success(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ledger.write_outcome("c", success(3))
    assert set(ledger.load_latest_lines()) == {"a", "c"}


def test_a_line_without_an_outcome_is_skipped(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_outcome("b", failure())
    lines = {line.key: line for line in ledger.read_lines()}
    changes = [
        ("a", {"meta": 5}),
        ("a", {"outputs": [1]}),
        ("a", {"at": "noon"}),
        ("a", {"key": ["a"]}),
        *(("a", {"meta": {"seconds": value}}) for value in ("long", "5", True, 1e308)),
        ("a", {"meta": {"queries": {"calls": 10**400}}}),
        ("a", {"index": 10**400}),
        ("a", {"error": {}}),
        ("a", {"version": "1"}),
        ("b", {"error": {}}),
        ("b", {"status": "done"}),
    ]
    with open(lines["a"].position.part, "ab") as part:
        for key, change in changes:
            line = {**lines[key].data, "at": time.time() + 60, **change}
            part.write(json.dumps(line).encode() + b"\n")
        part.write(b"[" * 100_000 + b"\n5\n")
    assert {key: (line.is_success, line.written_at) for key, line in ledger.load_latest_lines().items()} == {
        key: (line.is_success, line.written_at) for key, line in lines.items()
    }
    for line in ledger.read_lines():
        assert line.to_outcome() is not None


def test_a_writer_restores_its_deleted_ledger(ledger):
    for number in range(3):
        ledger.write_outcome(str(number), success(number))
    shutil.rmtree(ledger.path)
    ledger.write_outcome("later", success(3))
    (ledger.path / os.listdir(ledger.path)[0]).unlink()
    ledger.write_outcome("last", success(4))
    assert {key: line.to_outcome().value for key, line in ledger.load_latest_lines().items()} == {
        "0": 0, "1": 1, "2": 2, "later": 3, "last": 4,
    }  # fmt: skip
    ledger.close()
    shutil.rmtree(ledger.path)
    ledger.write_outcome("after all", success(5))
    assert set(ledger.load_latest_lines()) == {"after all"}


def test_a_line_of_a_newer_version_is_refused_with_the_fix(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_line(encode_asked_trial(AskedTrial("b", 1, {}, 0, "search")))
    (part,) = ledger.path.glob("part-*.jsonl")
    outcome, trial = part.read_bytes().replace(b'"version":1', b'"version":2').splitlines(keepends=True)
    refused = pytest.raises(ConfigurationError, match=f"^{part} was written by a newer version .*: upgrade rlm-batch")
    readers = [
        ledger.load_latest_lines,
        lambda: list(ledger.read_search_lines()),
        ResultIndex(ledger.path.parent).refresh,
    ]
    for lines in (outcome, trial, outcome[:-10] + b"\n" + outcome):
        part.write_bytes(lines)
        for read in readers:
            with refused:
                read()
    part.write_bytes(outcome[:-10])
    assert ledger.load_latest_lines() == {}
    ledger.close()
    answers = part.with_name("answers-a-1.jsonl")
    answers.write_text('{"version": 2, "status": "answered", "key": "a", "answer": "yes"}\n')
    with pytest.raises(ConfigurationError, match=f"^{answers} was written by a newer version"):
        open_answers(ledger.path, ledger.path.parent / "elsewhere")


def test_newer_run_records_are_refused_and_damaged_ones_are_skipped(ledger):
    record = RunRecord("batch", str(ledger.path), "id", "quick-fox")
    record.write()
    path = ledger.path / f"run-{record.id}.json"
    text = path.read_text()
    changes = {
        '"version": 1': '"version": "1"',
        '"flow"': '"flaw"',
        '"sandbox_seconds": 0.0': '"sandbox_seconds": 1e999',
    }
    for damaged in ("", "[]", "{}", *(text.replace(old, new) for old, new in changes.items())):
        assert damaged != text
        (ledger.path / "run-other.json").write_text(damaged)
        assert list_run_records(ledger.path) == [record]
        assert read_known_runs(ledger.path.parent).find("quick-fox") == record
    path.write_text(text.replace('"version": 1', '"version": 2'))
    refused = pytest.raises(ConfigurationError, match=f"^{path} was written by a newer version .*: upgrade rlm-batch")
    with refused:
        list_run_records(ledger.path)
    assert read_known_runs(ledger.path.parent).records == []


def test_a_long_ledger_is_split_into_parts(ledger, monkeypatch):
    monkeypatch.setattr("rlm_batch.tasks.ledger.ledger.PART_SIZE_BYTES", 1000)
    for number in range(20):
        ledger.write_outcome(str(number), success(number))
    assert len(list(ledger.path.glob("part-*.jsonl"))) > 3
    assert {key: line.to_outcome().value for key, line in ledger.load_latest_lines().items()} == {
        str(n): n for n in range(20)
    }


def test_a_path_that_cannot_be_created_is_a_one_sentence_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file/below.*results_path"):
        Ledger(tmp_path / "file" / "below").create()


def test_the_index_finds_only_successes_of_all_runs_below_its_root(tmp_path):
    for run in ("one", "two"):
        ledger = Ledger(tmp_path / run)
        ledger.create()
        ledger.write_outcome(f"good {run}", success(1))
        ledger.write_outcome(f"bad {run}", failure())
        ledger.close()
    index = ResultIndex(tmp_path)
    index.refresh()
    assert read_value(index.find_result("good one")) == 1
    assert index.find_result("good two") is not None
    assert index.find_result("bad one") is None
    later = Ledger(tmp_path / "two")
    later.write_outcome("later", success(3))
    later.close()
    assert index.find_result("later") is None
    index.refresh()
    assert read_value(index.find_result("later")) == 3
    shutil.rmtree(tmp_path / "two")
    assert index.find_result("later") is None


def test_a_second_writer_sees_the_first_until_it_dies(ledger, tmp_path):
    program = (
        "import sys, time\nfrom rlm_batch.tasks.ledger.ledger import Ledger\nledger = Ledger(sys.argv[1])\n"
        "print(ledger.register_writer(), flush=True)\ntime.sleep(1000)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "True\n"
        assert not ledger.register_writer()
        ledger.unregister_writer()
        writer.kill()
        writer.wait()
    assert ledger.register_writer()
    ledger.unregister_writer()


def test_lines_are_strict_json_and_restore_nonfinite_numbers(ledger):
    outcome = Result({"curve": [0.5, math.nan, None]}, Meta(submitted=True, variables={"lr": -math.inf}))
    ledger.write_outcome("a", outcome)
    ledger.close()
    (part,) = ledger.path.glob("part-*.jsonl")
    line = json.loads(part.read_text(), parse_constant=pytest.fail)
    assert line["outputs"] == {"curve": [0.5, None, None]}
    assert line["nonfinite"] == {"/curve/1": "nan"}
    assert line["meta"]["nonfinite"] == {"/lr": "-inf"}
    for _ in range(2):
        read_outcome = ledger.load_latest_lines()["a"].to_outcome()
        assert repr(read_outcome.outputs) == "{'curve': [0.5, nan, None]}"
        assert read_outcome.meta.variables == {"lr": -math.inf}
    for damage in ({"/curve/0": "nan"}, {"/curve/9": "nan"}, {"/curve/1": "none"}, ["/curve/1"], "nan"):
        part.write_text(json.dumps(line | {"nonfinite": damage}) + "\n")
        assert ledger.load_latest_lines() == {}


def write_trial(ledger: Ledger, number: int) -> None:
    key = f"key {number}"
    ledger.write_line(encode_asked_trial(AskedTrial(key, number, {"x": number / 2, "opt": "é"}, 0, "search")))
    for step, value in enumerate((0.5, math.nan, -math.inf)):
        ledger.write_line(encode_trial_report(TrialReport(key, number, step, value, is_pruned=step == 2)))
    ledger.write_outcome(key, Result({"loss": 1}, Meta(number, reports=((0, 0.5), (1, math.nan)), pruned=True)))


def test_search_lines_of_several_writers_are_read_in_order(tmp_path: Path) -> None:
    for number in range(4):
        ledger = Ledger(tmp_path)  # the names of the part files have no order
        write_trial(ledger, number)
        ledger.close()
    lines = list(Ledger(tmp_path).read_search_lines())
    kinds = [type(line) for line in lines]
    assert kinds == 4 * [AskedTrial, TrialReport, TrialReport, TrialReport, LedgerLine]
    assert [line.index for line in lines if isinstance(line, AskedTrial)] == [0, 1, 2, 3]
    asked, first, second, third, _ = lines[:5]
    assert isinstance(asked, AskedTrial)
    assert (asked.variables, asked.alternative, asked.search) == ({"x": 0.0, "opt": "é"}, 0, "search")
    values = [line.value for line in (first, second, third) if isinstance(line, TrialReport)]
    assert (values[0], math.isnan(values[1]), values[2]) == (0.5, True, -math.inf)
    assert [line.is_pruned for line in (first, second, third) if isinstance(line, TrialReport)] == [False, False, True]


def test_incomplete_and_damaged_search_lines_are_skipped(tmp_path: Path) -> None:
    good = encode_asked_trial(AskedTrial("key", 3, {"x": 1}, 0, "search"))
    asked = json.loads(good)
    report = json.loads(encode_trial_report(TrialReport("key", 3, 1, 0.5, is_pruned=False)))
    damaged = [
        *({**asked, name: value} for name, value in (("index", "three"), ("variables", []))),
        *({**report, name: value} for name, value in (("step", None), ("value", "high"))),
        {name: value for name, value in asked.items() if name != "search"},
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in damaged)
    (tmp_path / "part-a-1.jsonl").write_bytes(b"\xff\n" + data + good + good[:-20])
    (line,) = Ledger(tmp_path).read_search_lines()
    assert isinstance(line, AskedTrial)


LONG = "a line\nand \ud800 more\0" * 50_000


def open_answers(place: Any, root: Path) -> AnswerLedger:
    """Return the answers as a new run loads them."""
    answers = AnswerLedger(place, root)
    answers.load()
    return answers


def test_an_answer_is_found_until_its_line_is_damaged_or_deleted(tmp_path: Path):
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
    later = open_answers(root / "two", root)
    (root / "answers.sqlite").write_bytes(b"no database at all" * 100)
    assert [later.find_answer(key) for key in "ab"] == [None, None]


def test_answers_in_a_bucket_are_found_by_the_same_and_later_runs(s3: Any, tmp_path: Path):
    first = open_answers("s3://results/answers/job", tmp_path)
    first.add_answer("a", "model", "yes")
    assert first.find_answer("a") == "yes"
    first.close()
    later = open_answers("s3://results/answers/job", tmp_path)
    assert [later.find_answer(key) for key in "ab"] == ["yes", None]


@pytest.mark.anyio
async def test_collected_files_use_at_most_half_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([40, 30, 10])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    store, problems = CollectedFilesStore(tmp_path), list[str]()
    for number in range(3):
        async with store.open_partial() as partial:
            partial.mkdir(parents=True)
            (partial / "data.bin").touch()
            meta = store.publish(partial, str(number), Meta(collected=(str(partial / "data.bin"),)), is_final=True)
            problems += meta.not_collected
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["0", "1"]
    (problem,) = problems
    assert "may take half of the free disk" in problem
