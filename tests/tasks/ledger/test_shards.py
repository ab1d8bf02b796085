"""The files of a job's shards, and the store of its executions and outcomes."""

import math
from functools import partial

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result
from rlm_batch.blocks.storage.location import write_file
from rlm_batch.flows.plan import Outcomes
from rlm_batch.sandbox.errors import NotRun
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.requests.execution_request import encode_variable
from rlm_batch.tasks.execution import Execution, assign_keys
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import ReportSpec
from rlm_batch.tasks.ledger.shards import ShardFiles, ShardHeader, ShardStore

HEAD = ShardHeader(shards=8, total=3, what="chunk", commit=None)
EXECUTIONS = [
    Execution(30, "a", {"x": 1}, "00" * 32),
    Execution(31, "a", {"x": "\ud800é"}, "11" * 32, {"data": encode_variable([1, "é", math.nan, math.inf])}),
    Execution(32, "b", {}, "22" * 32),
]


@pytest.fixture
def files(tmp_path):
    shard_files = ShardFiles(tmp_path / "run", "abc", 3, 1)
    shard_files.write_work(HEAD, EXECUTIONS)
    return shard_files


def test_a_shard_reads_the_work_that_its_job_wrote(files):
    head, executions = ShardFiles.from_work_path(str(files.work_path)).read_work()
    assert head == HEAD
    assert list(executions) == EXECUTIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[1, 2]\n", "cannot be read"),
        ('{"version": 1, "job": "abc"}\n', "cannot be read"),
        ('{"version": 9, "later": true}\n', r"^\S+jsonl was written by a newer version .*: upgrade rlm-batch"),
    ],
)
def test_damaged_newer_or_foreign_work_is_a_one_sentence_error(files, text, message):
    write_file(files.work_path, text.encode())
    with pytest.raises(ConfigurationError, match=message):
        files.read_work()
    with pytest.raises(ConfigurationError, match="is not a shard's work"):
        ShardFiles.from_work_path(str(files.ledger / "inputs.jsonl"))


@pytest.fixture
def ledger(tmp_path):
    new_ledger = Ledger(tmp_path / "run")
    new_ledger.create()
    yield new_ledger
    new_ledger.close()


def make_store(ledger, executions):
    store = ShardStore(ledger=ledger, total=9)
    for execution in executions:
        store.add_execution(execution)
    return store


def make_executions(count):
    return list(assign_keys([("SUBMIT(y=x*x)", {"x": x}) for x in range(count)], {}))


def result(value):
    return Result({"y": value}, Meta(index=99, submitted=True))


def test_an_outcome_is_announced_once_and_success_replaces_failure(ledger):
    (execution,) = make_executions(1)
    store, read_new_lines = make_store(ledger, [execution]), partial(ledger.read_new_lines, {})
    outcomes = []
    for outcome in (Failure(CodeError("no"), Meta()), result(1), result(2), Failure(CodeError("no"), Meta())):
        ledger.write_outcome(execution.key, outcome)
        outcomes += [store.record_line(line) for line in read_new_lines()]
    assert [outcome is not None for outcome in outcomes] == [True, False, False, False]
    assert [outcome["y"] for outcome in store.outcomes] == [1]
    assert len(store.failures) == 0


def test_outcomes_of_a_deleted_ledger_raise_an_error_that_names_it(ledger):
    (execution,) = make_executions(1)
    ledger.write_outcome(execution.key, result(1))
    store = make_store(ledger, [execution])
    for line in ledger.read_lines():
        store.record_line(line)
    for part in ledger.path.glob("part-*"):
        part.unlink()
    with pytest.raises(OSError, match="is no longer in the ledger"):
        list(store.outcomes)


def test_the_store_has_the_outcomes_in_order_and_cuts_the_rest_into_equal_shards(ledger):
    executions = make_executions(10)
    store, read_new_lines = make_store(ledger, executions[:9]), partial(ledger.read_new_lines, {})
    for index in (5, 1, 0):
        ledger.write_outcome(executions[index].key, result(index))
        for line in read_new_lines():
            store.record_line(line)
    assert [execution.index for execution in store.iterate_unfinished(0, 9)] == [2, 3, 4, 6, 7, 8]
    assert list(store.iterate_unfinished(8, 9)) == executions[8:9]
    assert store.count_unfinished(0, 9) == 6
    assert store.find_starts(0, 9, 3) == [2, 4, 7]
    assert store.find_starts(0, 9, 100) == [2, 3, 4, 6, 7, 8]
    assert store.find_starts(0, 2, 3) == []
    for execution in executions[8:]:  # The last one is not among the store's executions.
        meta = Meta(index=execution.index, is_reduction=execution.index == 9)
        store.add_outcome(execution, Failure(NotRun("not run"), meta))
    assert [outcome.meta.index for outcome in store.outcomes] == [0, 1, 5, 8, 9]
    assert [outcome["y"] for outcome in store.outcomes[:3]] == [0, 1, 5]
    assert [outcome.meta.index for outcome in store.outcomes[::-2]] == [9, 5, 0]
    assert store.outcomes[-1].meta.index == 9
    without_reduction = Outcomes(store.outcomes, [], "", ReportSpec()).split()[0]
    assert [outcome.meta.index for outcome in without_reduction] == [0, 1, 5, 8]
    assert (len(without_reduction), isinstance(without_reduction, list)) == (4, False)  # Memory may not hold them all.
    assert [type(failure.error) for failure in store.failures] == [NotRun, NotRun]
    assert 9 in store
    assert 7 not in store
    with pytest.raises(IndexError):
        store.outcomes[20]
