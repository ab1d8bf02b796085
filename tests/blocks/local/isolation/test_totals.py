"""Limits for a local sandbox as a whole: enforced by control groups if the machine has them, else by the watcher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.totals import cgroups
from rlm_batch.blocks.local.totals.watcher import WatchedSandbox
from rlm_batch.sandbox.wire.process_table import read_process, read_processes

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
for number in range(8):
    with open(f"file{number}", "wb") as file:
        file.write(os.urandom(1 << 20) * 8)
time.sleep(1000)
SUBMIT(works=True)
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
HOLD_FILES = """    file = os.open("held", os.O_CREAT | os.O_RDWR)
    os.unlink("held")
    os.write(file, os.urandom(1 << 20) * 64)"""
DELETED_FILE = """
file = open("file", "wb")
os.unlink("file")
file.write(os.urandom(1 << 20) * 64)
file.flush()
time.sleep(1000)
SUBMIT(works=True)
"""
DEEP_FILE = """
name = "d" * 250
for _ in range(20):  # further than a path can be long
    os.mkdir(name)
    os.chdir(name)
with open("file", "wb") as file:
    file.write(os.urandom(1 << 20) * 64)
time.sleep(1000)
"""
# A few thousand files exceed the limit; a file system without a journal creates files slowly after many deletions.
EMPTY_FILES = """
for number in range(20_000):
    open(str(number), "w").close()
time.sleep(1000)
"""
MAPPED_FILE = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
file = open("file", "w+b")
file.write(os.urandom(1 << 20) * 64)
file.flush()
assert libc.mmap(None, 4096, 1, 1, file.fileno(), 0) != ctypes.c_void_p(-1).value
os.unlink("file")
file.close()
time.sleep(1000)
"""
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


def list_groups() -> list[Path]:
    """Return the control groups of sandboxes in the groups that this process uses."""
    paths = {parent.path for parent in cgroups.find_parents().values()}
    return [group for path in paths for group in path.glob(cgroups.GROUP_PREFIX + "*")]


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


def test_total_file_size_has_a_limit(own_box: Boxes) -> None:
    box = own_box(file_size_mib=128, disk_mib=32)
    assert box.outputs('open("small", "wb").write(bytes(1 << 20)); SUBMIT(works=True)') == {"works": True}
    run_beyond(box, "disk_mib", FILES)
    # The files still exist, so this sandbox accepts no execution; the next caller opens a new one.
    assert box.run("pass")["error"]["error"] == "SandboxLost"


@pytest.mark.full
@pytest.mark.each_once
def test_memory_counts_after_the_main_thread_has_ended(own_box: Boxes, marked: Marked) -> None:
    box = own_box(memory_mib=1024, total_memory_mib=300)
    name = f"libc.prctl(15, {marked.mark.encode()}, 0, 0, 0)\n"
    box.send(name + BY_ANOTHER_THREAD.format(hold=HOLD_MEMORY))
    marked.wait_for(2)
    wait_until(lambda: len(marked.pids()) < 2, "the end of the one that held it, or of the execution")
    box.close()


DISK_HOLDERS = {
    "deleted and open": DELETED_FILE,
    "of another thread": BY_ANOTHER_THREAD.format(hold=HOLD_FILES),
    "deep": DEEP_FILE,
    "empty": EMPTY_FILES,
}


@pytest.mark.full
@pytest.mark.each_once
@pytest.mark.parametrize("code", DISK_HOLDERS)
def test_files_count_wherever_they_are_kept(own_box: Boxes, code: str) -> None:
    disk_mib = 4 if code in ("deep", "empty") else 32
    run_beyond(own_box(file_size_mib=128, disk_mib=disk_mib), "disk_mib", DISK_HOLDERS[code])


@pytest.mark.full
@pytest.mark.requires("root")  # only root can inspect a process's mapped files
def test_a_deleted_but_mapped_file_counts_under_root(hosts: Hosts, level: str) -> None:
    box = Box(hosts("root"), level, None, {"file_size_mib": 128, "disk_mib": 32})
    run_beyond(box, "disk_mib", MAPPED_FILE)
    box.close()


def test_doctor_names_the_mechanism_that_enforces_the_limits(level: str) -> None:
    text = asyncio.run(LocalSandbox(isolation=level).check())  # type: ignore[arg-type]
    version = getattr(cgroups.find_parents().get("memory"), "version", None)
    assert f"total_memory_mib by {'a watcher' if version is None else f'cgroup v{version}'}" in text
    assert "disk_mib by a watcher" in text


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
    groups = [group for group in list_groups() if group.name == box.sandbox and (group / "cpu.stat").exists()]
    wait_until(lambda: any("nr_throttled 0" not in (group / "cpu.stat").read_text() for group in groups), "held back")
    box.let_go()
    assert box.host.wait(running).get("outputs") == {"works": True}
    box.close()


@pytest.mark.requires("root", "landlock for users")
def test_a_limit_that_cannot_be_enforced_is_refused(hosts: Hosts) -> None:
    error = Box(hosts("user"), "landlock", None, {"cpus": 0.2}).run("pass")["error"]
    assert error["error"] == "ConfigurationError"
    assert "cpus is 0.2" in error["text"]
    assert "Delegate=yes" in error["text"]


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
    assert [layer for layer in answer["layers"] if layer == "watcher" or layer.startswith("cgroup-v")] != []
    if box.host.uid == 0 and "memory" in cgroups.find_parents():
        assert f"cgroup-v{cgroups.find_parents()['memory'].version}" in answer["layers"]
    box.close()
    assert [group for group in list_groups() if group.name == answer["sandbox"]] == []


@pytest.mark.full
@pytest.mark.requires("root", "landlock", "memory groups")
def test_the_cgroup_of_a_killed_host_is_removed_with_its_folder(new_host: Hosts, hosts: Hosts) -> None:
    host = new_host("root")
    sandbox = Box(host, "landlock", None, {"total_memory_mib": 300}).run("pass")["sandbox"]
    assert sandbox in [group.name for group in list_groups()]
    host.process.kill()
    host.process.wait()
    hosts("root").delete_sandbox(sandbox)
    assert sandbox not in [group.name for group in list_groups()]


@pytest.mark.requires("root", "memory groups")
def test_an_empty_cgroup_is_removed_by_the_next_process() -> None:
    group = cgroups.find_parents()["memory"].path / f"{cgroups.GROUP_PREFIX}{os.urandom(6).hex()}"
    group.mkdir()
    cgroups.find_parents.cache_clear()
    assert "memory" in cgroups.find_parents()
    assert not group.exists()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[cgroups.Parent]:
    """Return a parent group for memory in which another process removes the first three new groups."""
    parent = cgroups.find_parents()["memory"]
    own = cgroups.Parent(parent.path / f"tests-of-totals-{os.getpid()}", parent.version)
    own.path.mkdir()
    cgroups.enable_controllers(own.path)
    make, removals = Path.mkdir, iter(range(3))

    def make_and_lose(path: Path, *args: Any, **options: Any) -> None:
        make(path, *args, **options)
        if path.parent == own.path and next(removals, None) is not None:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    yield own
    for group in own.path.glob("*/"):
        group.rmdir()
    own.path.rmdir()


@pytest.mark.requires("root", "memory groups")
def test_a_cgroup_that_another_process_removes_is_created_again(crowded: cgroups.Parent) -> None:
    directory = crowded.path / f"{cgroups.GROUP_PREFIX}0"
    limit = "memory.limit_in_bytes" if crowded.version == 1 else "memory.max"
    group = cgroups.SandboxGroup({directory: {limit: 64 << 20}})
    group.create()
    assert (directory / limit).read_text() == f"{64 << 20}\n"
    directory.rmdir()
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            group.add(process.pid)
            assert (directory / "cgroup.procs").read_text() == f"{process.pid}\n"
            assert (directory / limit).read_text() == f"{64 << 20}\n"
        finally:
            process.kill()


def make_delegated_tree(folder: Path, busy: str) -> Path:
    """Create folders like cgroup version 2; the group named `busy` has processes, so it cannot enable controllers."""
    for path in (folder, folder / "service", folder / "service" / "main"):
        path.mkdir(exist_ok=True)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            (path / name).write_text("")
        (path / "cgroup.controllers").write_text("cpu memory pids")
        if path.name == busy:
            (path / "cgroup.subtree_control").unlink()
            (path / "cgroup.subtree_control").mkdir()
    return folder / "service" / "main"


def test_a_delegated_cgroup_of_version_2_is_usable_when_empty(tmp_path: Path) -> None:
    own = make_delegated_tree(tmp_path, busy="main")
    assert cgroups.list_delegated(own, tmp_path) == [own, tmp_path / "service", tmp_path]
    assert cgroups.enable_controllers(own) == []
    (own.parent / "cgroup.subtree_control").write_text("memory pids cpu")
    assert cgroups.enable_controllers(own.parent) == ["memory", "pids", "cpu"]


def test_the_process_that_waits_for_the_first_code_is_never_killed() -> None:
    program = "import os, time\nif fork := os.fork(): print(fork, flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            waiting = int(supervisor.stdout.readline())
            sandbox = WatchedSandbox((), {"processes": 0}, False, supervisor.pid, is_supervisor=True)
            sandbox.check(read_processes())
            assert sandbox.take_exceeded_limit() == ""
            assert read_process(waiting)[2] not in "ZX"
            sandbox.expect_execution(is_preparation=False)
            sandbox.limits["processes"] = 1  # the supervisor does not count
            sandbox.check(read_processes())
            assert sandbox.take_exceeded_limit() == ""
            sandbox.limits["processes"] = 0
            sandbox.check(read_processes())
            assert sandbox.take_exceeded_limit() == "processes"
            wait_until(lambda: read_process(waiting)[2] == "Z", "the end of what waited")
        finally:
            supervisor.kill()


def test_a_process_from_before_prepare_is_not_taken_for_the_prepared_process() -> None:
    fork = "if fork := os.fork(): print(fork, flush=True)\nelse: time.sleep(1000)"
    program, pipe = f"import os, sys, time\n{fork}\nsys.stdin.readline()\n{fork}\ntime.sleep(1000)", subprocess.PIPE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            waited = int(supervisor.stdout.readline())
            begun = read_process(waited)[1]
            wait_until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") > begun + 2, "ticks")
            sandbox = WatchedSandbox((), {"processes": 1}, False, supervisor.pid, is_supervisor=True)
            sandbox.expect_execution(is_preparation=True)
            sandbox.check(read_processes())  # the prepared process does not exist yet
            print(file=supervisor.stdin, flush=True)
            prepared = int(supervisor.stdout.readline())
            sandbox.check(read_processes())
            assert sandbox.take_exceeded_limit() == "processes"
            wait_until(lambda: read_process(waited)[2] == "Z", "the end of what waited")
            assert read_process(prepared)[2] not in "ZX"
        finally:
            os.killpg(supervisor.pid, signal.SIGKILL)
