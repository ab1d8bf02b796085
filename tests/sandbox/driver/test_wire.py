"""Tests of the driver's wire, with hand-made frames: numbers, beats, silence, and its end."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.sandbox.driver_settings import DriverSettings
from rlm_batch.sandbox.wire.strict_json import loads

from ...infra.waiting import wait_until
from ..conftest import START_DAEMONS

Launch = Callable[..., Any]

# This code starts two processes that ignore signals, one of them a daemon. The code prints "on" and does not end.
STAYING = f"""
{START_DAEMONS}print("on")
time.sleep(1000)
"""


def test_ready_comes_first_and_frames_are_numbered(launch: Launch, tmp_path: Path) -> None:
    one = launch()
    one.send(one.frame("start", body=asdict(DriverSettings(cwd=str(tmp_path), heartbeat=None))))
    one.send(one.execution(1, "print('x')\nSUBMIT(x=1)"))
    while not (one.heard and one.heard[-1][0]["op"] == "end"):
        one.listen()
    assert one.heard[0][0]["op"] == "ready"
    numbers = [header["n"] for header, _ in one.heard]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_repeated_frame_is_ignored(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    code = "open('runs', 'a').write('x'); SUBMIT(runs=len(open('runs').read()))"
    frame = one.execution(1, code)
    one.send(frame * 3)
    assert one.submitted(1) == {"runs": 1}
    one.send(frame)
    one.n -= 2
    one.send(one.execution(2, code))
    one.n += 10
    one.send(one.execution(3, code))
    assert one.submitted(3) == {"runs": 2}
    assert not [header for header, _ in one.heard if header["op"] == "end"]


def test_an_idle_driver_sends_heartbeats_and_a_silent_host_ends_it(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, heartbeat=0.1, silence=10)
    one.send(one.execution(1, STAYING) + one.execution(2, STAYING, context="c"))
    while [header["op"] for header, _ in one.heard].count("output") < 2:
        one.listen()
        one.send(one.frame("beat"))  # any frame keeps the driver alive
    one.until("beat")
    one.wait()


def test_without_a_heartbeat_silence_ends_nothing_and_a_lifetime_may_be_years(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, heartbeat=None, silence=0.01, lifetime=10 * 365 * 86_400)
    # The driver checks the time whenever it has something to do.
    for number in range(1, 4):
        one.send(one.execution(number, "import time; time.sleep(0.1); SUBMIT(x=1)"))
        assert one.submitted(number) == {"x": 1}


@pytest.mark.parametrize("end", ["close", "stop", "rubbish", "SIGTERM", "lifetime"])
def test_each_end_of_the_driver_ends_all_processes(launch: Launch, tmp_path: Path, end: str) -> None:
    one = launch().start(tmp_path, lifetime=2 if end == "lifetime" else None)
    one.send(one.execution(1, STAYING) + one.execution(2, STAYING, context="c"))
    one.until("output", 1)
    one.until("output", 2)
    if end == "close":
        one.close()
    elif end == "SIGTERM":
        one.process.send_signal(signal.SIGTERM)
    elif end != "lifetime":
        one.send(one.frame("stop") if end == "stop" else b"rubbish\n")
    one.wait()


def test_the_driver_notices_a_host_that_stopped_reading(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    one.send(one.execution(1, "print('on')\nwhile True: print('x' * 9999, flush=True)"))
    one.until("output", 1)
    one.process.stdout.close()
    with suppress(BrokenPipeError):  # the driver may have noticed already
        one.send(one.execution(2, "SUBMIT(x=1)"))
    one.wait()


def test_a_slow_host_blocks_no_output_and_pending_calls_fill_no_memory(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    calls = """
import threading
threads = [threading.Thread(target=ask, args=("x" * 2_000_000,)) for _ in range(64)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    one.send(one.execution(1, calls))
    one.send(one.execution(2, "for _ in range(20_000): print('x' * 1000)\nopen('done', 'w')"))
    wait_until((tmp_path / "done").exists)
    for _ in range(64):
        call = one.until("call", 1)[0]["call"]
        one.send(one.frame("reply", 1, {"value": None}, call=call))
    assert one.end(1) == ("finished", None)
    peak = int(Path(f"/proc/{one.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0])  # KiB
    assert peak < 90 * 1024


def test_executions_beyond_the_descriptor_limit_are_refused_and_the_others_continue(
    launch: Launch, tmp_path: Path
) -> None:
    one = launch(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))).start(tmp_path)
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)\nSUBMIT(x=1)"
    for number in range(1, 81):
        one.send(one.execution(number, code))
    while len(ends := [header["status"] for header, _ in one.heard if header["op"] == "end"]) < 80:
        if "setup" in ends:
            (tmp_path / "go").touch()
        one.listen()
    assert set(ends) == {"submitted", "setup"}
    one.send(one.execution(300, "SUBMIT(x=1)"))
    assert one.submitted(300) == {"x": 1}


def does_start(name: str) -> bool:
    """Return whether a Python of that name starts. The commands that pyenv puts on PATH may refuse to start."""
    try:
        subprocess.run([name, "-I", "-S", "-c", ""], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def find_python(name: str) -> str | None:
    """Return a Python of that name on PATH, or next to the tests' own Python, where pyenv installs others."""
    beside = sorted(map(str, Path(sys.base_prefix).parent.glob(f"*/bin/{name}")))
    return next(filter(does_start, [name, *beside]), None)


def test_the_driver_runs_on_the_oldest_and_newest_installed_python(launch: Launch, tmp_path: Path) -> None:
    pythons = list(filter(None, (find_python(f"python3.{minor}") for minor in range(9, 15))))
    for python in {pythons[0], pythons[-1]}:
        check(launch(python, "-I", "-S"), tmp_path)


def check(one: Any, tmp_path: Path) -> None:
    """Check each way in which an execution can end."""
    one.start(tmp_path)
    one.send(one.execution(1, "print('é')\nSUBMIT(x=[1, 2.5, None, {'é': 'é'}], same=ask(1) == 1)"))
    call, body = one.until("call", 1)
    assert loads((body or b"").decode()) == {"args": [1], "kwargs": {}}
    one.send(one.frame("reply", 1, {"value": 1}, call=call["call"]))
    assert one.submitted(1) == {"x": [1, 2.5, None, {"é": "é"}], "same": True}
    errors = [("1 / 0", "ZeroDivisionError"), ("x = = 1", "SyntaxError"), ("SUBMIT(x={1})", "x is a set")]
    for i, (code, message) in enumerate(errors):
        one.send(one.execution(10 + i, code))
        status, error = one.end(10 + i)
        assert status == "error"
        assert message in str(error)
    one.send(one.execution(20, "x = 1", context="c"))
    one.until("end", 20)
    one.send(one.execution(21, "import time; time.sleep(1000)", context="c", timeout=0.3))
    assert one.end(21)[0] == "timeout"
    from_a_thread = "import threading; t = threading.Thread(target=lambda: SUBMIT(x=x)); t.start(); t.join()"
    one.send(one.execution(22, from_a_thread, context="c"))
    assert one.submitted(22) == {"x": 1}
    one.send(one.execution(23, "import os; os._exit(3)"))
    header, _ = one.until("end", 23)
    assert (header["status"], header["exit_code"]) == ("crashed", 3)
    one.send(one.execution(24, "import ctypes; ctypes.string_at(0)"))
    assert one.until("end", 24)[0]["signal"] == signal.SIGSEGV
    one.send(one.frame("prepare", 30, {"code": "x = [1]"}, timeout=60))
    assert one.end(30)[0] == "finished"
    for i in range(31, 33):
        one.send(one.execution(i, "x.append(2); import os; SUBMIT(x=x, leads=os.getsid(0) == os.getpid())"))
        assert one.submitted(i) == {"x": [1, 2], "leads": True}
    one.close()
    one.wait()
    assert os.listdir(tmp_path) == []
    assert one.words() == ""  # The driver writes nothing to stderr.
