"""A ledger in a bucket: written results are read from there, and no missing result is reported as written."""

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import Result
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger import ledger as upload_buffer
from rlm_batch.tasks.ledger.ledger import Ledger, UploadBuffer
from rlm_batch.tasks.ledger.ledger_line import read_line

from ...infra.waiting import wait_until


def success(value: Any, index: int = 0) -> Result:
    return Result({"value": value}, Meta(index=index, submitted=True))


@pytest.fixture
def ledger(s3: Any) -> Ledger:
    """Return an empty ledger in a bucket. Tests read it with other objects, because its own local copy stays longer."""
    ledger = Ledger("s3://results/some/job")
    ledger.create()
    s3.ask("requests")
    return ledger


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the upload buffer send sooner and give up sooner."""
    monkeypatch.setattr(upload_buffer, "SEND_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(upload_buffer, "RETRY_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(upload_buffer, "LONGEST_DELAY_SECONDS", 0.05)


def test_closing_a_ledger_uploads_it_and_its_text_reopens_it(
    ledger: Ledger, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_buffer, "SEND_INTERVAL_SECONDS", 1000.0)
    assert str(ledger.path) == "s3://results/some/job"
    for number in range(3):
        ledger.write_outcome(str(number), success(number, number))
    assert s3.ask("requests") == []
    ledger.close()
    assert len(s3.ask("requests")) == 1
    read = {line.key: line for line in Ledger(str(ledger.path)).read_lines()}
    assert {key: line.to_outcome() for key, line in read.items()} == {str(n): success(n, n) for n in range(3)}
    ledger.close()
    assert not [request for request in s3.ask("requests") if request.startswith("PUT")]


def test_an_open_ledger_uploads_its_lines_after_a_while(ledger: Ledger, quick: None) -> None:
    reader = Ledger(ledger.path)
    ledger.write_outcome("a", success(1))
    wait_until(lambda: set(reader.load_latest_lines()) == {"a"})
    ledger.write_outcome("b", success(2))
    wait_until(lambda: set(reader.load_latest_lines()) == {"a", "b"})
    ledger.close()


def test_a_follower_gets_each_line_once_and_requests_only_new_lines(ledger: Ledger, s3: Any) -> None:
    follower = Ledger(ledger.path)
    read_new_lines = partial(follower.read_new_lines, {})
    shard = Ledger(ledger.path, part_prefix="job-0001-")
    ledger.write_outcome("a", success(1))
    ledger.close()
    shard.write_outcome("b", success(2))
    shard.close()
    s3.ask("requests")
    lines = list(read_new_lines())
    assert sorted(line.key for line in lines) == ["a", "b"]
    assert [request[:4] for request in s3.ask("requests")] == ["GET "] * 3
    assert list(read_new_lines()) == []
    assert len(s3.ask("requests")) == 1
    ledger.write_outcome("c", success(3))
    ledger.close()
    assert [line.key for line in read_new_lines()] == ["c"]
    assert len(s3.ask("requests")) == 1 + 2  # the upload of the part, a listing and the download
    assert set(follower.load_latest_lines("job-0001-")) == {"b"}
    again = read_line(lines[0].position)
    assert again is not None
    assert again.to_outcome() == lines[0].to_outcome()
    folder = Path(lines[0].position.part).parent
    del follower, read_new_lines
    assert not folder.exists()


def test_a_failed_upload_is_retried_and_arrives_once(
    ledger: Ledger, s3: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_buffer, "RETRY_PATIENCE_SECONDS", 60.0)
    s3.ask("refuse", methods=["PUT"])
    ledger.write_outcome("a", success(1))
    wait_until(lambda: s3.ask("requests"))  # the stand-in returns each request only once
    wait_until(lambda: s3.ask("requests"))
    ledger.write_outcome("b", success(2))
    s3.ask("refuse", methods=[])
    ledger.close()
    assert sorted(line.key for line in Ledger(ledger.path).read_lines()) == ["a", "b"]


def test_a_permanently_failing_upload_is_raised_and_loses_no_line(ledger: Ledger, s3: Any, quick: None) -> None:
    s3.ask("refuse", methods=["PUT"])
    message = "a result could not be written to the ledger s3://results/some/job: .*expired.*run only the rest"
    keys = map(str, itertools.count())
    with pytest.raises(OSError, match=message):
        wait_until(lambda: ledger.write_outcome(next(keys), success(1)))
    with pytest.raises(OSError, match=message):
        ledger.close()
    s3.ask("refuse", methods=[])
    ledger.close()
    ledger.write_outcome("later", success(3))
    ledger.close()
    written = [str(number) for number in range(int(next(keys)) - 1)]  # all results except the refused one
    assert set(Ledger(ledger.path).load_latest_lines()) == {*written, "later"}


def test_a_writer_waits_when_the_upload_buffer_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload_buffer, "SEND_SIZE_BYTES", 10)
    monkeypatch.setattr(upload_buffer, "MAX_HELD_BYTES", 30)
    sent: list[bytes] = []

    def send(number: int, data: bytes) -> None:
        time.sleep(0.01)
        sent.append(data)

    buffer = UploadBuffer(send)
    for _ in range(50):
        buffer.write(b"0123456789")
    buffer.close()
    assert b"".join(sent) == b"0123456789" * 50
    assert max(map(len, sent)) <= 30


def test_missing_directories_of_a_location_are_created(tmp_path: Path) -> None:
    for location in ("memory://tests-of-rlm-batch/deep/down", f"file://{tmp_path}/deep/down"):
        ledger = Ledger(location)
        ledger.create()
        ledger.write_outcome("a", success(1))
        ledger.close()
        assert set(Ledger(location).load_latest_lines()) == {"a"}
    assert Ledger(location).path == tmp_path / "deep/down"
