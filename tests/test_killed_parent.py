"""Tests that child processes of the package end when their parent ends, however it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .infra.machine import is_alive, list_descendants
from .infra.waiting import wait_until

# This program starts a module as the package starts its servers and workers. The thread that starts it ends first.
PROGRAM = """
import os, subprocess, sys, threading, time
from rlm_batch.flows.child_process import build_module_command

def start():
    global process
    process = subprocess.Popen(build_module_command(*sys.argv[1:]), stdout=-1, stderr=-1)
    process.stdout.read(1)

thread = threading.Thread(target=start)
thread.start()
thread.join()
print("started", flush=True)
time.sleep(1000)
"""
QUIET = "import time\nprint('quiet', flush=True)\ntime.sleep(1000)\n"
DEAF = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("deaf", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("text", [QUIET, DEAF], ids=["a module", "a module that ignores SIGTERM, with a child"])
def test_no_process_outlives_its_parent(text: str, tmp_path: Path, no_process_left: None) -> None:
    (tmp_path / "started_module.py").write_text(text)
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "started_module"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "started\n"
        started = list_descendants(parent.pid)
        assert started
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not any(map(is_alive, started)), "the processes of the killed one are gone")
