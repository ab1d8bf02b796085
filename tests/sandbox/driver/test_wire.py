"""The driver's wire, spoken by hand: numbers, beats, silence, and its end."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.sandbox.driver_settings import DriverSettings
from rlm_batch.sandbox.wire.strict_json import loads

Launch = Callable[..., Any]

# Leaves a daemon and a deaf process, says so, and stays.
STAYING = """
import os, signal, time
for own_session in (False, True):
    if os.fork() == 0:
        if own_session:
            os.setsid()
            if os.fork():
                os._exit(0)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
print("on")
time.sleep(1000)
"""


def test_ready_comes_first_and_frames_are_numbered(launch: Launch, tmp_path: Path) -> None:
    one = launch()
    one.send(one.frame("start", body=asdict(DriverSettings(cwd=str(tmp_path), heartbeat=None))))
    one.send(one.execution(1, "print('x')\nSUBMIT(x=1)"))
    while not (one.heard and one.heard[-1][0]["op"] == "end"):
        assert one.listen(5)
    assert one.heard[0][0]["op"] == "ready"
    numbers = [header["n"] for header, _ in one.heard]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_frame_that_comes_again_is_ignored(launch: Launch, tmp_path: Path) -> None:
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


def test_frames_may_come_in_any_pieces(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    data = b"".join(one.execution(i, f"SUBMIT(i={i}, text='é')") for i in (1, 2, 3))
    for byte in data[:400]:
        one.send(bytes([byte]))
        time.sleep(0.0005)
    one.send(data[400:])
    assert [one.submitted(i)["i"] for i in (1, 2, 3)] == [1, 2, 3]


def test_a_driver_that_has_nothing_to_say_beats(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, heartbeat=0.1, silence=30)
    for _ in range(3):
        one.until("beat")


def test_a_silent_host_is_taken_for_dead(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, heartbeat=0.2, silence=4)
    one.send(one.execution(1, STAYING))
    one.send(one.execution(2, STAYING, context="c"))
    one.until("output", 1)
    one.until("output", 2)
    assert one.ends()


@pytest.mark.full
def test_any_frame_is_a_sign_of_life(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, heartbeat=0.5, silence=2)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        one.send(one.frame("beat"))
        one.listen(0.2)
    one.send(one.execution(1, "SUBMIT(x=1)"))
    assert one.submitted(1) == {"x": 1}


def test_without_a_heartbeat_silence_ends_nothing(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, heartbeat=None, silence=0.2)
    one.listen(1)
    one.send(one.execution(1, "SUBMIT(x=1)"))
    assert one.submitted(1) == {"x": 1}


def test_a_lifetime_ends_the_driver_whatever_the_host_says(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, lifetime=4)
    one.send(one.execution(1, STAYING))
    one.until("output", 1)
    assert one.ends()


def test_a_lifetime_of_years_is_as_good_as_any(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, lifetime=10 * 365 * 86_400, heartbeat=1e9, silence=1e12)
    one.send(one.execution(1, "SUBMIT(x=1)"))
    assert one.submitted(1) == {"x": 1}


@pytest.mark.parametrize("end", ["close", "stop", "rubbish", "SIGTERM"])
def test_the_end_of_the_wire_is_the_end_of_everything(launch: Launch, tmp_path: Path, end: str) -> None:
    one = launch().start(tmp_path)
    one.send(one.execution(1, STAYING))
    one.send(one.execution(2, STAYING, context="c"))
    one.until("output", 1)
    one.until("output", 2)
    if end == "close":
        one.close()
    elif end == "stop":
        one.send(one.frame("stop"))
    elif end == "rubbish":
        one.send(b"rubbish\n")
    else:
        one.process.send_signal(signal.SIGTERM)
    assert one.ends()


def test_a_host_that_reads_no_more_is_noticed(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    one.send(one.execution(1, "print('on')\nimport time\nwhile True: print('x' * 9999, flush=True)"))
    one.until("output", 1)
    one.process.stdout.close()
    one.send(one.execution(2, "SUBMIT(x=1)"))
    assert one.ends()


@pytest.mark.full
def test_calls_that_the_host_does_not_read_yet_do_not_fill_the_drivers_memory(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    calls = 64
    one.send(
        one.execution(
            1,
            "import threading\n"
            "threads = [threading.Thread(target=ask, args=('x' * 2_000_000,), daemon=True) for _ in range(64)]\n"
            "[thread.start() for thread in threads]\n[thread.join() for thread in threads]",
        )
    )
    time.sleep(2)
    peak = int(Path(f"/proc/{one.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0])  # KiB
    assert peak < 90 * 1024
    for _ in range(calls):
        one.until("call", 1)


def test_output_that_the_host_does_not_read_holds_up_no_code(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    one.send(one.execution(1, "for _ in range(20_000): print('x' * 1000)\nopen('done', 'w')"))
    until = time.monotonic() + 20
    while not (tmp_path / "done").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_few_descriptors_are_enough(launch: Launch, tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    one = launch(preexec_fn=few).start(tmp_path)
    one.send(one.execution(1, "SUBMIT(x=1)"))
    assert one.submitted(1) == {"x": 1}


def test_more_executions_than_there_are_descriptors_for_are_refused_and_the_rest_goes_on(
    launch: Launch, tmp_path: Path
) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))

    one = launch(preexec_fn=few).start(tmp_path)
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)\n"
    for i in range(1, 201):
        one.send(one.execution(i, wait + "SUBMIT(x=1)"))
    until = time.monotonic() + 60
    while len(ends := [header["status"] for header, _ in one.heard if header["op"] == "end"]) < 200:
        assert time.monotonic() < until
        assert one.listen(1)
        if "setup" in ends:
            (tmp_path / "go").touch()
    assert set(ends) == {"submitted", "setup"}
    one.send(one.execution(300, "SUBMIT(x=1)"))
    assert one.submitted(300) == {"x": 1}


def test_the_driver_says_nothing_on_its_standard_error(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    for i, code in enumerate(["1 / 0", "import os; os._exit(3)", "x = = 1", "import ctypes; ctypes.string_at(0)"]):
        one.send(one.execution(i + 1, code))
        one.until("end", i + 1)
    one.close()
    assert one.ends()
    assert one.words() == ""


def does_start(name: str) -> bool:
    """Whether there is a Python of that name: pyenv puts names on PATH that it then refuses to start."""
    try:
        subprocess.run([name, "-I", "-S", "-c", ""], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def find_python(name: str) -> str | None:
    """A Python of that name, on PATH or installed beside the one that runs the tests, as pyenv does."""
    beside = sorted(map(str, Path(sys.base_prefix).parent.glob(f"*/bin/{name}")))
    return next(filter(does_start, [name, *beside]), None)


PYTHONS = {name: find_python(name) for name in (f"python3.{minor}" for minor in range(9, 15))}
HERE = [pytest.param(path, id=name) for name, path in PYTHONS.items() if path is not None]
MISSING = ", ".join(name for name, path in PYTHONS.items() if path is None)
ELSEWHERE = [pytest.param("", marks=pytest.mark.skip(reason=f"not here: {MISSING}"))] if MISSING else []


@pytest.mark.parametrize("python", [*HERE, *ELSEWHERE])
def test_the_driver_runs_on_every_python_that_is_here(launch: Launch, tmp_path: Path, python: str) -> None:
    check(launch(python, "-I", "-S"), tmp_path)


def test_the_driver_runs_without_the_fast_json(launch: Launch, tmp_path: Path) -> None:
    slow = "import sys; sys.modules['_json'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    check(launch(sys.executable, "-I", "-S", "-c", slow), tmp_path)


def check(one: Any, tmp_path: Path) -> None:
    """Puts a driver through the ways in which an execution can end."""
    one.start(tmp_path)
    one.send(one.execution(1, "print('é')\nSUBMIT(x=[1, 2.5, None, {'é': 'é'}], same=ask(1) == 1)"))
    call, body = one.until("call", 1)
    assert loads((body or b"").decode()) == {"args": [1], "kwargs": {}}
    one.send(one.frame("reply", 1, {"value": 1}, call=call["call"]))
    assert one.submitted(1) == {"x": [1, 2.5, None, {"é": "é"}], "same": True}
    for i, (code, said) in enumerate(
        [("1 / 0", "ZeroDivisionError"), ("x = = 1", "SyntaxError"), ("SUBMIT(x={1})", "x is a set")]
    ):
        one.send(one.execution(10 + i, code))
        header, body = one.until("end", 10 + i)
        assert header["status"] == "error"
        assert said in (body or b"").decode()
    one.send(one.execution(20, "x = 1", context="c"))
    one.until("end", 20)
    one.send(one.execution(21, "import time; time.sleep(1000)", context="c", timeout=0.3))
    assert one.until("end", 21)[0]["status"] == "timeout"
    one.send(
        one.execution(
            22, "import threading; t = threading.Thread(target=lambda: SUBMIT(x=x)); t.start(); t.join()", context="c"
        )
    )
    assert one.submitted(22) == {"x": 1}
    one.send(one.execution(23, "import os; os._exit(3)"))
    header, _ = one.until("end", 23)
    assert (header["status"], header["exit_code"]) == ("crashed", 3)
    one.send(one.frame("prepare", 30, {"code": "x = [1]"}, timeout=20))
    assert one.until("end", 30)[0]["status"] == "finished"
    for i in range(31, 35):
        one.send(one.execution(i, "x.append(2); import os; SUBMIT(x=x, leads=os.getsid(0) == os.getpid())"))
        assert one.submitted(i) == {"x": [1, 2], "leads": True}
    one.close()
    assert one.ends()
    assert os.listdir(tmp_path) == []
