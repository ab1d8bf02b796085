"""Tests of the command that commits a volume: it runs after an execution and before its result is sent."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...infra.waiting import wait_until

Launch = Callable[..., Any]

# This command appends the saved file to the file `committed`, and then the word "sh".
NOTE = ["sh", "-c", 'cat saved >> committed 2>/dev/null; echo "$0" >> committed']
SAVE = "open('saved', 'w').write('kept ')"


@pytest.mark.parametrize("context", [None, "main"])
def test_files_are_committed_before_the_execution_is_reported_as_ended(
    launch: Launch, tmp_path: Path, context: str | None
) -> None:
    one, committed = launch().start(tmp_path, commit=NOTE), tmp_path / "committed"
    for number, (code, status) in enumerate(
        [("SUBMIT(x=1)", "submitted"), ("x = 1", "finished"), ("1 / 0", "error"), ("os._exit(3)", "crashed")], 1
    ):
        # A stateless execution closes its files when its process ends. In a context, Python closes unreferenced files.
        one.send(one.execution(number, f"def run():\n    import os\n    {SAVE}; {code}\nrun()", context=context))
        assert one.end(number)[0] == status
        assert committed.read_text().endswith("sh\n")
        assert committed.read_text().startswith("kept ") or "_exit" in code
        committed.unlink()


def test_other_executions_continue_during_a_commit(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, commit=["sh", "-c", "touch begun; while test ! -e go; do sleep 0.01; done"])
    one.send(one.execution(1, "SUBMIT(x=1)"))
    wait_until((tmp_path / "begun").exists)
    one.send(one.execution(2, "print('running', flush=True)\nSUBMIT(x=2)"))
    one.until("output", 2)
    assert not [header for header, _ in one.heard if header["op"] == "end"]
    (tmp_path / "go").touch()
    assert [one.submitted(number) for number in (1, 2)] == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sh", "-c", "echo the volume is full >&2; exit 1"], "the volume is full"),
        (["/no-such-command"], "/no-such-command could not be started: No such file or directory"),
    ],
)
def test_a_failed_commit_replaces_the_result_but_not_the_codes_error(
    launch: Launch, tmp_path: Path, command: list[str], message: str
) -> None:
    one = launch().start(tmp_path, commit=command)
    for number, code in enumerate(("SUBMIT(x=1)", "x = 1"), 1):
        one.send(one.execution(number, code))
        assert one.end(number) == ("commit", {"message": message})
    one.send(one.execution(3, "1 / 0"))
    status, body = one.end(3)
    assert (status, body["type"]) == ("error", "ZeroDivisionError")


def test_an_endless_commit_is_killed_at_its_timeout(launch: Launch, tmp_path: Path, driver_file: Path) -> None:
    limit = "COMMIT_TIMEOUT_SECONDS = {}"
    text = driver_file.read_text().replace(limit.format("120.0"), limit.format("0.3"))
    (tmp_path / "quick.py").write_text(text)
    one = launch("sh", "-c", f"exec {sys.executable} -I -S {tmp_path}/quick.py").start(
        tmp_path, commit=["sleep", "1000"]
    )
    one.send(one.execution(1, "SUBMIT(x=1)"))
    status, body = one.end(1)
    assert status == "commit"
    assert body["message"].startswith("sleep did not end within")


def test_a_driver_that_ends_leaves_no_commit_process(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, commit=["sh", "-c", "touch begun; exec sleep 1000"])
    one.send(one.execution(1, "SUBMIT(x=1)"))
    wait_until((tmp_path / "begun").exists)
    one.close()
    one.wait()
