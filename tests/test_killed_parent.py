"""What is left a second after a process of ours was killed that had started others: none of them."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from .infra.machine import is_alive, list_descendants

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 5.0  # one, and what a machine takes that has other work; what is started would live for a hundred
# Each starts something, and says so when that is there.
PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
{start}
print("started", flush=True)
time.sleep(100)
"""
MODULE = """
import subprocess, threading
from rlm_batch.flows.child_process import build_module_command
def start():
    global process
    command = build_module_command("http.server", "0")
    process = subprocess.Popen(command, stdout=-1, stderr=-1, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    process.stdout.read(1)
thread = threading.Thread(target=start)  # which ends: nothing depends on the thread
thread.start(); thread.join(); time.sleep(0.3)
assert process.poll() is None
"""
DEAF = MODULE.replace('"http.server", "0"', '"deaf"').replace("stdout=-1", "stdout=-1, cwd=sys.argv[2]")
PROGRAMS = {
    "a module": MODULE,
    "a module that hears no SIGTERM, with a child": DEAF,
    "a program": """
from tests.infra.bound_process import start_bound_process
started = start_bound_process(["sh", "-c", "echo; trap '' TERM; sleep 100 & sleep 100"], stdout=-1)
started.stdout.read(1)
""",
    "redis": "from tests.infra.redis_server import RedisServer\nstarted = RedisServer()\nstarted.__enter__()",
    "postgres": "from tests.infra.postgres import Postgres\nstarted = Postgres()\nstarted.__enter__()",
    "daytona": "from tests.standins.daytona.running import Running\nstarted = Running(boot_s=0.0)",
    "modal": 'from tests.standins.process import StandinProcess\nstarted = StandinProcess("modal")',
    "s3": 'from tests.standins.process import StandinProcess\nstarted = StandinProcess("s3")',
    "a machine": """
from pathlib import Path
from tests.infra.machine import list_descendants
from tests.infra.workers import Machine
folder = Path(sys.argv[2])
started = Machine(["/bin/sleep", "100"], folder=folder, log=folder / "log", name="m", environment={})
""",
}
NEEDS = {"redis": ["redis"], "postgres": ["postgres"]}
QUICK = ("a module", "a program")


def mark(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.requires(*NEEDS.get(name, []))] + ([] if name in QUICK else [pytest.mark.full])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for what the killed leave, with a name that is short enough for sockets, and open to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in PROGRAMS])
def test_nothing_outlives_a_process_that_is_killed(name: str, folder: Path, no_process_left: None) -> None:
    (folder / "deaf.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(100)\n"
    )
    program = PROGRAM.format(start=PROGRAMS[name])
    environment = {**os.environ, "TMPDIR": str(folder)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT), str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "started\n"
        started = list_descendants(parent.pid)
        assert started
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until = time.monotonic() + SECONDS
    while left := [pid for pid in started if is_alive(pid)]:
        assert time.monotonic() < until, {pid: read_command(pid) for pid in left}
        time.sleep(0.02)


def read_command(pid: int) -> bytes:
    """A process's command line; empty where it has just ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
