"""The work and the heartbeat of a shard, in the ledger of its job."""

import math

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.blocks.storage.location import write_file
from rlm_batch.blocks.storage.location_parsing import parse_location
from rlm_batch.sandbox.requests.encoded_variable import encode_variable
from rlm_batch.tasks.execution import Execution
from rlm_batch.tasks.ledger.shard_files import (
    Heartbeat,
    ShardFiles,
    ShardHeader,
    find_last_attempts,
    load_or_create_cut,
)

HEAD = ShardHeader(job="abc", shard=3, shards=8, attempt=1, total=3, what="chunk", commit=None)
EXECUTIONS = [
    Execution(30, "a", {"x": 1}, "00" * 32),
    Execution(
        31,
        "a",
        {"x": "\ud800é"},
        "11" * 32,
        {"data": encode_variable([math.inf])},
    ),
    Execution(32, "b", {}, "22" * 32),
]


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path / "run")


def write_files(place):
    found = ShardFiles(parse_location(place), "abc", 3, 1)
    found.write_work(HEAD, EXECUTIONS)
    return found


def test_a_bucket_takes_them_as_a_directory_does(s3):
    files = write_files("s3://results/run")
    test_a_shard_reads_what_its_job_has_written(files)
    test_a_sign_of_life_is_the_last_that_was_given(files)
    test_the_last_attempt_at_each_shard_is_known(files)
    test_a_job_that_is_run_again_is_cut_as_it_was(files)


def test_a_shard_reads_what_its_job_has_written(files):
    head, executions = ShardFiles.from_work_path(str(files.work_path)).read_work()
    assert head == HEAD
    assert list(executions) == EXECUTIONS


def test_a_sign_of_life_is_the_last_that_was_given(files):
    assert files.read_heartbeat() is None
    for count in (1, 2):
        files.write_heartbeat(Heartbeat(count=count, done=count, error=None))
    assert files.read_heartbeat() == Heartbeat(count=2, done=2)


def test_the_last_attempt_at_each_shard_is_known(files):
    files.next_attempt.write_work(HEAD, [])
    ShardFiles(files.ledger, "abc", 11, 4).write_work(HEAD, [])
    ShardFiles(files.ledger, "other", 1, 9).write_work(HEAD, [])
    assert find_last_attempts(files.ledger, "abc") == {3: 2, 11: 4}
    assert files.next_attempt.has_work()
    assert not files.next_attempt.next_attempt.has_work()


def test_a_job_that_is_run_again_is_cut_as_it_was(files):
    where, size = load_or_create_cut(files.ledger, "abc", 500)
    assert size == 500
    assert load_or_create_cut(files.ledger, "abc", 250) == (where, 500)
    assert load_or_create_cut(files.ledger, "other", 250) == (where, 250)
    assert load_or_create_cut(files.ledger / "elsewhere", "abc", 500)[0] != where


def test_work_that_is_not_there_says_that_the_location_has_to_be_shared(tmp_path):
    with pytest.raises(ConfigurationError, match="every worker reaches"):
        ShardFiles(tmp_path / "elsewhere", "abc", 0, 1).read_work()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("[1, 2]\n", "is damaged"),
        ('{"version": 1, "job": "abc"}\n', "is damaged"),
        ('{"version": 9, "later": true}\n', r"^\S+jsonl was written by a newer version .*: upgrade rlm-batch"),
    ],
)
def test_damaged_or_newer_work_is_a_sentence(files, text, message):
    write_file(files.work_path, text.encode())
    with pytest.raises(ConfigurationError, match=message):
        files.read_work()


def test_a_file_that_is_no_work_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="is not the work of a shard"):
        ShardFiles.from_work_path(str(tmp_path / "inputs.jsonl"))
