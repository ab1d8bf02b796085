"""What becomes of executions while their host takes nothing."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# More than the driver keeps for its host, so that it reads no more from what runs.
FLOOD = """
import threading, time
for _ in range(40):
    threading.Thread(target=ask, args=("x" * 500_000,), daemon=True).start()
print("on")
time.sleep(1000)
"""
FROM_A_THREAD = "import threading, time\nthreading.Thread(target=lambda: SUBMIT(x=1)).start()\ntime.sleep(1000)"


@pytest.mark.parametrize(
    ("code", "context", "is_prepared"),
    [
        pytest.param(FROM_A_THREAD, None, True, marks=pytest.mark.full, id="a thread of a fork"),
        pytest.param(FROM_A_THREAD, None, False, id="a thread"),
        pytest.param("SUBMIT(x=1)", "c", False, marks=pytest.mark.full, id="a context"),
    ],
)
def test_what_is_submitted_in_time_counts_although_the_host_reads_it_late(
    launch: Callable[..., Any], tmp_path: Path, code: str, context: str | None, is_prepared: bool
) -> None:
    one = launch().start(tmp_path)
    if is_prepared:
        one.send(one.frame("prepare", 1, {"code": "x = 1"}, timeout=20))
        one.until("end", 1)
    one.send(one.execution(2, FLOOD))
    one.until("output", 2)
    time.sleep(3)  # it is not told when it reads no more
    one.send(one.execution(3, code, timeout=2, context=context))
    time.sleep(4)
    assert one.submitted(3) == {"x": 1}
