"""The end of a command whose server is gone, at the size that a test can wait for."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from rlm_batch.cli import run_flow

run_flow.DELIVERY_SECONDS = 0.2
print("what was still to be said")
run_flow.exit_after_delivery(2)
# What is queued for a server that is gone, as Prefect's client waits for it: threads are joined before all else.
threading.Thread(target=threading.Event().wait).start()
sys.exit(0)
"""


@pytest.mark.full
def test_a_process_whose_threads_wait_for_a_server_that_is_gone_ends_and_has_said_everything() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "what was still to be said\n", "")
