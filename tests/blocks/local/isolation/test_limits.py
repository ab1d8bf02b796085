"""Limits that code in a local sandbox cannot exceed, on each isolation level."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ....infra.waiting import wait_until
from ..boxes import Box, wait_for_file

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..hosts import Hosts


def test_memory_beyond_the_limit_ends_only_its_execution(own_box: Boxes) -> None:
    box = own_box(memory_mib=256)
    for code in ("data = bytearray(600 * 1024 * 1024)", "data = []\nwhile True: data.append(bytearray(1 << 20))"):
        error = box.run(code)["error"]
        assert error["error"] == "CodeCrashed"
        assert error["out_of_memory"] is True
    error = box.run("""
attempt("mapped", lambda: __import__("mmap").mmap(-1, 600 << 20))
raise MemoryError if refused else RuntimeError(done)
""")["error"]
    assert error["error"] == "CodeCrashed"
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


def test_a_limit_cannot_be_raised(own_box: Boxes) -> None:
    attempts = own_box(memory_mib=256, processes=40, file_size_mib=1, cpu_seconds=30).run_attempts("""
import resource
for name in ("AS", "NPROC", "FSIZE", "CPU", "CORE"):
    which = getattr(resource, "RLIMIT_" + name)
    attempt(name, lambda: resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
    attempt(f"{name} of itself", lambda: resource.prlimit(os.getpid(), which, (1 << 40, 1 << 40)))
""")
    assert attempts.done == {}


FORKS = """
children = 0
for _ in range(200):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    children += 1
open("full", "w").close()
%s
SUBMIT(started=children)
"""
THREADS = """
import threading
gate = threading.Event()
started = 0
try:
    for _ in range(200):
        threading.Thread(target=gate.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
gate.set()
SUBMIT(started=started)
"""


@pytest.mark.own_count
def test_forks_and_threads_of_all_executions_share_one_limit(own_box: Boxes) -> None:
    box = own_box(processes=50)
    first = box.send(FORKS % wait_for_file())
    wait_until((box.folder / "full").exists, "as many processes as there may be")
    answer = box.run(FORKS % "")  # this may fail, because the limit leaves no process for the execution
    second = answer["outputs"]["started"] if "outputs" in answer else 0
    box.let_go()
    counts = [box.host.wait(first)["outputs"]["started"] + second]
    # The first execution's processes have ended.
    counts += [box.outputs(code)["started"] for code in (FORKS % "", THREADS)]
    # The count includes the supervisor and bubblewrap, and on landlock the user's other sandboxes.
    assert 5 < min(counts) <= max(counts) <= 50, counts


@pytest.mark.requires("landlock for users")
def test_cpu_time_beyond_the_limit_ends_only_its_execution(hosts: Hosts) -> None:
    box = Box(hosts("user"), "landlock", fields={"cpu_seconds": 1})
    error = box.run("while True: pass", timeout=100)["error"]
    assert error["error"] == "CodeCrashed"
    assert "CPU seconds" in error["text"]
    assert box.outputs("SUBMIT(works=True)") == {"works": True}
    box.close()


def test_a_file_beyond_the_limit_cannot_be_written(own_box: Boxes) -> None:
    outputs = own_box(file_size_mib=1).outputs("""
import mmap, tempfile
attempt("small", lambda: open("small", "wb").write(bytes(1 << 20)))
attempt("large", lambda: open("large", "wb").write(bytes(2 << 20)))
attempt("sparse", lambda: os.truncate("small", 2 << 20))
fd = os.open("allocated", os.O_CREAT | os.O_RDWR)
attempt("allocated", lambda: os.posix_fallocate(fd, 0, 2 << 20))
memory = os.memfd_create("memory")
attempt("in memory", lambda: os.ftruncate(memory, 2 << 20))
SUBMIT(done=done, refused=refused, largest=max(os.path.getsize(name) for name in os.listdir()))
""")
    assert set(outputs["done"]) == {"small"}
    assert outputs["largest"] <= 1 << 20


@pytest.mark.each_once
def test_open_files_and_processor_seconds_have_limits_by_default(own_box: Boxes) -> None:
    outputs = own_box().outputs(
        """
import resource
files, seconds = (resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU))
attempt("files", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files[1] + 1, files[1] + 1)))
SUBMIT(files=files[1], seconds=seconds[1], done=done)
""",
        timeout=60,
    )
    assert outputs["files"] == 1024
    assert 60 <= outputs["seconds"] <= 91 * (os.cpu_count() or 1) + 2
    assert outputs["done"] == {}
