"""Ctrl-C in the terminal, which reaches every process there: the command's, and a user's script."""

import os
import runpy
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ..infra.programs import run_program
from ..infra.waiting import wait_until
from .conftest import COMMAND, environment

HANG_SECONDS = 300  # seconds until a process must have ended; without the interrupt it would run for an hour


def start(command: list[str], tmp_path: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start the command in a new session, as a terminal does."""
    return subprocess.Popen(
        command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def find_results(folder: Path) -> list[Path]:
    """Return the files of a ledger that have a result."""
    return [part for part in folder.glob("part-*.jsonl") if part.stat().st_size]


def read_until(process: subprocess.Popen[str], text: str, count: int = 1) -> list[str]:
    """Return the lines of standard error, up to the one with the `count`-th occurrence of the text."""
    assert process.stderr is not None
    lines: list[str] = []
    while sum(text in line for line in lines) < count:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    return lines


@pytest.mark.usefixtures("server", "no_process_left")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_an_interrupted_command_keeps_its_results_and_shows_how_to_resume(run, tmp_path, number):
    (tmp_path / "slow.py").write_text("import time; time.sleep(0 if x == 0 else 3600); SUBMIT(x=x)")
    # The tests may run under nohup, which ignores SIGHUP. The command must not inherit that setting.
    command = ["env", "--default-signal=HUP", COMMAND, "sweep", "slow.py", "--grid", "x=0,1,2,3"]
    process = start(command, tmp_path, environment(tmp_path))
    (part,) = wait_until(
        lambda: [part for folder in tmp_path.glob("results/*") for part in find_results(folder)], "the first result"
    )
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert part.read_text().count("\n") == 1
    *_, sentence, rest = errors.splitlines()
    assert f"interrupted; the results so far are in {part.parent}. To run the rest:" in sentence
    assert rest == f"rlm-batch sweep slow.py --grid x=0,1,2,3 --results-path {part.parent}"
    done = run(*shlex.split(rest)[1:], "--timeout", "1")
    assert "1 of 4 trials succeeded, 3 failed, 1 from earlier runs; it took" in done.stderr


INTERRUPT_AN_IMPORT = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "prefect.exceptions":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""


def test_ctrl_c_while_prefect_is_imported_prints_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AN_IMPORT)
    (tmp_path / "one.py").write_text("SUBMIT(x=1)")
    process = start([COMMAND, "batch", "one.py"], tmp_path, environment(tmp_path) | {"PYTHONPATH": str(tmp_path)})
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, errors) == (130, "rlm-batch: interrupted\n")


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
@pytest.mark.usefixtures("server", "no_process_left")
def test_an_interrupted_script_shows_its_results_path_and_can_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FOLDER", repr(str(tmp_path))))
    process = start([sys.executable, str(script)], tmp_path, {**os.environ, "COLUMNS": "500"})
    read_until(process, "begun", 3)
    wait_until(lambda: find_results(tmp_path / "results"), "the first result")
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=HANG_SECONDS)[1]
    assert process.returncode == -signal.SIGINT
    (sentence,) = [line for line in errors.splitlines() if "interrupted; " in line]
    assert f"the results so far are in {tmp_path / 'results'}" in sentence
    assert "Crash detected" not in errors
    assert "site-packages" not in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")

    (tmp_path / "go").touch()
    monkeypatch.chdir(tmp_path)
    results = runpy.run_path(str(script))["results"]
    assert [result.x for result in results] == [0, 1, 2]
    assert results[0].drawn < results[1].drawn, "the first was there"


def test_the_process_ends_while_a_thread_is_in_compiled_code_and_calls_the_functions_of_others():
    # Such a thread waits for a server when a command is interrupted early. The end of Python would abort the process.
    # `opentelemetry-instrument` registers a function that exports the last spans.
    program = """
import atexit, sys, threading
from typing import Annotated
from pydantic import BeforeValidator, TypeAdapter
from rlm_batch.cli.main import main

adapter = TypeAdapter(list[Annotated[int, BeforeValidator(int)]])

def validate():
    while True:
        adapter.validate_python(range(1000))

atexit.register(print, "exported")
threading.Thread(target=validate, daemon=True).start()
sys.argv = ["rlm-batch", "--version"]
main()
"""
    done = run_program([sys.executable, "-c", program])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [version("rlm-batch"), "exported"]
