"""Limits for a local sandbox as a whole: enforced by control groups if the machine has them, else by the watcher."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.cgroup import SandboxGroup, find_parent, remove_group

from ....infra.waiting import wait_until
from ..boxes import Box

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..hosts import Hosts
    from ..targets import Marked

# One process fills 300 MiB in pieces until it is killed; no limit on its address space counts this memory.
IN_MEMORY_FILES = """
held = []
for number in range(3):
    held.append(os.memfd_create(str(number)))
    for _ in range(100):
        os.write(held[-1], bytes(1 << 20))
time.sleep(1000)
SUBMIT(held=len(held))
"""
IN_PROCESSES = """
for _ in range(6):
    if os.fork() == 0:
        data = os.urandom(1 << 20) * 100
        time.sleep(1000)
        os._exit(0)
SUBMIT(ended=[os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)])
"""
FILES = """
try:
    for number in range(8):
        with open(f"file{number}", "wb") as file:
            file.write(os.urandom(1 << 20) * 8)
except OSError as error:
    SUBMIT(error=errno.errorcode[error.errno], mib=sum(os.stat(name).st_blocks for name in os.listdir()) >> 11)
"""
# A process whose first thread has ended: the kernel does not list its memory and files under the process's own id.
BY_ANOTHER_THREAD = """
import _thread
is_ending = _thread.allocate_lock()
is_ending.acquire()
def hold():
    is_ending.acquire()
{hold}
    time.sleep(1000)
    os._exit(0)
pid = os.fork()
if pid == 0:
    _thread.start_new_thread(hold, ())
    is_ending.release()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends this thread alone
os.waitpid(pid, 0)
time.sleep(1000)  # for the watcher takes the process that holds the most, and the kernel one after the other
SUBMIT(works=True)
"""
HOLD_MEMORY = (
    "    held = [os.memfd_create(str(i)) for i in range(6)]\n    for fd in held: os.write(fd, bytes(100 << 20))"
)
FORKS = """
for _ in range(50):
    try:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
    except OSError:
        break
time.sleep(1000)
"""


def run_beyond(box: Box, limit: str, code: str) -> dict[str, Any]:
    """Return the error of code that exceeds a limit of the whole sandbox, and check that the error names the limit."""
    answer = box.run(code, timeout=100)
    assert "error" in answer, answer
    error = answer["error"]
    assert error["error"] == "CodeCrashed"
    assert limit in error["text"], error["text"]
    return error


def test_total_memory_has_a_limit(own_box: Boxes) -> None:
    box = own_box(memory_mib=256, total_memory_mib=128)
    error = run_beyond(box, "total_memory_mib", IN_MEMORY_FILES)
    assert error["out_of_memory"] is True
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


@pytest.mark.full
@pytest.mark.each_once
def test_total_memory_of_child_processes_has_a_limit(own_box: Boxes) -> None:
    box = own_box(memory_mib=256, total_memory_mib=300)
    answer = box.run(IN_PROCESSES)
    # The kernel kills single processes, but the watcher kills the whole execution.
    if "outputs" in answer:
        assert answer["outputs"] == {"ended": [-signal.SIGKILL] * 3}
    else:
        assert "total_memory_mib" in answer["error"]["text"]
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


@pytest.mark.full
@pytest.mark.each_once
def test_memory_below_the_limit_is_allowed(own_box: Boxes) -> None:
    box = own_box(total_memory_mib=300)
    # A fork shares its parent's pages, which count once.
    code = """
data = os.urandom(1 << 20) * 150
if os.fork() == 0:
    time.sleep(2)  # some rounds of the watcher's
    os._exit(0)
time.sleep(2)
SUBMIT(works=True)
"""
    assert box.outputs(code) == {"works": True}


@pytest.mark.requires("root", "bubblewrap", "bubblewrap for users")
@pytest.mark.parametrize("who", ["root", "user"])
def test_files_have_a_limit_together(hosts: Hosts, who: str) -> None:
    box = Box(hosts(who), "bubblewrap", None, {"file_size_mib": 128, "disk_mib": 32})
    assert box.outputs("import errno\n" + FILES) == {"error": "ENOSPC", "mib": 32}
    error = box.run('open("more", "wb").write(bytes(1 << 20))')["error"]
    assert "`disk_mib` allows 32" in error["text"]
    assert list(box.folder.iterdir()) == []  # The files are in memory, and the sandbox stays usable.
    code = 'for name in os.listdir(): os.unlink(name)\nopen("small", "wb").write(bytes(1 << 20))\nSUBMIT(works=True)'
    assert box.outputs(code) == {"works": True}
    box.close()


@pytest.mark.full
@pytest.mark.each_once
def test_memory_counts_after_the_main_thread_has_ended(own_box: Boxes, marked: Marked) -> None:
    box = own_box(memory_mib=1024, total_memory_mib=300)
    name = f"libc.prctl(15, {marked.mark.encode()}, 0, 0, 0)\n"
    box.send(name + BY_ANOTHER_THREAD.format(hold=HOLD_MEMORY))
    marked.wait_for(2)
    wait_until(lambda: len(marked.pids()) < 2, "the end of the one that held it, or of the execution")
    box.close()


def test_shared_memory_has_a_limit(own_box: Boxes) -> None:
    """On `landlock`, code cannot write to shared memory."""
    box = own_box(memory_mib=256, total_memory_mib=128)
    attempts = box.run_attempts('attempt("written", lambda: open("/dev/shm/x", "wb").write(bytes(100 << 20)))')
    assert attempts.done == {}
    assert attempts.refused == {"written": "ENOSPC" if box.level == "bubblewrap" else "EACCES"}
    # The written data stays, and leaves memory for the code.
    assert box.outputs("SUBMIT(works=len(bytearray(20 << 20)))") == {"works": 20 << 20}


@pytest.mark.requires("root", "landlock", "cpu groups")
def test_processors_have_a_limit(hosts: Hosts) -> None:
    box = Box(hosts("root"), "landlock", None, {"cpus": 0.2})
    # A group with limited processor time counts how often it was throttled.
    code = "while not os.path.exists('go'): pass\nSUBMIT(works=True)"
    box.run("pass")
    running = box.send(code)
    group = find_parent().path / box.sandbox
    wait_until(lambda: "nr_throttled 0" not in (group / "cpu.stat").read_text(), "held back")
    box.let_go()
    assert box.host.wait(running).get("outputs") == {"works": True}
    box.close()


@pytest.mark.requires("root", "landlock for users")
@pytest.mark.parametrize(("option", "value", "remedy"), [("cpus", 0.2, "Delegate=yes"), ("disk_mib", 32, "container")])
def test_a_limit_that_cannot_be_enforced_is_refused(hosts: Hosts, option: str, value: float, remedy: str) -> None:
    error = Box(hosts("user"), "landlock", None, {option: value}).run("pass")["error"]
    assert error["error"] == "ConfigurationError"
    assert f"`{option}` is {value}" in error["text"]
    assert remedy in error["text"]


@pytest.mark.requires("root", "landlock for users")
def test_the_process_limit_holds_where_the_kernel_counts_per_user(hosts: Hosts) -> None:
    host = hosts("user")
    others = subprocess.Popen(["sh", "-c", "for i in $(seq 60); do sleep 1000 & done; wait"], **host.as_user())
    below = Path(f"/proc/{others.pid}/task/{others.pid}/children")
    own = wait_until(lambda: found if len(found := below.read_text().split()) == 60 else [], "60 processes")
    box = Box(host, "landlock", None, {"processes": 20})
    box.run("pass")
    # The kernel's limit includes these processes, so after their end it would allow the sandbox as many more.
    for pid in map(int, own):
        os.kill(pid, signal.SIGKILL)
    others.wait()  # the shell reaps its children, which count until then
    run_beyond(box, "processes", FORKS)
    assert box.outputs("SUBMIT(works=True)") == {"works": True}
    box.close()


def test_the_layers_name_the_enforcement_and_no_cgroup_remains(own_box: Boxes) -> None:
    box = own_box(total_memory_mib=300)
    answer = box.run("pass")
    has_groups = "memory" in find_parent().controllers
    assert ("cgroup-v2" if has_groups else "watcher") in answer["layers"]
    text = asyncio.run(LocalSandbox(isolation="none").check())
    assert f"{'cgroup v2' if has_groups else 'a watcher'} limits a sandbox as a whole" in re.sub(
        r" \(\w+[^()]*\)", "", text
    )
    box.close()
    assert not (find_parent().path / answer["sandbox"]).exists()


@pytest.mark.full
@pytest.mark.requires("root", "landlock", "memory groups")
def test_the_cgroup_of_a_killed_host_is_removed_with_its_folder(new_host: Hosts, hosts: Hosts) -> None:
    host = new_host("root")
    sandbox = Box(host, "landlock", None, {"total_memory_mib": 300}).run("pass")["sandbox"]
    assert (find_parent().path / sandbox).exists()
    host.process.kill()
    host.process.wait()
    hosts("root").delete_sandbox(sandbox)
    assert not (find_parent().path / sandbox).exists()


def test_a_group_has_its_limits_and_processes_and_reports_kills(tmp_path: Path) -> None:
    directory = tmp_path / "rlm-batch-0"
    group = SandboxGroup(directory, {"memory": 64 << 20, "pids": 20, "cpu": 0.5})
    group.create()
    group.add(os.getpid())
    files = {path.name: path.read_text() for path in directory.iterdir()}
    assert {**files, "cgroup.procs": "pid"} == {
        "memory.max": str(64 << 20), "pids.max": "20", "cpu.max": "50000 100000", "cgroup.procs": "pid",
    }  # fmt: skip
    assert not group.has_new_memory_kill()
    (directory / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert [group.has_new_memory_kill() for _ in range(2)] == [True, False]
    for path in directory.iterdir():
        path.unlink()
    remove_group(group.path)
    assert not directory.exists()
