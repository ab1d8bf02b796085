"""Output of a script that calls a flow: its code's output and its failures."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio
from rlm_batch import batch
asyncio.run(batch(["print('hello')\\nraise ValueError('x')", "print('two')"], max_workers=1))
"""


def test_a_script_prints_each_failure_once_without_frames_of_prefect(server: str, results: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1
    lines = (done.stdout + done.stderr).splitlines()
    failure_lines = [
        line for line in lines if "raised ValueError (line 2): x" in line and "ExecutionsFailed" not in line
    ]
    assert len(failure_lines) == 1
    assert "execution 0 failed: CodeError" in failure_lines[0]
    assert any(line.endswith(" - 0: hello") for line in lines)
    assert any(line.endswith(" - 1: two") for line in lines)
    assert not [line for line in lines if line.lstrip().startswith("File ") and "/prefect/" in line]
    assert lines[-1].startswith("rlm_batch.sandbox.errors.ExecutionsFailed: 1 of 2 executions failed")


PROGRESS = """
from rlm_batch import batch
from rlm_batch.flows.engine import outcome_sink
outcome_sink.LOG_INTERVAL_SECONDS = 0.0
batch.sync("SUBMIT(y=1 / x)", [{"x": x} for x in (2, 1, 0)], max_workers=1, on_failure="return")
"""


def test_a_script_shows_its_progress(server: str, results: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, timeout=500, check=False)
    lines = [line.rpartition(" - ")[2] for line in done.stderr.splitlines() if line.endswith(" so far")]
    assert lines == [
        f"{count} of 3 executions succeeded{end} so far" for count, end in ((1, ""), (2, ""), (2, ", 1 failed"))
    ]
