"""Text that code chose, in results, log and uncaught errors: the terminal shows the text and obeys no command in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_batch.sandbox.outcomes.text_escape import escape_text

# Control sequences as C0, as C1 and as a letter: they set the window's title, clear the screen or reverse a line.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b2J\x7f\u202etxt\u2028\x85\r"
CODE = """
import sys
print(text)
print(text, file=sys.stderr)
if x == 1:
    SUBMIT(**{text: 1, "y": 1, "name": text, "nested": [text, {text: text}]})
if x == 2:
    raise type("Own" + text, (Exception,), {"__module__": "m" + text})("a message " + text)
if x == 3:
    exit(text)
if x == 4:
    compile("x = (" + text, text, "exec")
if x == 5:
    SUBMIT(**{text: object()})
if x == 6:
    load_from_volume(text)
"""
PROGRAM = """
import asyncio, sys, traceback
from rlm_batch import batch, chunks, sweep

code, evil, path = sys.argv[1:]

async def main():
    points = [{"x": x, "text": evil} for x in range(1, 7)]
    report = await sweep(code, points=points, objective="y", on_failure="return", results_path=path)
    print(report, repr(report), report.trials, report.rows(), sep="\\n")
    for trial in report.trials:
        print(trial, getattr(trial, "error", None))
        try:
            trial.missing
        except AttributeError:
            traceback.print_exc()
    writing = "open(VOLUME + '/' + data, 'w').close()\\nSUBMIT(data=data)"
    parts = await chunks(writing, {evil: evil, "b": evil}, volume_name="terminal")
    print(parts, repr(parts), parts.overlaps, sep="\\n")
    await batch(code, inputs=points[1:])

asyncio.run(main())
"""


@pytest.mark.full
def test_text_from_code_is_never_a_terminal_command(tmp_path: Path, volumes: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, CODE, EVIL, str(tmp_path / "ledger")]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, check=False, timeout=250)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 1, err
    assert out == escape_text(out, keep="\n\t")
    assert err == escape_text(err, keep="\n\t")
    assert out.count("a message \\x1b]0;owned") > 2
    assert err.rpartition("ExecutionsFailed: ")[2].startswith("5 of 5 executions failed, the first is number 0")
    assert "on the volume, and only the last content remains" in err
