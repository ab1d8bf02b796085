"""Forks of a prepared process. They cannot affect each other, the prepared process or the supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..boxes import ATTACK, numbers, wait_for_file
from ..test_siblings import (
    DAEMONS,
    LIMITS,
    MEMORY,
    NAMED,
    SIGNALS,
    SUPERVISOR,
    WORKS,
    check_that_a_sibling_is_out_of_reach,
)

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..targets import Marked

# Code that attacks the supervisor, and holds data that forks must not reach.
PREPARE = f"""
numbers = {numbers()!r}
{ATTACK}
{SUPERVISOR}
found = dict(done)
done.clear()
prepared, buffer = os.getpid(), ctypes.create_string_buffer(b'x')
secret = ["prepared"]
"""
OPEN_DESCRIPTORS = """
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
SUBMIT(fds=[fd for fd in range(64) if is_open(fd)])
"""


@pytest.mark.older_kernels(0, 1, 5)
def test_forks_cannot_reach_each_other_the_prepared_process_or_the_supervisor(own_box: Boxes) -> None:
    box = own_box(prepare=PREPARE)
    others = [box.send(f"{wait_for_file()}SUBMIT(secret=secret)") for _ in range(3)]
    assert box.outputs(OPEN_DESCRIPTORS) == {"fds": [0, 1, 2, 3, 4]}
    check_that_a_sibling_is_out_of_reach(box)
    address = "pid, address = prepared, ctypes.addressof(buffer)\n"
    for attack in (address + SIGNALS + LIMITS + MEMORY, SUPERVISOR):
        assert box.outputs(f"{attack}\nSUBMIT(done=done, found=found)") == {"done": {}, "found": {}}
    box.let_go()
    for number in others:
        assert box.host.wait(number).get("outputs") == {"secret": ["prepared"]}
    # A filter that checks signals keeps a fork from signalling itself, so the supervisor ends code that keeps running.
    code = "import threading\nthreading.Thread(target=lambda: SUBMIT(x=1)).start()\ntime.sleep(1000)"
    assert box.outputs(code) == {"x": 1}


@pytest.mark.each_once
@pytest.mark.parametrize(
    "ends",
    [("SUBMIT()", "os._exit(3)"), pytest.param(("time.sleep(1000)",), marks=pytest.mark.full)],
    ids=["at its end", "after a timeout"],
)
def test_processes_that_a_fork_leaves_end_with_it(own_box: Boxes, marked: Marked, ends: tuple[str, ...]) -> None:
    box = own_box(prepare="import os\nprepared = os.getpid()")
    before = box.outputs("SUBMIT(prepared=prepared)")
    sibling = box.send(f"{wait_for_file()}SUBMIT(prepared=prepared)")
    for then in ends:
        box.run(f"{NAMED}{DAEMONS}{then}", mark=marked.mark, timeout=5 if "sleep" in then else 60)
        marked.wait_until_gone()
    box.let_go()
    assert box.host.wait(sibling).get("outputs") == before
    assert box.outputs("SUBMIT(prepared=prepared)") == before


@pytest.mark.each_once
def test_processes_that_prepare_leaves_end_with_the_sandbox(own_box: Boxes, marked: Marked) -> None:
    names = "import ctypes, os, signal, time\nlibc = ctypes.CDLL(None)"
    box = own_box(prepare=f"mark = {marked.mark!r}\n{names}\n{NAMED}{DAEMONS}")
    assert box.outputs("SUBMIT(works=True)") == WORKS
    assert marked.pids()
    box.close()
    marked.wait_until_gone()


@pytest.mark.full
@pytest.mark.each_once
def test_each_execution_has_a_separate_cpu_time_limit(own_box: Boxes) -> None:
    """The code's CPU time excludes the CPU time of `prepare`, and the timeout of `prepare` does not limit the code."""
    box = own_box(prepare="import time\nwhile time.process_time() < 0.7: pass", cpu_seconds=1)
    burn = "while time.process_time() < 0.7: pass\nSUBMIT(works=True)"
    assert [box.outputs(burn) for _ in range(2)] == [WORKS] * 2
    answer = box.run("while True: pass", timeout=100)
    assert "CPU seconds" in answer["error"]["text"], answer


@pytest.mark.each_once
@pytest.mark.parametrize(
    "handler", ["signal.SIG_IGN", "lambda *_: os.waitpid(-1, os.WNOHANG)"], ids=["ignored", "waited for"]
)
def test_prepare_may_set_any_handler_for_ended_children(own_box: Boxes, handler: str) -> None:
    box = own_box(prepare=f"import os, signal\nsignal.signal(signal.SIGCHLD, {handler})\nworks = True")
    assert [box.outputs("SUBMIT(works=works)") for _ in range(3)] == [WORKS] * 3


@pytest.mark.full
@pytest.mark.each_once
def test_memory_shared_with_prepare_counts_once_for_the_sandbox(own_box: Boxes) -> None:
    large = "import os, time\nprepared, data = os.getpid(), os.urandom(1 << 20) * 250"
    box = own_box(prepare=large, total_memory_mib=400)
    before = box.outputs("SUBMIT(prepared=prepared)")
    # The watcher checks twice a second, the kernel at once.
    running = [box.send("time.sleep(2)\nSUBMIT(prepared=prepared, size=len(data))") for _ in range(3)]
    assert [box.host.wait(number).get("outputs") for number in running] == [{**before, "size": 250 << 20}] * 3
    assert box.outputs("SUBMIT(prepared=prepared)") == before
