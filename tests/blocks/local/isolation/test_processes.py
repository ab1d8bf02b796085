"""Attempts of code in a local sandbox to affect or inspect the host's other processes, on each isolation level."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..boxes import unconfined
from ..hosts import ENVIRONMENT_SECRET

if TYPE_CHECKING:
    from ..boxes import Box, Boxes
    from ..targets import Victim


def test_code_does_not_see_the_hosts_environment(box: Box) -> None:
    outputs = box.outputs("""
try:
    initial = open("/proc/self/environ").read()
except OSError:
    initial = ""
SUBMIT(names=sorted(os.environ), values=list(os.environ.values()), initial=initial)
""")
    assert ENVIRONMENT_SECRET not in str(outputs)
    known = "LC_CTYPE PATH HOME TMPDIR LANG PYTHONDONTWRITEBYTECODE PWD VIRTUAL_ENV USER LOGNAME"
    assert set(outputs["names"]) <= set(known.split())
    assert str(box.host.home) not in outputs["values"]


def test_the_codes_user_has_a_name_and_a_home(box: Box) -> None:
    outputs = box.outputs("""
import getpass, subprocess
ask = "import getpass, os; print(getpass.getuser(), os.path.expanduser('~'))"
child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.split()
SUBMIT(own=[getpass.getuser(), os.path.expanduser("~")], child=child, home=os.environ["HOME"])
""")
    assert outputs["own"] == outputs["child"] == ["sandbox", outputs["home"]]


PEEK = """
for name, pid in pids.items():
    pid = pid or os.getppid()
    for part in ("environ", "mem", "maps", "auxv", "stack", "syscall", "fd", "task", "cwd", "root", "exe", "ns/net"):
        path = f"/proc/{pid}/{part}"
        if part in ("fd", "task"):
            attempt(f"{name} {part}", lambda: [read(f"{path}/{entry}/mem") for entry in os.listdir(path)])
        elif part in ("cwd", "root", "exe", "ns/net"):
            attempt(f"{name} {part}", lambda: os.readlink(path))
            attempt(f"{name} {part} entered", lambda: os.chdir(path))
        else:
            attempt(f"{name} {part}", lambda: read(path))
    attempt(f"{name} mem written", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)))
    for number in range(8):
        attempt(f"{name} fd {number}", lambda: os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK)))
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
    remote = struct.pack("QQ", address, 8)
    attempt(f"{name} process_vm_readv", lambda: call("process_vm_readv", pid, vector, 1, remote, 1, 0))
    attempt(f"{name} process_vm_writev", lambda: call("process_vm_writev", pid, vector, 1, remote, 1, 0))
    attempt(f"{name} attached to", lambda: call("ptrace", 16, pid, 0, 0))
    attempt(f"{name} seized", lambda: call("ptrace", 0x4206, pid, 0, 0))
    attempt(f"{name} compared", lambda: call("kcmp", os.getpid(), pid, 0, 1, 1))
    def steal():
        return call("pidfd_getfd", os.pidfd_open(pid), 0, 0)
    attempt(f"{name} descriptor taken", steal)
    attempt(f"{name} advised", lambda: call("process_madvise", os.pidfd_open(pid), remote, 1, 4, 0))
    attempt(f"{name} entered", lambda: call("setns", os.pidfd_open(pid), 0x20000))
    attempt(f"{name} pages", lambda: call("move_pages", pid, 0, 0, 0, 0, 0))
"""


@pytest.mark.older_kernels(0, 1, 5)
def test_code_cannot_access_memory_and_descriptors_of_other_processes(box: Box, victim: Victim) -> None:
    address = int(Path(f"/proc/{victim.pid}/maps").read_text().split("-")[0], 16)
    pids = {"victim": victim.pid, "host": box.host.pid, "supervisor": 0, "init": 1}
    attempts = box.run_attempts(PEEK, pids=pids, address=address)
    assert attempts.done == {}
    open_there = unconfined(box).run_attempts(PEEK, pids={"victim": victim.pid}, address=address).done
    assert {"victim environ", "victim cwd"} <= set(open_there)
    assert ENVIRONMENT_SECRET in open_there["victim environ"]


def test_processes_of_the_host_cannot_be_listed(box: Box, victim: Victim) -> None:
    attempts = box.run_attempts(
        """
attempt("listed", lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
attempt("victim", lambda: read(f"/proc/{pid}/cmdline"))
attempt("victim's state", lambda: read(f"/proc/{pid}/stat"))
""",
        pid=victim.pid,
    )
    if box.level == "landlock":
        assert attempts.done == {}
        return
    assert set(attempts.done) == {"listed"}
    # The sandbox's own processes, numbered from 1.
    assert max(map(int, attempts.done["listed"].strip("[]").split(", "))) < 1000


SIGNAL = """
for name, pid in pids.items():
    pid = pid or os.getppid()
    attempt(f"{name} asked", lambda: os.kill(pid, 0))
    attempt(f"{name} stopped", lambda: os.kill(pid, signal.SIGSTOP))
    attempt(f"{name} killed", lambda: os.kill(pid, signal.SIGKILL))
    if pid != 1:  # which is everybody, and stands below
        attempt(f"{name} group killed", lambda: os.kill(-pid, signal.SIGKILL))
    attempt(f"{name} thread killed", lambda: call("tgkill", pid, pid, 9))
    attempt(f"{name} thread killed alone", lambda: call("tkill", pid, 9))
    information = bytes(4) + struct.pack("ii", 0, -1) + bytes(116)
    attempt(f"{name} queued", lambda: call("rt_sigqueueinfo", pid, 9, information))
    attempt(f"{name} queued for a thread", lambda: call("rt_tgsigqueueinfo", pid, pid, 9, information))
    attempt(f"{name} killed by descriptor", lambda: call("pidfd_send_signal", os.pidfd_open(pid), 9, 0, 0))
    # Says that it was done whether or not the signal came, or not.
    try:
        send_signal_by_owner(pid, signal.SIGKILL)
    except OSError:
        pass
attempt("victim woken", lambda: os.kill(pids["victim"], signal.SIGCONT))
try:
    os.kill(-1, signal.SIGCONT)  # harmless to the others whom it may reach; done, says the kernel in any case
except OSError:
    pass
"""


@pytest.mark.older_kernels(0, 1, 5)
def test_other_processes_cannot_be_signalled(box: Box, victim: Victim) -> None:
    pids = {"victim": victim.pid, "host": box.host.pid, "supervisor": 0}
    victim.stop()
    attempts = box.run_attempts(SIGNAL, pids=pids)
    assert victim.is_untouched
    victim.go_on()
    assert box.host.process.poll() is None
    assert attempts.done == {}
    assert box.outputs("SUBMIT(works=True)") == {"works": True}  # the supervisor works too
    # Without isolation, a signal to all of a user's processes would also reach the processes of other tests.
    alone = SIGNAL.partition("try:\n    os.kill(-1")[0]
    assert {"victim killed"} <= set(unconfined(box).run_attempts(alone, pids={"victim": victim.pid}).done)


LIMIT = """
import resource
for name, pid in pids.items():
    pid = pid or os.getppid()
    attempt(f"{name} limits read", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
    # What is there already, for whoever is reached has to live with it.
    attempt(f"{name} limited", lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY)))
    attempt(f"{name} priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 0))
    attempt(f"{name} disk priority", lambda: call("ioprio_set", 1, pid, 0))
    attempt(f"{name} processors", lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)))
    attempt(f"{name} policy", lambda: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0)))
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0)
    attempt(f"{name} policy by a newer call", lambda: call("sched_setattr", pid, attributes, 0))
attempt("everyone's priority", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 0))
"""


@pytest.mark.older_kernels(0, 1, 5)
def test_limits_and_priorities_of_other_processes_cannot_be_changed(box: Box, victim: Victim) -> None:
    pids = {"victim": victim.pid, "host": box.host.pid, "supervisor": 0, "init": 1}
    assert box.run_attempts(LIMIT, pids=pids).done == {}
    assert {"victim priority", "victim processors"} <= set(
        unconfined(box).run_attempts(LIMIT, pids={"victim": victim.pid}).done
    )


def test_code_cannot_access_shared_memory_of_the_host(box: Box) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "big") | 0x10000000
    identifier = libc.shmget(key, 4096, 0o1666)
    if identifier < 0:
        pytest.skip("this machine has no shared memory of that kind")
    code = """
libc.shmat.restype = ctypes.c_ssize_t
attempt("found", lambda: checked(libc.shmget(key, 4096, 0o600)))
attempt("attached", lambda: checked(libc.shmat(identifier, None, 0)))
attempt("removed", lambda: checked(libc.shmctl(identifier, 0, None)))
"""
    try:
        assert (
            "found"
            in unconfined(box).run_attempts(code.partition('attempt("removed"')[0], key=key, identifier=identifier).done
        )
        attempts = box.run_attempts(code, key=key, identifier=identifier)
        assert "found" not in attempts.done
        assert box.level == "bubblewrap" or attempts.done == {}
        assert libc.shmget(key, 4096, 0o600) == identifier
    finally:
        libc.shmctl(identifier, 0, None)


def test_the_sandbox_leaves_no_kernel_objects(own_box: Boxes) -> None:
    """Shared memory, semaphores and message queues outlive the process that created them."""
    key = int.from_bytes(os.urandom(3), "big") | 0x10000000
    name = f"rlm-batch-test-{key}"
    found = own_box().run_attempts(
        """
attempt("memory", lambda: checked(libc.shmget(key, 4096, 0o1666)))
attempt("semaphores", lambda: checked(libc.semget(key, 1, 0o1666)))
attempt("messages", lambda: checked(libc.msgget(key, 0o1666)))
attempt("queue", lambda: call("mq_open", name.encode(), os.O_CREAT | os.O_RDWR, 0o666, 0))
attempt("key", lambda: call("add_key", b"user", b"mark", b"x", 1, -4))
""",
        key=key,
        name=name,
    )
    # The sandbox refuses to create them, because no limit counts kernel memory that belongs to no process.
    assert {"memory", "semaphores", "messages"} <= set(found.refused)
    libc = ctypes.CDLL(None, use_errno=True)
    left = []
    for kind, identifier, remove in (
        ("memory", libc.shmget(key, 0, 0), lambda found: libc.shmctl(found, 0, None)),
        ("semaphores", libc.semget(key, 0, 0), lambda found: libc.semctl(found, 0, 0)),
        ("messages", libc.msgget(key, 0), lambda found: libc.msgctl(found, 0, None)),
    ):
        if identifier != -1:
            left.append(kind)
            remove(identifier)
    if hasattr(libc, "mq_unlink") and libc.mq_unlink(f"/{name}".encode()) == 0:
        left.append("queue")
    assert left == []
