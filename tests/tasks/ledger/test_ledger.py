"""What the ledger keeps, and what is read of it."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.ledger_line import AskedTrial, LedgerLine, encode_asked_trial
from rlm_batch.tasks.ledger.result_index import ResultIndex
from rlm_batch.tasks.ledger.run_record import RunRecord, find_run_record, list_run_records


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


def test_what_is_written_is_read_as_it_was(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_outcome("b", failure())
    lines = {line.key: line for line in ledger.read_lines()}
    assert lines["a"].to_outcome() == success(1)
    error = lines["b"].to_outcome().error
    assert (type(error), str(error), error.type, error.line) == (CodeError, "it failed", "ValueError", 3)


def test_success_beats_failure_and_then_the_later_beats_the_earlier(ledger):
    for outcome in (success(1), failure(), success(2), failure()):
        ledger.write_outcome("a", outcome)
    assert ledger.load_latest_lines()["a"].to_outcome().value == 2


def test_writers_have_parts_of_their_own_and_readers_see_those_of_all_or_of_some(ledger):
    other = Ledger(ledger.path, part_prefix="job-0001-")
    ledger.write_outcome("a", success(1))
    other.write_outcome("b", success(2))
    other.close()
    assert len(list(ledger.path.glob("part-*.jsonl"))) == 2
    assert set(ledger.load_latest_lines()) == {"a", "b"}
    assert set(ledger.load_latest_lines("job-0001-")) == {"b"}


def test_a_ledger_that_is_followed_gives_each_line_once_when_it_is_whole(ledger):
    read_new_lines = ledger.follow_lines()
    ledger.write_outcome("a", success(1))
    assert [line.key for line in read_new_lines()] == ["a"]
    assert list(read_new_lines()) == []
    ledger.write_outcome("b", success(2))
    other = Ledger(ledger.path)
    other.write_outcome("c", success(3))
    other.close()
    with open(next(iter(Path(str(other.path)).glob("part-*.jsonl"))), "ab") as torn:
        torn.write(b'{"key": "d", ')
    assert {line.key for line in read_new_lines()} == {"b", "c"}
    assert list(read_new_lines()) == []


def test_a_torn_last_line_and_damaged_ones_are_passed_over(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_outcome("b", success(2))
    ledger.close()
    (part,) = ledger.path.glob("part-*.jsonl")
    whole = part.read_bytes()
    part.write_bytes(whole[:-10])
    assert set(ledger.load_latest_lines()) == {"a"}
    part.write_bytes(b"not json\n{}\n" + whole)
    assert set(ledger.load_latest_lines()) == {"a", "b"}


def test_a_line_with_what_is_no_outcome_is_passed_over_as_a_damaged_one_is(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_outcome("b", failure())
    lines = {line.key: line for line in ledger.read_lines()}
    changes = [
        ("a", {"meta": 5}),
        ("a", {"outputs": [1]}),
        ("a", {"at": "noon"}),
        ("a", {"index": "first"}),
        ("a", {"key": ["a"]}),
        ("a", {"meta": {"layers": 5}}),
        ("a", {"meta": {"queries": {"tree": 5}}}),
        ("a", {"error": {}}),
        ("a", {"version": None}),
        ("a", {"version": "1"}),
        ("a", {"version": 0}),
        ("b", {"error": "it failed"}),
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


def test_a_line_of_a_newer_version_is_refused_with_what_to_do(ledger):
    ledger.write_outcome("a", success(1))
    ledger.write_line(encode_asked_trial(AskedTrial("b", 1, {}, 0, "search")))
    (part,) = ledger.path.glob("part-*.jsonl")
    outcome, trial = part.read_bytes().replace(b'"version":1', b'"version":2').splitlines(keepends=True)
    refused = pytest.raises(ConfigurationError, match=f"^{part} was written by a newer version .*: upgrade rlm-batch")
    for lines in (outcome, trial, outcome[:-10] + b"\n" + outcome):
        part.write_bytes(lines)
        with refused:
            ledger.load_latest_lines()
        with refused:
            list(ledger.read_trial_lines())
        with refused:
            ResultIndex(ledger.path.parent).refresh()
    part.write_bytes(outcome[:-10])
    assert ledger.load_latest_lines() == {}


def test_a_run_record_of_a_newer_version_is_refused_and_damaged_ones_are_skipped(ledger):
    record = RunRecord("batch", str(ledger.path), "id", "quick-fox")
    record.write()
    path = ledger.path / f"run-{record.id}.json"
    text = path.read_text()
    for damaged in ("", "[]", "{}", text.replace('"version": 1', '"version": "1"'), text.replace('"flow"', '"flaw"')):
        (ledger.path / "run-other.json").write_text(damaged)
        assert list_run_records(ledger.path) == [record]
        assert find_run_record(ledger.path.parent, "quick-fox") == record
    path.write_text(text.replace('"version": 1', '"version": 2'))
    refused = pytest.raises(ConfigurationError, match=f"^{path} was written by a newer version .*: upgrade rlm-batch")
    with refused:
        list_run_records(ledger.path)
    with refused:
        find_run_record(ledger.path.parent, "quick-fox")


def test_a_long_ledger_is_cut_into_parts(ledger, monkeypatch):
    monkeypatch.setattr("rlm_batch.tasks.ledger.ledger.PART_SIZE_BYTES", 1000)
    for number in range(20):
        ledger.write_outcome(str(number), success(number))
    assert len(list(ledger.path.glob("part-*.jsonl"))) > 3
    assert {key: line.to_outcome().value for key, line in ledger.load_latest_lines().items()} == {
        str(n): n for n in range(20)
    }


def test_a_path_that_cannot_be_made_is_one_sentence_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file/below.*results_path"):
        Ledger(tmp_path / "file" / "below").create()


def test_what_is_written_after_a_line_that_was_cut_short_is_on_a_line_of_its_own(ledger):
    """A disk can be full for one writer's line, and have room again for the next."""
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


def test_a_ledger_that_is_removed_under_its_writer_is_there_again_with_all_that_this_one_wrote(ledger):
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


def test_a_writer_that_is_killed_in_the_middle_of_a_line_takes_no_other_with_it(tmp_path):
    """Two writers of one ledger, each killed at any moment: every line that is read is whole, and each its own."""
    program = (
        "import sys\nfrom rlm_batch import Result\nfrom rlm_batch.sandbox.meta import Meta\n"
        "from rlm_batch.tasks.ledger.ledger import Ledger\nledger = Ledger(sys.argv[1])\nledger.create()\n"
        "for number in range(10**9):\n"
        "    ledger.write_outcome(sys.argv[2] + str(number), "
        "Result({'value': sys.argv[2] * 300_000}, Meta(index=number)))\n"
        "    print(number, flush=True)\n"
    )
    printed = {}
    for name in "ab":
        command = [sys.executable, "-c", program, str(tmp_path / "run"), name]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        printed[name] = [writer.stdout.readline() for _ in range(3)]
        writer.kill()
        printed[name] += writer.stdout.readlines()
        writer.wait()
        writer.stdout.close()
    lines_by_writer = {
        name: [line for line in Ledger(tmp_path / "run").read_lines() if line.key[0] == name] for name in "ab"
    }
    for name, lines in lines_by_writer.items():
        assert len(lines) in (len(printed[name]), len(printed[name]) + 1)
        assert {read_value(line) for line in lines} == {name * 300_000}


def test_the_index_finds_results_of_every_run_below_its_root_and_only_successes(tmp_path):
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


def test_the_index_forgets_a_ledger_that_is_gone(tmp_path):
    ledger = Ledger(tmp_path / "run")
    ledger.create()
    ledger.write_outcome("a", success(1))
    ledger.close()
    index = ResultIndex(tmp_path)
    index.refresh()
    for part in (tmp_path / "run").glob("part-*"):
        part.unlink()
    assert index.find_result("a") is None


def test_a_second_writer_is_told_of_the_first_until_that_has_died(ledger, tmp_path):
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


def test_an_index_that_cannot_be_used_is_a_sentence(tmp_path):
    (tmp_path / "index.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(OSError, match=r"^the index of the results, .* cannot be used \(file is not a database\)"):
        ResultIndex(tmp_path).refresh()


def test_a_line_is_strict_json_also_of_numbers_that_are_not_finite_and_is_read_as_what_they_were(ledger):
    outcome = Result({"curve": [0.5, math.nan, None]}, Meta(submitted=True, variables={"lr": -math.inf}))
    ledger.write_outcome("a", outcome)
    ledger.close()
    (part,) = ledger.path.glob("part-*.jsonl")
    line = json.loads(part.read_text(), parse_constant=pytest.fail)
    assert line["outputs"] == {"curve": [0.5, None, None]}
    assert line["nonfinite"] == {"/curve/1": "nan"}
    assert line["meta"]["nonfinite"] == {"/lr": "-inf"}
    for _ in range(2):
        found = ledger.load_latest_lines()["a"].to_outcome()
        assert repr(found.outputs) == "{'curve': [0.5, nan, None]}"
        assert found.meta.variables == {"lr": -math.inf}
    for damage in ({"/curve/0": "nan"}, {"/curve/9": "nan"}, {"/curve/1": "none"}, ["/curve/1"], "nan"):
        part.write_text(json.dumps(line | {"nonfinite": damage}) + "\n")
        assert ledger.load_latest_lines() == {}
