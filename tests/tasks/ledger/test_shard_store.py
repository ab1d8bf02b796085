"""A job's executions and outcomes are looked up, not held."""

import math

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result
from rlm_batch.sandbox.errors import NotRun
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.requests.encoded_variable import encode_variable
from rlm_batch.tasks.execution import Execution, assign_keys
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.shard_store import ShardStore


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path / "run")
    found.create()
    yield found
    found.close()


def make_store(ledger, executions):
    store = ShardStore(ledger=ledger)
    for execution in executions:
        store.add_execution(execution)
    return store


def squares(count):
    return list(assign_keys([("SUBMIT(y=x*x)", {"x": x}) for x in range(count)], {}))


def result(value):
    return Result({"y": value}, Meta(index=99, submitted=True))


def test_outcomes_are_in_the_order_of_the_executions_whatever_the_order_in_which_they_came(ledger):
    executions = squares(20)
    store, read_new_lines = make_store(ledger, executions), ledger.follow_lines()
    for execution in reversed(executions):
        ledger.write_outcome(execution.key, result(execution.index))
        for line in read_new_lines():
            store.record_line(line)
    assert [outcome["y"] for outcome in store.outcomes] == list(range(20))
    assert [outcome.meta.index for outcome in store.outcomes] == list(range(20))
    assert store.outcomes[-1]["y"] == 19
    assert [outcome["y"] for outcome in store.outcomes[5:8]] == [5, 6, 7]
    assert [outcome["y"] for outcome in store.outcomes[::-7]] == [19, 12, 5]
    with pytest.raises(IndexError):
        store.outcomes[20]


def test_an_outcome_is_told_once_and_a_success_takes_the_place_of_a_failure(ledger):
    (execution,) = squares(1)
    store, read_new_lines = make_store(ledger, [execution]), ledger.follow_lines()
    outcomes = []
    for outcome in (Failure(CodeError("no"), Meta()), result(1), result(2), Failure(CodeError("no"), Meta())):
        ledger.write_outcome(execution.key, outcome)
        outcomes += [store.record_line(line) for line in read_new_lines()]
    assert [outcome is not None for outcome in outcomes] == [True, False, False, False]
    assert [outcome["y"] for outcome in store.outcomes] == [1]
    assert len(store.failures) == 0


def test_what_is_undone_is_what_was_added_and_has_no_outcome(ledger):
    executions = [
        Execution(0, "a", {"x": 1}, "00" * 32),
        Execution(
            1,
            "a",
            {"x": "\ud800"},
            "11" * 32,
            {"data": encode_variable([1, "é", math.nan])},
        ),
        Execution(2, "b", {}, "22" * 32),
    ]
    store = make_store(ledger, executions)
    assert list(store.iterate_unfinished(0, 3)) == executions
    ledger.write_outcome(executions[0].key, result(1))
    for line in ledger.read_lines():
        store.record_line(line)
    assert list(store.iterate_unfinished(0, 3)) == executions[1:]
    assert list(store.iterate_unfinished(2, 3)) == executions[2:]
    assert store.count_unfinished(0, 3) == 2


def test_a_result_from_before_is_found_by_its_key_and_a_failure_is_not(ledger):
    first, second = squares(2)
    ledger.write_outcome(first.key, result(1))
    ledger.write_outcome(first.key, result(2))
    ledger.write_outcome(second.key, Failure(CodeError("no"), Meta()))
    store = ShardStore(ledger=ledger)
    for line in ledger.read_lines():
        store.add_previous_line(line)
    found = store.find_previous_line(first.key)
    assert found is not None
    assert found.to_outcome()["y"] == 2
    assert store.find_previous_line(second.key) is None


def test_a_failure_that_no_ledger_has_stands_among_the_outcomes(ledger):
    first, second = squares(2)
    store = make_store(ledger, [first])
    for execution in (first, second):
        store.add_outcome(execution, Failure(NotRun("not run"), Meta(index=execution.index)))
    assert [type(failure.error) for failure in store.failures] == [NotRun, NotRun]
    assert 1 in store
    assert 2 not in store


def test_variables_that_are_no_json_are_refused_by_number(ledger):
    with pytest.raises(ConfigurationError, match="the variables of number 3 are not JSON"):
        make_store(ledger, [Execution(3, "", {"x": {1, 2}}, "00" * 32)])


def test_outcomes_whose_ledger_has_gone_are_an_error_that_names_it(ledger):
    (execution,) = squares(1)
    ledger.write_outcome(execution.key, result(1))
    store = make_store(ledger, [execution])
    for line in ledger.read_lines():
        store.record_line(line)
    for part in ledger.path.glob("part-*"):
        part.unlink()
    with pytest.raises(OSError, match="is no longer in the ledger"):
        list(store.outcomes)
