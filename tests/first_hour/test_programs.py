"""The first hour: what an ML engineer and an agent engineer write with only the README, each as a program of theirs.

`programs/` has them, and the first line of each says what it is for. They run as they are, and check for themselves
what they were written for. What these users type in a terminal is in test_terminal.py, their type checkers are in
tests/test_types.py, and a script that is to tell nobody outside of the machine is in test_no_telemetry.py.
"""

import runpy
from pathlib import Path

import pytest

from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer

PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*/*.py"))
# What a flow does in each of these is tested where the flow's tests are: the program itself waits for the full tests.
LATER = (
    "chunks_on_a_volume", "cross_validation", "diverged", "fail_fast", "failures_as_data", "generated_inputs",
    "graded_in_a_flow", "own_modules", "partial_answer", "prepared", "searched",
)  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.stem, marks=[pytest.mark.full] if program.stem in LATER else [])
        for program in PROGRAMS
    ],
)
def test_a_program_of_the_first_hour_does_what_it_was_written_for(
    program: Path,
    server: str,
    openai: ChatServer,
    no_process_left: None,
    tmp_path: Path,
    volumes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server here answers in the place of OpenAI's: its model counts what is late, and never has enough of it."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results of runs"))
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    openai.script = make_script(("", "print(sum('late' in line for line in context.splitlines()), 'late')"))
    runpy.run_path(str(program), run_name="__main__")
