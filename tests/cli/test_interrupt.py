"""Ctrl-C in the terminal, which every process in it gets."""

import os
import signal
import subprocess
import time

import pytest

from .conftest import COMMAND, environment


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_an_interrupt_ends_promptly_with_the_results_so_far_in_the_ledger(run_alone, tmp_path, number):
    (tmp_path / "slow.py").write_text("import time; time.sleep(0 if x == 0 else 60); SUBMIT(x=x)")
    # Where the tests run under nohup, which says that the end of the terminal is to be survived, this one does not.
    command = ["env", "--default-signal=HUP", COMMAND, "sweep", "slow.py", "--grid", "x=0,1,2,3"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 100
    while time.monotonic() < until and not any(
        part.stat().st_size for part in (tmp_path / "results").glob("*/part-*.jsonl")
    ):
        time.sleep(0.05)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=45)  # the executions alone would take sixty
    assert process.returncode == 130
    assert "Traceback" not in errors
    (part,) = (tmp_path / "results").glob("*/part-*.jsonl")
    assert part.read_text().count("\n") == 1
    *_, sentence, rest = errors.splitlines()
    assert f"interrupted; the results so far are in {part.parent}; this runs the rest:" in sentence
    assert rest == f"rlm-batch sweep slow.py --grid x=0,1,2,3 --results-path {part.parent}"
    done = run_alone(*rest.split()[1:], "--timeout", "1")
    assert "4 of 4 done" in done.stderr
    assert "1 succeeded, 1 from earlier runs, 3 failed" in done.stderr


@pytest.mark.timeout(200)
@pytest.mark.full
def test_a_second_interrupt_while_a_command_ends_takes_nothing_from_what_it_has_said(no_process_left, tmp_path):
    (tmp_path / "slow.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    environ = environment(tmp_path)
    environ.pop("PREFECT_API_URL", None)  # it has a server of its own to end
    process = subprocess.Popen(
        [COMMAND, "batch", "slow.py"],
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    while process.stderr.readline() != "begun\n":
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    while not (line := process.stderr.readline()).startswith("rlm-batch batch"):  # the last of its lines
        assert line
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr.read() == ""
    assert process.wait(30) in (130, -signal.SIGINT)  # Python's last steps have no handler any more


@pytest.mark.timeout(200)
@pytest.mark.full
def test_a_first_start_on_an_empty_prefect_home_succeeds_and_can_be_interrupted(no_process_left, tmp_path):
    """With no server configured, Prefect starts one inside the command; Ctrl-C reaches both."""
    (tmp_path / "slow.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    environ = environment(tmp_path) | {"PREFECT_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    environ.pop("PREFECT_API_URL", None)
    command = [COMMAND, "batch", "slow.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line == "begun\n":
            break
    os.killpg(process.pid, signal.SIGINT)
    errors = process.stderr.read()
    assert process.wait(30) == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
