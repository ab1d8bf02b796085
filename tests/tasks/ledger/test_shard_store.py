"""A job's executions and outcomes are looked up, not held."""

import pytest

from rlm_batch import CodeError, ConfigurationError, Failure, Result
from rlm_batch.sandbox.errors import NotRun
from rlm_batch.sandbox.result import Meta
from rlm_batch.tasks.execution import Execution, identified
from rlm_batch.tasks.ledger.completion_markers import Mark
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.shard_store import Catalogue


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path / "run")
    found.create()
    yield found
    found.close()


def catalogue_of(executions):
    catalogue = Catalogue()
    for execution in executions:
        catalogue.add(execution)
    return catalogue


def squares(count):
    return list(identified([("SUBMIT(y=x*x)", {"x": x}) for x in range(count)], {}))


def result(value):
    return Result({"y": value}, Meta(index=99, submitted=True))


def test_outcomes_are_in_the_order_of_the_executions_whatever_the_order_in_which_they_came(ledger):
    executions = squares(20)
    catalogue, new = catalogue_of(executions), ledger.follow()
    for execution in reversed(executions):
        ledger.write(execution.key, result(execution.index))
        for line in new():
            catalogue.take(line)
    assert [outcome["y"] for outcome in catalogue.done] == list(range(20))
    assert [outcome.meta.index for outcome in catalogue.done] == list(range(20))
    assert catalogue.done[-1]["y"] == 19
    assert [outcome["y"] for outcome in catalogue.done[5:8]] == [5, 6, 7]
    assert [outcome["y"] for outcome in catalogue.done[::-7]] == [19, 12, 5]
    with pytest.raises(IndexError):
        catalogue.done[20]


def test_an_outcome_is_told_once_and_a_success_takes_the_place_of_a_failure(ledger):
    (execution,) = squares(1)
    catalogue, new = catalogue_of([execution]), ledger.follow()
    told = []
    for outcome in (Failure(CodeError("no"), Meta()), result(1), result(2), Failure(CodeError("no"), Meta())):
        ledger.write(execution.key, outcome)
        told += [catalogue.take(line) for line in new()]
    assert [outcome is not None for outcome in told] == [True, False, False, False]
    assert [outcome["y"] for outcome in catalogue.done] == [1]
    assert len(catalogue.failed) == 0


def test_what_is_undone_is_what_was_added_and_has_no_outcome(ledger):
    executions = [
        Execution(0, "a", {"x": 1}, "00" * 32),
        Execution(1, "a", {"x": "\ud800"}, "11" * 32, {"data": b'[1, "\xc3\xa9"]'}, Mark("m/1.json", stale=True)),
        Execution(2, "b", {}, "22" * 32),
    ]
    catalogue = catalogue_of(executions)
    assert list(catalogue.undone(0, 3)) == executions
    ledger.write(executions[0].key, result(1))
    for line in ledger.lines():
        catalogue.take(line)
    assert list(catalogue.undone(0, 3)) == executions[1:]
    assert list(catalogue.undone(2, 3)) == executions[2:]
    assert catalogue.count(0, 3) == 2


def test_a_result_from_before_is_found_by_its_key_and_a_failure_is_not(ledger):
    first, second = squares(2)
    ledger.write(first.key, result(1))
    ledger.write(first.key, result(2))
    ledger.write(second.key, Failure(CodeError("no"), Meta()))
    catalogue = Catalogue()
    for line in ledger.lines():
        catalogue.remember(line)
    found = catalogue.before(first.key)
    assert found is not None
    assert found.outcome()["y"] == 2
    assert catalogue.before(second.key) is None


def test_a_failure_that_no_ledger_has_stands_among_the_outcomes():
    first, second = squares(2)
    catalogue = catalogue_of([first])
    for execution in (first, second):
        catalogue.settle(execution, Failure(NotRun("not run"), Meta(index=execution.index)))
    assert [type(failure.error) for failure in catalogue.failed] == [NotRun, NotRun]
    assert 1 in catalogue
    assert 2 not in catalogue


def test_variables_that_are_no_json_are_refused_by_number():
    with pytest.raises(ConfigurationError, match="the variables of number 3 are not JSON"):
        catalogue_of([Execution(3, "", {"x": {1, 2}}, "00" * 32)])


def test_outcomes_whose_ledger_has_gone_are_an_error_that_names_it(ledger):
    (execution,) = squares(1)
    ledger.write(execution.key, result(1))
    catalogue = catalogue_of([execution])
    for line in ledger.lines():
        catalogue.take(line)
    for part in ledger.path.glob("part-*"):
        part.unlink()
    with pytest.raises(OSError, match="is no longer in the ledger"):
        list(catalogue.done)
