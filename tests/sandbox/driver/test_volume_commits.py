"""A command that runs when an execution has ended and before its result is known: a volume's commit."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.sandbox.wire.strict_json import loads

Launch = Callable[..., Any]

# Notes that it ran, and what the code had left by then.
NOTE = ["sh", "-c", 'cat saved >> committed 2>/dev/null; echo "$0" >> committed']


def end(one: Any, number: int) -> tuple[str, Any]:
    """The status of an execution's end, and its body."""
    header, body = one.until("end", number)
    return header["status"], loads((body or b"null").decode())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("open('saved', 'w').write('kept '); SUBMIT(x=1)", "submitted"),
        ("open('saved', 'w').write('kept ')", "finished"),
        ("open('saved', 'w').write('kept '); 1 / 0", "error"),
        ("import os; open('saved', 'w').write('kept '); os._exit(3)", "crashed"),
    ],
)
@pytest.mark.parametrize("context", [None, "main"])
def test_what_the_code_left_is_committed_before_its_end_is_known(
    launch: Launch, tmp_path: Path, code: str, status: str, context: str | None
) -> None:
    one = launch().start(tmp_path, commit=NOTE)
    # A stateless process closes its files when it ends, a context when they are collected.
    one.send(one.execution(1, f"def run():\n    {code}\nrun()", context=context))
    assert end(one, 1)[0] == status
    committed = (tmp_path / "committed").read_text()
    assert committed.endswith("sh\n")
    assert committed.startswith("kept ") or "_exit" in code


def test_other_executions_go_on_while_one_is_committed(launch: Launch, tmp_path: Path) -> None:
    slow = ["sh", "-c", "while test ! -e go; do sleep 0.01; done"]
    one = launch().start(tmp_path, commit=slow)
    one.send(one.execution(1, "SUBMIT(x=1)"))
    one.send(one.execution(2, "print('running', flush=True)\nwhile True: pass", timeout=0.3))
    assert one.until("output", 2)
    time.sleep(0.5)
    assert not [header for header, _ in one.heard if header["op"] == "end"]
    (tmp_path / "go").touch()
    assert one.submitted(1) == {"x": 1}
    assert end(one, 2)[0] == "timeout"


@pytest.mark.parametrize("code", ["SUBMIT(x=1)", "x = 1"])
def test_a_commit_that_fails_takes_the_result_with_it(launch: Launch, tmp_path: Path, code: str) -> None:
    one = launch().start(tmp_path, commit=["sh", "-c", "echo the volume is full >&2; exit 1"])
    one.send(one.execution(1, code))
    assert end(one, 1) == ("commit", {"message": "the volume is full"})


def test_a_commit_that_fails_hides_no_error_of_the_code(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, commit=["false"])
    one.send(one.execution(1, "1 / 0"))
    status, body = end(one, 1)
    assert (status, body["type"]) == ("error", "ZeroDivisionError")


def test_a_commit_that_cannot_be_started_is_said(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, commit=["/no-such-command"])
    one.send(one.execution(1, "SUBMIT(x=1)"))
    assert end(one, 1) == ("commit", {"message": "/no-such-command could not be started: No such file or directory"})


def test_a_commit_without_end_is_ended_after_its_time(launch: Launch, tmp_path: Path, driver_file: Path) -> None:
    limit = "COMMIT_TIMEOUT_SECONDS = {}"
    text = driver_file.read_text().replace(limit.format("120.0"), limit.format("0.3"))
    (tmp_path / "quick.py").write_text(text)
    one = launch("sh", "-c", f"exec python3 -I -S {tmp_path}/quick.py").start(tmp_path, commit=["sleep", "1000"])
    one.send(one.execution(1, "SUBMIT(x=1)"))
    status, body = end(one, 1)
    assert status == "commit"
    assert body["message"].startswith("sleep did not end within")


def test_a_driver_that_ends_leaves_no_commit_behind(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, commit=["sh", "-c", "touch begun; exec sleep 1000"])
    one.send(one.execution(1, "SUBMIT(x=1)"))
    until = time.monotonic() + 10
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    one.close()
    assert one.ends()


def test_nothing_is_run_where_there_is_nothing_to_commit(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    one.send(one.execution(1, "import os; SUBMIT(files=os.listdir())"))
    assert one.submitted(1) == {"files": []}
