"""`rlm-batch reap`, as a person calls it."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from .conftest import Run

pytestmark = pytest.mark.timeout(300)  # starting a server is most of it


def test_reap_says_what_it_would_remove_then_removes_it_and_says_what_it_cost(run: Run) -> None:
    left = Path(tempfile.gettempdir()) / "rlm-batch-0123456789ab"
    (left / "work").mkdir(parents=True)
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    would = run("reap", "--dry-run")
    assert would.returncode == 0, would.stderr
    assert [line.split() for line in would.stdout.splitlines()[:2]] == [
        ["sandbox", "host", "why"],
        [left.name, "its", "host", "has", "died"],
    ]
    assert "1 sandbox of local would be removed, after 0 sandbox seconds (of 1 it is not known)" in would.stdout
    assert left.exists()
    done = run("reap")
    assert "1 sandbox of local removed" in done.stdout
    assert not left.exists()


def test_a_silence_that_live_runs_keep_is_refused_in_a_sentence(run: Run) -> None:
    done = run("reap", "--older-than", "60")
    assert done.returncode == 2
    assert "older_than" in done.stderr
    assert "greater than or equal to 360" in done.stderr
    assert "Traceback" not in done.stderr
