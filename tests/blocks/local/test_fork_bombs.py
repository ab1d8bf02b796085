"""Code that forks as fast as it can. Its processes end with its execution or sandbox, and no other process ends."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlm_batch.blocks.local.inventory import compute_mark

from ...infra.machine import read_parent
from ...infra.waiting import wait_until
from .boxes import Box, wait_for_file
from .test_siblings import NAMED, WORKS

if TYPE_CHECKING:
    from .boxes import Boxes
    from .hosts import Hosts
    from .targets import Marked

SECONDS = 110  # seconds, the longest life of a bomb; longer than a test waits for its end
PROCESSES = 48
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
ENDS = {"SUBMIT()": None, "os._exit(3)": "CodeCrashed", "time.sleep(1000)": "ExecutionTimeout"}
pytestmark = [pytest.mark.alone, pytest.mark.own_count, pytest.mark.requires("gcc")]


@pytest.fixture(scope="session")
def bomb(open_folder: Path) -> str:
    """Compile the bomb in C and return the program as text."""
    program = open_folder / "fork_bomb"
    subprocess.run(["gcc", "-O1", "-o", program, Path(__file__).with_name("fork_bomb.c")], check=True)
    return base64.b64encode(program.read_bytes()).decode()


def run_bomb(box: Box, marked: Marked, bomb: str, kind: str, then: str) -> None:
    """Start a bomb, end its execution with `then`, and check that no process is left and a sibling still works."""
    round_number = os.urandom(4).hex()
    sibling = box.send(f"{wait_for_file('end' + round_number)}SUBMIT(works=True)")
    variables = {"program": bomb, "kind": KINDS[kind], "mark": marked.mark, "seconds": SECONDS}
    code = START if "sleep" in then else START + wait_for_file("go" + round_number)
    running = box.send(code + then, timeout=5 if "sleep" in then else 100, **variables)
    if "sleep" not in then:  # in the timeout case a bomb may end before this process sees it
        marked.wait_for(PROCESSES // 2 if kind == "stays" else 2)
    box.let_go("go" + round_number)
    answer = box.host.wait(running)
    assert answer.get("error", {}).get("error") == ENDS[then], answer
    marked.wait_until_gone()
    box.let_go("end" + round_number)
    assert box.host.wait(sibling).get("outputs") == WORKS


@pytest.mark.each_once
def test_a_fork_bomb_ends_with_its_execution(own_box: Boxes, marked: Marked, bomb: str) -> None:
    box = own_box(processes=PROCESSES)
    run_bomb(box, marked, bomb, "stays", "os._exit(3)")
    assert box.outputs("import subprocess\nSUBMIT(works=subprocess.run(['true']).returncode == 0)") == WORKS


@pytest.mark.full
@pytest.mark.each_once
@pytest.mark.parametrize("kind", KINDS)
def test_every_fork_bomb_ends_with_its_execution_or_sandbox(
    own_box: Boxes, marked: Marked, bomb: str, kind: str
) -> None:
    box = own_box(processes=PROCESSES)
    for then in ENDS:
        run_bomb(box, marked, bomb, kind, then)
    variables = {"program": bomb, "kind": KINDS[kind], "mark": marked.mark, "seconds": SECONDS}
    box.send(f"{START}time.sleep(1000)", timeout=1000, **variables)
    marked.wait_for(2)
    box.close()
    marked.wait_until_gone()


@pytest.mark.full
@pytest.mark.each_once
def test_a_fork_bomb_in_a_context_ends_with_its_timeout(own_box: Boxes, marked: Marked, bomb: str) -> None:
    """The timeout ends the context too, because nothing less stops the bomb. Another context keeps its state."""
    box = own_box(processes=PROCESSES)
    box.run("x = 5", context="another")
    variables = {"program": bomb, "kind": "s", "mark": marked.mark, "seconds": SECONDS}
    answer = box.run(f"{START}time.sleep(1000)", timeout=5, context="its own", **variables)
    assert answer["error"]["error"] == "ExecutionTimeout"
    marked.wait_until_gone()
    assert box.outputs("SUBMIT(x=x)", context="another") == {"x": 5}


# ---------------------------------------------------------------------------------------- processes that no signal ends

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def frozen() -> Iterator[Callable[[int], Path]]:
    """Return a function that freezes a process: no signal ends it until its `freezer.state` file says THAWED."""
    folder = FREEZER / f"rlm-batch-test-{os.getpid()}"
    folder.mkdir()

    def freeze(pid: int) -> Path:
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / "freezer.state").write_text("FROZEN")
        return folder / "freezer.state"

    yield freeze
    (folder / "freezer.state").write_text("THAWED")
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "no process in the freezer")
    folder.rmdir()


@pytest.mark.full
@pytest.mark.requires("freezer", "landlock")
def test_a_process_that_cannot_be_killed_is_named_and_remembered(
    hosts: Hosts, marked: Marked, frozen: Callable[[int], Path]
) -> None:
    host = hosts("root")
    box = Box(host, "landlock", fields={"lifetime": 95_000})
    sandbox = box.run("pass")["sandbox"]
    code = f"""
if os.fork() == 0:
    {NAMED}
    os.setsid()
    os.chdir("/")
    time.sleep(1000)
{wait_for_file("go")}
os._exit(3)
"""
    running = box.send(code, mark=marked.mark)
    marked.wait_for()
    (pid,) = marked.pids()
    state = frozen(pid)
    box.let_go()
    answer = host.wait(running)
    assert answer["error"]["error"] == "CodeCrashed"
    assert f"{pid} ({marked.mark})" in answer["stderr"]
    assert box.outputs("SUBMIT(works=True)") == WORKS
    box.close()
    # The process still runs, so the sandbox stays in the list, and a reaper does not report it as removed.
    assert marked.pids() == [pid]
    assert sandbox in host.list_sandboxes()
    refused = host.wait(host.ask({"op": "delete", "sandbox": sandbox}))
    assert f"could not be ended: {pid}" in refused["broken"]
    assert sandbox in host.list_sandboxes()
    state.write_text("THAWED")
    marked.wait_until_gone()
    host.delete_sandbox(sandbox)
    assert sandbox not in host.list_sandboxes()


@pytest.mark.full
@pytest.mark.requires("landlock")
@pytest.mark.parametrize("who", [pytest.param("root", marks=pytest.mark.requires("root")), "user"])
def test_processes_of_killed_drivers_are_found_by_their_mark(
    new_host: Hosts, hosts: Hosts, marked: Marked, bomb: str, who: str
) -> None:
    """Only the mark identifies these processes: parent, session, directory and name do not name the sandbox."""
    another = hosts(who)  # start the other host while a processor is free
    host = new_host(who)
    box = Box(host, "landlock", fields={"processes": PROCESSES})
    sandbox = box.run("pass")["sandbox"]
    variables = {"program": bomb, "kind": "s", "mark": marked.mark, "seconds": SECONDS}
    box.send(f"{START}time.sleep(1000)", timeout=1000, **variables)
    marked.wait_for(PROCESSES // 2)
    (driver,) = (int(name) for name in os.listdir("/proc") if name.isdigit() and is_driver(int(name), sandbox))
    zygote = read_parent(driver)
    assert zygote != host.process.pid
    for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot clean up
        for pid in (zygote, driver):
            os.kill(pid, number)
    host.process.kill()
    host.process.wait()
    assert marked.pids()
    another.delete_sandbox(sandbox)
    marked.wait_until_gone()
    assert sandbox not in another.list_sandboxes()


def is_driver(pid: int, sandbox: str) -> bool:
    """Return True if the process is the sandbox's driver: it has the sandbox's mark and no seccomp filter."""
    try:
        limit = Path(f"/proc/{pid}/limits").read_text().partition("resident set")[2].split()[0]
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, IndexError):
        return False
    return limit == str(compute_mark(Path(sandbox))) and "\nSeccomp:\t0" in status
