"""The first hour in a terminal: a script that is interrupted, and output that another program reads.

What else is typed there (volumes, reports, options of the provider, what code prints, the command that goes on after
Ctrl-C) is in tests/cli/.
"""

import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..cli.conftest import COMMAND, Run, environment, kept, run  # noqa: F401

SCRIPT = """
import asyncio
from rlm_batch import batch

CODE = '''
import pathlib, time
print("begun", x, flush=True)
while x and not pathlib.Path(folder, "go").exists():
    time.sleep(0.05)
SUBMIT(x=x, drawn=time.time_ns())
'''
inputs = [{"x": x, "folder": FOLDER} for x in range(3)]
results = asyncio.run(batch(CODE, inputs, results_path="results", provider="local:none"))
"""


@pytest.mark.full
def test_an_interrupted_script_says_where_its_results_are_and_run_again_it_does_the_rest(
    server: str, no_process_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FOLDER", repr(str(tmp_path))))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "500"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    while sum("begun" in line for line in lines) < 3:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    until = time.monotonic() + 60
    while not any(part.stat().st_size for part in (tmp_path / "results").glob("part-*.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT
    (told,) = [line for line in errors.splitlines() if "interrupted; " in line]
    assert f"the results so far are in {tmp_path / 'results'}" in told
    assert "Crash detected" not in errors
    assert "site-packages" not in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")

    (tmp_path / "go").touch()
    monkeypatch.chdir(tmp_path)
    results = runpy.run_path(str(script))["results"]
    assert [result.x for result in results] == [0, 1, 2]
    assert results[0].drawn < results[1].drawn, "the first was there"


@pytest.mark.full
def test_whoever_reads_the_output_may_stop_before_its_end(run: Run, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "code.py").write_text("SUBMIT(text='x' * 90_000)")
    (tmp_path / "inputs.jsonl").write_text('{"x": 1}\n' * 4)
    done = run("batch", "code.py", "--inputs", "inputs.jsonl", "--results-path", "results", "--json")
    assert done.stdout.count("\n") == 4
    line = f"{shlex.quote(COMMAND)} report results --json | head -c 12; echo ${{PIPESTATUS[0]}}"
    piped = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert piped.stdout == '{"index": 0,141\n'
    assert "rlm-batch:" not in piped.stderr
    assert "Traceback" not in piped.stderr
