"""Code that forks as fast as it can ends with its execution and its sandbox, and takes nothing else with it."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlm_batch.blocks.local.inventory import compute_mark

from ...infra.machine import read_parent

if TYPE_CHECKING:
    from .boxes import Box, Boxes
    from .hosts import Host
    from .targets import Marked

SECONDS = 20  # that a bomb lives at most
LONG_SECONDS = 30  # where it has to outlive two drivers and a host
PROCESSES = 128
KINDS = {"stays": "s", "leaves": "l", "mixes": "m", "adopts": "a"}

START = """
import base64
path = os.getcwd() + "/"
if not os.path.exists("bomb"):
    fd = os.open("bomb", os.O_CREAT | os.O_WRONLY, 0o755)
    os.write(fd, base64.b64decode(program))
    os.close(fd)
if os.fork() == 0:
    os.chdir("/")
    os.execv(path + "bomb", ["bomb", kind, mark, str(time.monotonic() + seconds)])
"""
# The same in Python, which forks some ten times less often.
IN_PYTHON = """
libc.prctl(15, mark.encode(), 0, 0, 0)  # PR_SET_NAME
end = time.monotonic() + seconds
if os.fork() == 0:
    libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(0, 100)
    while time.monotonic() < end:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
    os._exit(0)
"""
SIBLING = "time.sleep(1)\nSUBMIT(works=True)"
WORKS = {"works": True}


pytestmark = pytest.mark.alone


@pytest.fixture(scope="session")
def bomb(open_folder: Path) -> str:
    """The bomb in C, compiled, as text."""
    program = open_folder / "fork_bomb"
    subprocess.run(["gcc", "-O1", "-o", program, Path(__file__).with_name("fork_bomb.c")], check=True)
    return base64.b64encode(program.read_bytes()).decode()


in_c = pytest.mark.requires("gcc")


@in_c
@pytest.mark.each_once
def test_a_bomb_in_c_ends_with_its_execution(own_box: Boxes, marked: Marked, bomb: str) -> None:
    box = own_box(processes=48)
    box.run("pass")
    sibling = box.send(SIBLING)
    code = f"{START}time.sleep(0.3)\nos._exit(3)"
    answer = box.run(code, program=bomb, kind="s", mark=marked.mark, seconds=SECONDS)
    assert marked.pids() == []
    assert answer["error"]["error"] == "CodeCrashed"
    assert box.host.wait(sibling).get("outputs") == WORKS
    assert box.outputs("import subprocess\nSUBMIT(works=subprocess.run(['true']).returncode == 0)") == WORKS


@in_c
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("then", "ends"),
    [("SUBMIT()", None), ("os._exit(3)", "CodeCrashed"), ("time.sleep(60)", "ExecutionTimeout")],
    ids=["a result", "a crash", "a timeout"],
)
def test_every_bomb_ends_with_its_execution(
    own_box: Boxes, marked: Marked, bomb: str, kind: str, then: str, ends: str | None
) -> None:
    box = own_box(processes=PROCESSES)
    box.run("pass")
    for _ in range(2):
        sibling = box.send(SIBLING)
        code = f"{START}time.sleep(0.5)\n{then}"
        timeout = 2 if ends == "ExecutionTimeout" else 15
        answer = box.run(code, program=bomb, kind=KINDS[kind], mark=marked.mark, seconds=SECONDS, timeout=timeout)
        assert marked.pids() == [], answer
        assert answer.get("error", {}).get("error") == ends, answer
        assert box.host.wait(sibling).get("outputs") == WORKS


@pytest.mark.each_once
@pytest.mark.full
def test_a_bomb_in_python_ends_with_its_execution(own_box: Boxes, marked: Marked) -> None:
    box = own_box(processes=PROCESSES)
    for _ in range(5):
        box.run(f"{IN_PYTHON}time.sleep(0.4)\nos._exit(3)", mark=marked.mark, seconds=SECONDS)
        assert marked.pids() == []


@in_c
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_bomb_ends_with_its_sandbox(own_box: Boxes, marked: Marked, bomb: str, kind: str) -> None:
    box = own_box(processes=PROCESSES)
    code = f"{START}time.sleep(60)"
    # Each of its processes is a session of its own, and the kernel gives a session of ours no more than one of those.
    started = time.monotonic()
    box.send(code, program=bomb, kind=KINDS[kind], mark=marked.mark, seconds=LONG_SECONDS, timeout=60)
    assert marked.there(LONG_SECONDS / 2)
    time.sleep(0.5)
    box.close()
    assert marked.pids() == []
    assert time.monotonic() - started < LONG_SECONDS  # after which it would have ended by itself
    box.run("pass")  # in a new one, for the fixture to close


@in_c
@pytest.mark.each_once
@pytest.mark.full
def test_a_bomb_in_a_context_ends_with_the_execution_that_ran_out_of_time(
    own_box: Boxes, marked: Marked, bomb: str
) -> None:
    """The context goes with it, where there is no other way; another context's state stays."""
    box = own_box(processes=PROCESSES)
    box.run("x = 5", context="another")
    code = f"{START}time.sleep(60)"
    answer = box.run(code, program=bomb, kind="s", mark=marked.mark, seconds=SECONDS, timeout=1, context="its own")
    assert answer["error"]["error"] == "ExecutionTimeout"
    assert marked.left(2) == []
    assert box.outputs("SUBMIT(x=x)", context="another") == {"x": 5}


@pytest.mark.each_once
def test_a_timeout_in_a_context_ends_what_the_execution_started_and_keeps_what_was_there(
    own_box: Boxes, marked: Marked
) -> None:
    box = own_box()
    start = """
import subprocess
def start():
    process = subprocess.Popen(["sleep", "100"], start_new_session=True)
    return process
"""
    box.run(start + "before = start()\ntime.sleep(0.1)", context="c")
    answer = box.run("after = start()\ntime.sleep(60)", context="c", timeout=2)
    assert answer["error"]["error"] == "ExecutionTimeout"
    found = box.outputs("SUBMIT(before=before.poll(), after=after.wait(5))", context="c")
    assert found == {"before": None, "after": -9}


@pytest.mark.each_once
def test_a_timeout_in_a_context_ends_processes_whose_first_thread_has_ended(own_box: Boxes, marked: Marked) -> None:
    """The kernel calls such a process a zombie, and tells nothing more of it."""
    box = own_box()
    box.run("before = 1", context="c")
    code = """
import _thread
libc.prctl(15, mark.encode(), 0, 0, 0)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        _thread.start_new_thread(time.sleep, (30,))
        libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends this thread alone
libc.prctl(15, b"context", 0, 0, 0)
time.sleep(60)
"""
    answer = box.run(code, mark=marked.mark, context="c", timeout=1)
    assert answer["error"]["error"] == "ExecutionTimeout"
    assert marked.left(2) == []
    assert box.outputs("SUBMIT(before=before)", context="c") == {"before": 1}


@in_c
@pytest.mark.each_once
def test_the_limit_on_processes_is_of_all_executions_of_a_sandbox_together(own_box: Boxes) -> None:
    box = own_box(processes=60)
    code = """
children = []
for _ in range(100):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    children.append(pid)
time.sleep(1.5)
SUBMIT(children=len(children))
"""
    running = [box.send(code) for _ in range(3)]
    answers = [box.host.wait(number) for number in running]
    # One that begins when the others have taken all places may have no process of its own.
    total = sum(answer["outputs"]["children"] for answer in answers if "outputs" in answer)
    assert total > 0
    # The supervisor and the three count too. Where the user is an ordinary one, so do the user's other processes.
    assert total <= 60 + (0 if os.getuid() == 0 else 70)


# ------------------------------------------------------------------------------------------ what cannot be ended

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def frozen() -> Iterator[Callable[[int], Path]]:
    """Makes a process one that no signal ends, until `freezer.state` in the folder says THAWED."""
    folder = FREEZER / f"rlm-batch-test-{os.getpid()}"
    folder.mkdir()

    def freeze(pid: int) -> Path:
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / "freezer.state").write_text("FROZEN")
        return folder / "freezer.state"

    yield freeze
    (folder / "freezer.state").write_text("THAWED")
    until = time.monotonic() + 10
    while (folder / "cgroup.procs").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    folder.rmdir()


@pytest.mark.full
@pytest.mark.requires("freezer")
@pytest.mark.parametrize("level", [pytest.param("landlock", marks=pytest.mark.requires("landlock"))])
def test_what_could_not_be_ended_is_said_by_name_and_is_not_forgotten(
    hosts: Callable[[str], Host], box_type: type[Box], marked: Marked, frozen: Callable[[int], Path], level: str
) -> None:
    host = hosts("root")
    box = box_type(host, level, fields={"lifetime": 95_000})
    sandbox = box.run("pass")["sandbox"]
    running = box.send(
        """
libc.prctl(15, mark.encode(), 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    os.chdir("/")
    time.sleep(600)
libc.prctl(15, b"parent", 0, 0, 0)
while not os.path.exists("go"):
    time.sleep(0.02)
os._exit(3)
""",
        mark=marked.mark,
    )
    assert marked.there(5)
    time.sleep(0.2)
    (pid,) = marked.pids()
    state = frozen(pid)
    box.run("open('go', 'w').close()")
    answer = host.wait(running)
    assert answer["error"]["error"] == "CodeCrashed"
    assert f"{pid} ({marked.mark})" in answer["stderr"]
    assert box.outputs("SUBMIT(works=True)") == WORKS
    box.close()
    # It is still there, so it is in the list, and no reaper says that it was removed.
    assert marked.pids() == [pid]
    assert sandbox in host.list_sandboxes()
    refused = host.wait(host.ask({"op": "delete", "sandbox": sandbox}))
    assert f"{pid} ({marked.mark})" in refused["broken"]
    assert sandbox in host.list_sandboxes()
    state.write_text("THAWED")
    assert marked.left(5) == []
    host.delete_sandbox(sandbox)
    assert sandbox not in host.list_sandboxes()


@in_c
@pytest.mark.requires("landlock")
@pytest.mark.parametrize("who", [pytest.param("root", marks=pytest.mark.requires("root")), "user"])
@pytest.mark.full
def test_processes_whose_drivers_were_killed_are_known_by_their_mark(
    new_host: Callable[[str], Host],
    hosts: Callable[[str], Host],
    box_type: type[Box],
    marked: Marked,
    bomb: str,
    who: str,
) -> None:
    """Wherever they went: no parent, no session, no directory and no name of the sandbox's is left of them."""
    another = hosts(who)  # before there is no processor left to start it with
    host = new_host(who)
    box = box_type(host, "landlock", fields={"processes": PROCESSES})
    sandbox = box.run("pass")["sandbox"]
    code = f"{START}time.sleep(60)"
    ends_at = time.monotonic() + LONG_SECONDS
    box.send(code, program=bomb, kind="s", mark=marked.mark, seconds=LONG_SECONDS, timeout=60)
    assert marked.there(5)
    time.sleep(0.3)
    (driver,) = (int(name) for name in os.listdir("/proc") if name.isdigit() and is_driver(int(name), sandbox))
    zygote = read_parent(driver)
    assert zygote != host.process.pid
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees another end, and ends what is left
        for pid in (zygote, driver):
            os.kill(pid, number)
    host.process.kill()
    host.process.wait()
    time.sleep(0.3)
    assert marked.pids()
    another.delete_sandbox(sandbox)
    assert marked.pids() == []
    assert time.monotonic() < ends_at, "the bomb may have ended by itself"
    assert sandbox not in another.list_sandboxes()


def is_driver(pid: int, sandbox: str) -> bool:
    """Whether a process is a sandbox's driver: it has the sandbox's mark, and is outside of every filter."""
    try:
        limit = Path(f"/proc/{pid}/limits").read_text().partition("resident set")[2].split()[0]
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, IndexError):
        return False
    return limit == str(compute_mark(Path(sandbox))) and "\nSeccomp:\t0" in status
