"""What forks of one prepared process cannot do to each other, nor to that process, nor to the supervisor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ..test_siblings import DAEMONS, LIMITS, MEMORY, NAMED, SIGNALS, SUPERVISOR, WHOLE, attacked

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..targets import Marked

# As a sibling does it, for whoever attacks, and what is to be defended besides.
PREPARE = """
import ctypes, os
prepared, buffer = os.getpid(), ctypes.create_string_buffer(b'x')
secret = ["prepared"]
"""
ADDRESS = "pid, address = prepared, ctypes.addressof(buffer)\n"
ATTACKS = pytest.mark.parametrize("attack", [SIGNALS, LIMITS, MEMORY], ids=["signals", "limits", "memory"])


@pytest.mark.older_kernels(0, 1, 5)
@ATTACKS
def test_a_fork_of_the_same_process_cannot_be_reached(own_box: Boxes, attack: str) -> None:
    box = own_box(prepare=PREPARE)
    answer, sibling = attacked(box, attack)
    assert sibling.get("outputs") == WHOLE, sibling
    assert answer["outputs"]["refused"]
    is_readable = box.abi == 0 and attack == MEMORY  # as between any two executions where there is no Landlock
    assert bool(answer["outputs"]["done"]) == is_readable


@pytest.mark.older_kernels(0, 1, 5)
@ATTACKS
def test_the_process_that_is_forked_cannot_be_reached(own_box: Boxes, attack: str) -> None:
    box = own_box(prepare=PREPARE)
    tried = box.tried(ADDRESS + attack)
    assert tried.done == {}, tried
    assert box.outputs("SUBMIT(secret=secret)") == {"secret": ["prepared"]}


@pytest.mark.older_kernels(0, 1, 5)
def test_the_supervisor_cannot_be_reached_by_what_prepares_nor_by_a_fork(own_box: Boxes) -> None:
    from ..boxes import ATTACK, numbers

    box = own_box(prepare=f"numbers = {numbers()!r}\n{ATTACK}\n{SUPERVISOR}\nfound = dict(done)\ndone.clear()")
    answer = box.run(SUPERVISOR + "\nSUBMIT(done=done, found=found)")
    assert box.run("SUBMIT(works=True)").get("outputs") == {"works": True}
    assert answer["outputs"] == {"done": {}, "found": {}}


@pytest.mark.older_kernels(0, 1, 5)
def test_a_fork_has_no_descriptor_of_the_process_that_is_forked_nor_of_another_fork(own_box: Boxes) -> None:
    box = own_box(prepare=PREPARE)
    code = "SUBMIT(fds=[fd for fd in range(64) if is_open(fd)])"
    is_open = """
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
"""
    others = [box.send("time.sleep(1)\nSUBMIT()") for _ in range(3)]
    assert box.outputs(is_open + code) == {"fds": [0, 1, 2, 3, 4]}
    for number in others:
        box.host.wait(number)


@pytest.mark.older_kernels(0, 1, 5)
def test_a_thread_of_a_fork_submits_at_once(own_box: Boxes) -> None:
    """Where the filter looks at signals a fork can send itself none: the supervisor does."""
    box = own_box(prepare="import threading")
    begun = time.monotonic()
    assert box.outputs("threading.Thread(target=lambda: SUBMIT(x=1)).start()\ntime.sleep(20)") == {"x": 1}
    assert time.monotonic() - begun < 10


@pytest.mark.each_once
@pytest.mark.parametrize("then", ["SUBMIT()", "os._exit(3)", "time.sleep(60)"], ids=["result", "crash", "timeout"])
def test_processes_that_a_fork_leaves_end_with_it_and_no_other_does(own_box: Boxes, marked: Marked, then: str) -> None:
    box = own_box(prepare=PREPARE)
    sibling = box.send("time.sleep(0.8)\nSUBMIT(secret=secret)")
    box.run(f"{NAMED}{DAEMONS}\ntime.sleep(0.1)\n{then}", mark=marked.mark, timeout=0.4)
    assert marked.left(5) == []
    assert box.host.wait(sibling).get("outputs") == {"secret": ["prepared"]}
    assert box.outputs("SUBMIT(prepared=prepared)") == box.outputs("SUBMIT(prepared=prepared)")


@pytest.mark.each_once
def test_what_prepare_leaves_running_ends_with_the_sandbox(own_box: Boxes, marked: Marked) -> None:
    box = own_box(
        prepare=f"mark = {marked.mark!r}\nimport ctypes, os, signal, time\nlibc = ctypes.CDLL(None)\n{NAMED}{DAEMONS}"
    )
    assert marked.there(5)
    assert box.outputs("SUBMIT(x=1)") == {"x": 1}
    assert marked.pids()
    box.close()
    assert marked.left(10) == []
    box.run("pass")  # in a new one, for the fixture to close
    box.close()
    assert marked.left(10) == []
    box.run("pass")


@pytest.mark.full
@pytest.mark.each_once
def test_limits_on_processor_time_are_each_execution_s_own(own_box: Boxes) -> None:
    """What prepare has used is not counted, nor does its own timeout bound what comes after it."""
    box = own_box(prepare="import time\nwhile time.process_time() < 0.7: pass", cpu_seconds=1)
    burn = "while time.process_time() < 0.7: pass\nSUBMIT(x=1)"
    assert [box.outputs(burn) for _ in range(2)] == [{"x": 1}] * 2
    answer = box.run("while True: pass", timeout=20)
    assert "CPU seconds" in answer["error"]["text"], answer


@pytest.mark.each_once
@pytest.mark.parametrize("left", [1, 4], ids=["for one more", "for a fork's pipes alone"])
def test_files_that_prepare_has_left_open_in_excess_are_said(own_box: Boxes, left: int) -> None:
    open_all = """
import os
files = []
try:
    while True:
        files.append(os.dup(0))
except OSError:
    for fd in files[-%d:]:
        os.close(fd)
"""
    box = own_box(open_files=64)
    box.close()
    box.fields["prepare"] = open_all % left
    answer = box.run("SUBMIT()")
    assert answer["error"]["error"] == "SandboxStartError"
    assert "no process could be made for the code: Too many open files" in answer["error"]["text"]


@pytest.mark.each_once
@pytest.mark.parametrize(
    "handler", ["signal.SIG_IGN", "lambda *_: os.waitpid(-1, os.WNOHANG)"], ids=["ignored", "waited for"]
)
def test_prepare_may_handle_the_ends_of_children_as_it_likes(own_box: Boxes, handler: str) -> None:
    box = own_box(prepare=f"import os, signal\nsignal.signal(signal.SIGCHLD, {handler})\nx = 1")
    assert [box.outputs("SUBMIT(x=x)") for _ in range(5)] == [{"x": 1}] * 5


LARGE = "import os, time\nprepared, data = os.getpid(), os.urandom(1 << 20) * 250"


@pytest.mark.full
@pytest.mark.each_once
def test_memory_that_executions_have_from_prepare_counts_once_for_the_sandbox(own_box: Boxes) -> None:
    box = own_box(prepare=LARGE, total_memory_mib=400)
    before = box.outputs("SUBMIT(prepared=prepared)")
    running = [box.send("time.sleep(2)\nSUBMIT(prepared=prepared, size=len(data))") for _ in range(3)]
    assert [box.host.wait(number).get("outputs") for number in running] == [{**before, "size": 250 << 20}] * 3
    assert box.outputs("SUBMIT(prepared=prepared)") == before


@pytest.mark.full
@pytest.mark.each_once
def test_an_execution_ends_for_want_of_memory_of_the_sandbox_before_what_is_prepared(own_box: Boxes) -> None:
    leave = "if os.fork() == 0:\n    own = os.urandom(1 << 20) * 250\n    time.sleep(1000)"
    box = own_box(prepare=f"import os, time\nprepared = os.getpid()\n{leave}", total_memory_mib=400)
    before = box.outputs("SUBMIT(prepared=prepared)")
    running = [box.send("own = os.urandom(1 << 20) * 90\ntime.sleep(6)\nSUBMIT(x=1)") for _ in range(2)]
    answers = [box.host.wait(number) for number in running]
    ended = [answer for answer in answers if "outputs" not in answer]
    if "watcher" in answers[0]["layers"]:  # a control group's kernel takes the largest: what was left running
        assert len(ended) == 1
        assert "total_memory_mib" in ended[0]["error"]["text"]
    assert box.outputs("SUBMIT(prepared=prepared)") == before
