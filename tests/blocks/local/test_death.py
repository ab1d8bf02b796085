"""Local sandboxes whose host is killed: their processes end, and their folders can be removed."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ...conftest import find_zygotes
from ...infra.isolation_levels import find_missing_support
from ...infra.machine import read_parent
from ...infra.waiting import wait_until
from .boxes import Box
from .test_siblings import COMETS, FLOOD, NAMED

if TYPE_CHECKING:
    from .hosts import Host, Hosts
    from .targets import Marked

RUNGS = ("bubblewrap", "landlock", "none")

# Processes that try to survive: each has its own session and group, ignores signals, and has closed its files.
STAYING = f"""
import subprocess
{NAMED}
def stay():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
    os.closerange(0, 100)
    while True:
        time.sleep(60)
for depth in (1, 2):
    if os.fork() == 0:
        libc.prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        os.setsid()
        if depth == 1 or os.fork() == 0:
            stay()
        os._exit(0)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
libc.prctl(36, 0, 0, 0, 0)
libc.prctl(1, 0, 0, 0, 0)
time.sleep(1000)
"""


def list_descendants(pid: int) -> dict[int, str]:
    """Return the start times of a process's descendants by id. Ids are reused, but not with the same start time."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process ended meanwhile
            if words[0] not in "ZX":
                parents[int(name)] = int(words[1]), words[19]
    descendants: dict[int, str] = {}
    new = {pid}
    while new:
        new = {child for child, (parent, _) in parents.items() if parent in new}
        descendants |= {child: parents[child][1] for child in new}
    return descendants


def list_survivors(known: dict[int, str]) -> dict[int, str]:
    """Return the command lines, by id, of known processes that still run."""
    descendants: dict[int, str] = {}
    for pid, started in known.items():
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:100].decode("utf-8", "replace")
        except OSError:
            continue
        if words[19] == started and words[0] not in "ZX":
            descendants[pid] = command
    return descendants


@pytest.fixture
def own_host(new_host: Hosts, request: pytest.FixtureRequest) -> Iterator[Host]:
    """Return a host for one test to kill."""
    host = new_host(request.param)
    yield host
    host.process.kill()
    host.process.wait()
    for pipe in (host.process.stdin, host.process.stdout):
        assert pipe is not None
        pipe.close()


ROOT = pytest.param("root", marks=pytest.mark.requires("root"))
as_each_user = pytest.mark.parametrize("own_host", [ROOT, "user"], indirect=True)


def open_boxes(host: Host, levels: tuple[str, ...] = RUNGS) -> dict[str, Box]:
    """Return a sandbox, by its id, on each level that this host supports."""
    boxes: dict[str, Box] = {}
    for level in levels:
        if not find_missing_support(level, host.uid):
            box = Box(host, level)
            answer = box.run("open('left', 'w').write('x')")
            assert "error" not in answer, answer
            boxes[answer["sandbox"]] = box
    return boxes


def list_sandbox_processes(host: Host) -> dict[int, str]:
    """Return the processes of a host's sandboxes, without its zygotes, which live as long as the host."""
    zygotes = find_zygotes(host.pid)
    return {pid: started for pid, started in list_descendants(host.pid).items() if pid not in zygotes}


def wait_for_more(find: Callable[[], dict[int, str]], count: int) -> dict[int, str]:
    """Return the processes that `find` lists, once there are more than `count`."""
    return wait_until(lambda: found if len(found := find()) > count else {}, f"more than {count} processes")


def wait_for_end(known: dict[int, str], marked: Marked) -> None:
    """Wait until the known and the marked processes have ended."""
    try:
        wait_until(lambda: not list_survivors(known), "no process of a sandbox", timeout=60)
        marked.wait_until_gone()
    finally:
        for pid in list_survivors(known):
            os.kill(pid, signal.SIGKILL)


def find_supervisors(marked: Marked) -> set[int]:
    """Return the parents of the marked processes."""
    pids = set(marked.pids())
    return {read_parent(pid) for pid in pids} - pids


@pytest.mark.parametrize("own_host", [ROOT, pytest.param("user", marks=pytest.mark.full)], indirect=True)
def test_no_process_outlives_its_host_and_another_host_deletes_its_folders(
    own_host: Host, hosts: Hosts, marked: Marked
) -> None:
    boxes = open_boxes(own_host)
    for box in boxes.values():
        box.send(STAYING, mark=marked.mark, timeout=1000)
        box.send(STAYING, mark=marked.mark, timeout=1000, context="stays")
        box.send("while True: pass", timeout=1000)
    marked.wait_for(6 * len(boxes))
    known = wait_for_more(lambda: list_descendants(own_host.pid), 10 * len(boxes))
    own_host.process.kill()
    own_host.process.wait()
    wait_for_end(known, marked)
    another = hosts("root" if own_host.uid == 0 else "user")
    listed = another.list_sandboxes()
    for sandbox in boxes:
        assert listed[sandbox]["managed-by"] == "rlm-batch"
        another.delete_sandbox(sandbox)
        another.delete_sandbox(sandbox)  # deleting a missing sandbox is not an error
        assert not (another.folders / sandbox).exists()
    assert not boxes.keys() & set(another.list_sandboxes())
    assert stat.S_IMODE(another.folders.stat().st_mode) == 0o1777


@as_each_user
@pytest.mark.full
@pytest.mark.alone
def test_no_busy_process_outlives_its_host(own_host: Host, marked: Marked) -> None:
    boxes = open_boxes(own_host, RUNGS[:2])
    for box in boxes.values():
        box.send(NAMED + COMETS + "time.sleep(1000)", mark=marked.mark, timeout=1000)
        flooded = Box(own_host, box.level, fields={"lifetime": 60_000})
        flooded.send(NAMED + FLOOD % {"after": False, "then": "flood()"}, mark=marked.mark, timeout=1000)
    marked.wait_for(11 * len(boxes))
    known = list_descendants(own_host.pid)
    own_host.process.kill()
    own_host.process.wait()
    wait_for_end(known, marked)


@as_each_user
@pytest.mark.full
def test_another_host_can_delete_a_running_sandbox(own_host: Host, hosts: Hosts, marked: Marked) -> None:
    boxes = open_boxes(own_host)
    before = list_sandbox_processes(own_host)
    running = [box.send(STAYING, mark=marked.mark, timeout=1000) for box in boxes.values()]
    marked.wait_for(3 * len(boxes))
    known = wait_for_more(lambda: list_sandbox_processes(own_host), len(before) + 3 * len(boxes))
    another = hosts("root" if own_host.uid == 0 else "user")
    for sandbox in boxes:
        another.delete_sandbox(sandbox)
        assert not (another.folders / sandbox).exists()
    wait_for_end(known, marked)
    for number in running:
        assert own_host.wait(number)["error"]["error"] == "OutcomeUnknown"


@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)], ids=["hangs", "is killed"]
)
@pytest.mark.parametrize("own_host", ["user"], indirect=True)
def test_no_process_outlives_its_host_and_supervisor(own_host: Host, marked: Marked, number: int) -> None:
    boxes = open_boxes(own_host)
    for box in boxes.values():
        box.send(STAYING, mark=marked.mark, timeout=1000)
    marked.wait_for(3 * len(boxes))
    known = list_descendants(own_host.pid)
    # For SIGKILL, stop the zygotes. When they continue, both the supervisors and the host have ended.
    stopped = find_zygotes(own_host.pid) if number == signal.SIGKILL else set[int]()
    for pid in [own_host.pid, *stopped]:
        os.kill(pid, signal.SIGSTOP)
    for pid in find_supervisors(marked):
        os.kill(pid, number)
    own_host.process.kill()
    own_host.process.wait()
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_for_end(known, marked)


@pytest.mark.parametrize("own_host", ["user"], indirect=True)
@pytest.mark.full
def test_an_unresponsive_supervisor_is_ended_with_its_processes(own_host: Host, marked: Marked) -> None:
    """The test stops the supervisor, as a kernel short of memory or a bug could."""
    boxes = open_boxes(own_host, RUNGS[:2])
    for box in boxes.values():
        box.send(STAYING, mark=marked.mark, timeout=1000)
    marked.wait_for(3 * len(boxes))
    known = list_sandbox_processes(own_host)
    for pid in find_supervisors(marked):
        os.kill(pid, signal.SIGSTOP)
    closing = [own_host.ask({**box.request, "op": "close"}) for box in boxes.values()]
    for number in closing:
        assert own_host.wait(number).keys() == {"id"}
    wait_for_end(known, marked)
    assert not [sandbox for sandbox in boxes if (own_host.folders / sandbox).exists()]
