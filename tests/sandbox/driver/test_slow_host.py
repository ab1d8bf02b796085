"""Tests of executions whose host does not read from the driver for a while."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...infra.machine import is_alive
from ...infra.waiting import wait_until

# The calls exceed the driver's buffer for its host, so the driver stops reading from executions. Then the code creates
# the file `full`.
FLOOD = """
import re, threading, time
for _ in range(40):
    threading.Thread(target=ask, args=("x" * 500_000,), daemon=True).start()
written, before = 0, -1
while written != before:
    time.sleep(0.3)
    before, written = written, re.search(r"wchar: (\\d+)", open("/proc/self/io").read())[1]
open("full", "w").close()
time.sleep(1000)
"""
FROM_A_THREAD = """
import os, threading, time
print(os.getpid(), file=open('pid', 'w', 1))
threading.Thread(target=lambda: SUBMIT(x=1)).start()
time.sleep(1000)
"""
IN_A_CONTEXT = """
import threading, time
def tell_that_it_is_late():
    time.sleep(6.3)
    open("late", "w").close()
threading.Thread(target=tell_that_it_is_late, daemon=True).start()
SUBMIT(x=1)
"""


def test_a_result_submitted_in_time_counts_although_the_host_reads_late(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    one = launch().start(tmp_path)
    one.send(one.frame("prepare", 1, {"code": "x = 1"}, timeout=60))
    one.until("end", 1)
    one.send(one.execution(2, FLOOD))
    wait_until((tmp_path / "full").exists)
    # Both executions submit within milliseconds.
    one.send(one.execution(3, FROM_A_THREAD, timeout=6) + one.execution(4, IN_A_CONTEXT, timeout=6, context="c"))
    pid = int(wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    wait_until(lambda: not is_alive(pid))
    wait_until((tmp_path / "late").exists)
    assert [one.submitted(number) for number in (3, 4)] == [{"x": 1}] * 2
