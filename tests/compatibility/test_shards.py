"""Shards and the jobs that wait for them may be of different versions: what one writes the other reads."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.blocks.storage.location_parsing import parse_location
from rlm_batch.tasks.ledger.shard_files import ShardFiles, find_last_attempts, load_or_create_cut

from .conftest import FIXTURES

LEDGER = FIXTURES / "shard_work" / "ledger"
EXPECTED = json.loads((FIXTURES / "shard_work" / "expected.json").read_text())


@pytest.mark.parametrize("attempt", EXPECTED["attempts"], ids=lambda attempt: attempt["work"])
def test_the_work_and_the_heartbeat_of_an_attempt_are_read(attempt: dict[str, Any]) -> None:
    files = ShardFiles.from_work_path(f"{LEDGER}/{attempt['work']}")
    header, executions = files.read_work()
    assert asdict(header) == attempt["head"]
    assert header.part_prefix == attempt["part_of"]
    for execution, expected in zip(executions, attempt["executions"], strict=True):
        assert execution.index == expected["index"]
        assert execution.code == expected["code"]
        assert execution.variables == expected["variables"]
        assert execution.key == expected["key"]
        assert {name: value.json.decode() for name, value in execution.encoded_variables.items()} == expected["encoded"]
        marker = execution.marker
        assert (None if marker is None else {"path": marker.path, "stale": marker.is_stale}) == expected["mark"]
    beat = files.read_heartbeat()
    if attempt["beat"] is None:
        assert beat is None
    else:
        assert beat is not None
        read = json.loads(json.dumps(asdict(beat)))
        assert {name: read[name] for name in attempt["beat"]} == attempt["beat"]


def test_a_job_finds_the_shards_that_it_was_cut_into(tmp_path: Path) -> None:
    ledger = parse_location(LEDGER)
    for job, size in EXPECTED["sizes"].items():
        assert load_or_create_cut(ledger, job, size + 1) == (EXPECTED["id"], size)
        last = {int(number): attempt for number, attempt in EXPECTED["last"][job].items()}
        assert find_last_attempts(ledger, job) == last
