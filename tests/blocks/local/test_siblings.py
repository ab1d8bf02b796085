"""Attacks of an execution on other executions of its sandbox, and on their supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .boxes import Box, wait_for_file

if TYPE_CHECKING:
    from .boxes import Boxes
    from .hosts import Hosts
    from .targets import Marked

# A sibling that runs a program, publishes both ids, waits for the attack, and then submits.
SIBLING = """
import subprocess
priority = os.getpriority(os.PRIO_PROCESS, 0)
program = subprocess.Popen(["sleep", "1000"])
held = ctypes.create_string_buffer(b'x')
with open("sibling.new", "w") as file:
    file.write(f"{os.getpid()} {ctypes.addressof(held)} {program.pid}")
os.rename("sibling.new", "sibling")
while not os.path.exists("attacked"):
    time.sleep(0.01)
with open(os.devnull):
    SUBMIT(whole=os.getpriority(os.PRIO_PROCESS, 0) == priority and program.poll() is None)
"""
WHOLE = {"whole": True}
ATTACKER = """
while not os.path.exists("sibling"):
    time.sleep(0.01)
pid, address, program = map(int, open("sibling").read().split())
try:
%s
finally:
    open("attacked", "w").close()
SUBMIT(done=done, refused=refused)
"""
SIGNALS = """
for number in (0, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    attempt(f"signal {number}", lambda: os.kill(pid, number))
    attempt(f"signal {number} to the group", lambda: os.killpg(pid, number))
    attempt(f"signal {number} by descriptor", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), number))
attempt("thread", lambda: call("tgkill", pid, pid, 9))
attempt("thread alone", lambda: call("tkill", pid, 9))
attempt("queued", lambda: call("rt_sigqueueinfo", pid, 9, bytes(4) + struct.pack("ii", 0, -1) + bytes(116)))
try:
    send_signal_by_owner(pid, signal.SIGKILL)
except OSError:
    pass
"""
LIMITS = """
import resource
for name in ("NOFILE", "AS", "CPU", "DATA", "STACK", "FSIZE"):
    attempt(name, lambda: resource.prlimit(pid, getattr(resource, "RLIMIT_" + name), (0, 0)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
attempt("group's priority", lambda: os.setpriority(os.PRIO_PGRP, pid, 19))
attempt("user's priority", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
attempt("processors", lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)))
attempt("policy", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
attempt("group", lambda: os.setpgid(pid, os.getpid()))
"""
MEMORY = """
for part in ("mem", "maps", "environ", "auxv", "io", "syscall"):
    attempt(f"memory: {part}", lambda: read(f"/proc/{pid}/{part}"))
for number in range(6):
    attempt(f"memory: fd {number}", lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
for part in ("oom_score_adj", "comm", "clear_refs", "coredump_filter", "timerslack_ns"):
    attempt(f"memory: {part} written", lambda: write(f"/proc/{pid}/{part}", b"1", os.O_RDWR))
attempt("memory: mem written", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
attempt("memory: cwd", lambda: os.readlink(f"/proc/{pid}/cwd"))
vector = struct.pack("QQ", ctypes.addressof(ctypes.create_string_buffer(8)), 8)
remote = struct.pack("QQ", address, 8)
attempt("memory: read", lambda: call("process_vm_readv", pid, vector, 1, remote, 1, 0))
attempt("memory: written", lambda: call("process_vm_writev", pid, vector, 1, remote, 1, 0))
attempt("memory: attached", lambda: call("ptrace", 16, pid, 0, 0))
attempt("memory: seized", lambda: call("ptrace", 0x4206, pid, 0, 0))
attempt("memory: compared", lambda: call("kcmp", os.getpid(), pid, 0, 1, 1))
attempt("memory: descriptor", lambda: call("pidfd_getfd", os.pidfd_open(pid), 4, 0))
"""
# The kernel makes a process that has executed another program accessible to its user again.
ATTACKS_ON_SIBLING = f"{SIGNALS}{LIMITS}{MEMORY}\npid = program\n{SIGNALS}{LIMITS}"


def run_attack(box: Box, code: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the attack next to a sibling and return both answers. Call this once per sandbox."""
    sibling = box.send(SIBLING)
    lines = "\n".join(f"    {line}" for line in code.strip("\n").splitlines())
    answer = box.run(ATTACKER % lines)
    return answer, box.host.wait(sibling)


def check_that_a_sibling_is_out_of_reach(box: Box) -> None:
    """Attack a sibling in every way, and check that no attack succeeds."""
    answer, sibling = run_attack(box, ATTACKS_ON_SIBLING)
    assert sibling.get("outputs") == WHOLE, sibling
    assert answer["outputs"]["refused"]
    done = answer["outputs"]["done"]
    assert [name for name in done if not name.startswith("memory")] == [], done
    # Without Landlock, siblings can read each other's memory, as docs/isolation.md says.
    assert bool(done) == (box.abi == 0), done


@pytest.mark.older_kernels(0, 1, 5)
def test_code_cannot_reach_a_sibling_or_its_program(own_box: Boxes) -> None:
    check_that_a_sibling_is_out_of_reach(own_box())


def test_code_cannot_forge_a_siblings_results(own_box: Boxes) -> None:
    code = """
import gc
gc.unfreeze()
kinds, supervisors = ("Supervisor", "ChildProcess", "Execution"), []
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if type(value).__name__ in kinds:
            supervisors.append(value)
    frame = frame.f_back
supervisors += [value for value in gc.get_objects() if type(value).__name__ in kinds]
tokens = set()
for value in supervisors:
    for process in getattr(value, "_processes", {}).values():
        if process.execution is not None:
            tokens.add(process.execution.token)
    token = getattr(value, "token", None) or getattr(getattr(value, "execution", None), "token", None)
    if token:
        tokens.add(token)
tokens.discard(own_token())
for token in tokens:
    for op in ("submit", "end"):
        header = '{"op":"%s","status":"finished","token":"%s"' % (op, token)
        attempt(f"{op} of another", lambda: say(header, b'{"whole":false}'))
done.clear()
"""
    answer, sibling = run_attack(own_box(), code)
    assert sibling.get("outputs") == WHOLE, sibling
    assert "outputs" in answer or answer["error"]["error"] == "CodeCrashed"


@pytest.mark.each_once
def test_a_module_file_left_behind_does_not_replace_the_standard_library(own_box: Boxes) -> None:
    box = own_box()
    box.run("""
for name in ("statistics", "random", "csv", "subprocess"):
    with open(f"{name}.py", "w") as file:
        file.write("mean = lambda values: 666\\nplanted = True")
""")
    outputs = box.outputs("""
import csv, random, statistics, subprocess
SUBMIT(planted=[m.__name__ for m in (csv, random, statistics, subprocess) if hasattr(m, "planted")])
""")
    assert outputs == {"planted": []}


# ------------------------------------------------------------------------------------------------------ the supervisor

SUPERVISOR = """
import resource
pid = os.getppid()
for name in ("NOFILE", "AS", "CPU", "NPROC", "FSIZE"):
    attempt(name, lambda: resource.prlimit(pid, getattr(resource, "RLIMIT_" + name), (0, 0)))
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    attempt(f"signal {number}", lambda: os.kill(pid, number))
try:
    send_signal_by_owner(pid, signal.SIGKILL)
except OSError:
    pass
for number in range(12):
    attempt(f"fd {number}", lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
attempt("mem", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
for part in ("environ", "maps", "auxv", "io"):
    attempt(part, lambda: read(f"/proc/{pid}/{part}"))
attempt("score written", lambda: write(f"/proc/{pid}/oom_score_adj", b"1"))
"""
WIRE = """
for number in range(16):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        path = f"/proc/1/fd/{number}"
        attempt(f"{number} {flags}", lambda: os.write(os.open(path, flags | os.O_NONBLOCK), b'{"op":"forged"}\\n'))
attempt("memory", lambda: os.open("/proc/1/mem", os.O_RDWR))
"""


@pytest.mark.older_kernels(0, 1, 5)
def test_code_cannot_reach_the_supervisor_or_its_wire(own_box: Boxes) -> None:
    answer, sibling = run_attack(own_box(), SUPERVISOR + WIRE)
    assert sibling.get("outputs") == WHOLE, sibling
    assert answer["outputs"]["done"] == {}


NAMED = "libc.prctl(15, mark.encode(), 0, 0, 0)\n"  # PR_SET_NAME
WORKS = {"works": True}

# Writers faster than any reader: they send memory pages instead of copying bytes.
FLOOD = """
fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ
page = ctypes.create_string_buffer(b"x" * (1 << 20))
vector = struct.pack("QQ", ctypes.addressof(page), 1 << 20)
def flood():
    while True:
        libc.vmsplice(1, vector, 1, 0)
parent = os.getpid()
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        if %(after)r:
            while os.getppid() == parent:
                pass
        flood()
%(then)s
"""
CHANNEL_FLOOD = """
fcntl.fcntl(4, 1031, 1 << 20)
parent = os.getpid()
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == parent:
            pass
        while True:
            os.write(4, %s)
os._exit(3)
"""
NOISE = "b'z' * (1 << 20)"
FRAMES = '(b\'{"op":"call","token":"","call":1,"name":"x","body":2}\\n{}\\n\' * 20000)[:1 << 20]'


def check_that_others_run(box: Box) -> None:
    """Check that three executions work, one after the other."""
    assert [box.run("SUBMIT(works=True)").get("outputs") for _ in range(3)] == [WORKS] * 3


@pytest.mark.each_once
def test_a_flood_of_output_delays_no_sibling_and_ends_with_its_sandbox(own_box: Boxes, marked: Marked) -> None:
    box = own_box()
    flooding = box.send(NAMED + FLOOD % {"after": False, "then": "flood()"}, timeout=1000, mark=marked.mark)
    marked.wait_for(11)
    check_that_others_run(box)
    box.close()
    assert "error" in box.host.wait(flooding)
    marked.wait_until_gone()
    check_that_others_run(box)


@pytest.mark.each_once
def test_floods_after_an_executions_end_delay_no_sibling(own_box: Boxes, marked: Marked) -> None:
    box = own_box()
    for flood in (FLOOD % {"after": True, "then": "os._exit(3)"}, CHANNEL_FLOOD % NOISE, CHANNEL_FLOOD % FRAMES):
        flooding = box.send(NAMED + flood, mark=marked.mark)
        check_that_others_run(box)
        assert box.host.wait(flooding)["error"]["error"] == "CodeCrashed"
        marked.wait_until_gone()


@pytest.mark.each_once
def test_large_encoded_or_binary_output_harms_no_execution(own_box: Boxes) -> None:
    box = own_box()
    sibling = box.send(wait_for_file() + "SUBMIT(works=True)")
    texts = ("'\\0' * 40_000", "chr(0x1F600) * 500_000", "'\\\"' * 200_000")
    rubbish = ("os.urandom(300_000)", "b'\\xff' * 300_000", "b'\\xf0\\x9f' * 100_000")
    outputs = [f"print({text})\nprint({text}, file=sys.stderr)" for text in texts]
    outputs += [f"sys.stdout.buffer.write({data})\nsys.stdout.flush()" for data in rubbish]
    for output in outputs:
        answer = box.run(f"{output}\nSUBMIT(said=True)")
        assert answer.get("outputs") == {"said": True}, {**answer, "stdout": "", "stderr": ""}
    box.let_go()
    assert box.host.wait(sibling).get("outputs") == WORKS


@pytest.mark.each_once
def test_a_flood_of_calls_ends_at_most_its_execution(own_box: Boxes) -> None:
    box = own_box()
    supervisor = box.outputs("SUBMIT(pid=os.getppid())")
    flooding = box.send(
        """
body = b'{"args":["' + b"x" * (1 << 16) + b'"],"kwargs":{}}'
for number in range(5000):  # and never reads an answer
    say('{"op":"call","token":"%s","call":%d,"name":"echo"' % (own_token(), number), body)
SUBMIT(sent=True)
""",
        timeout=2,
    )
    check_that_others_run(box)
    answer = box.host.wait(flooding)
    assert "outputs" in answer or answer["error"]["error"] in ("CodeCrashed", "ExecutionTimeout"), answer
    assert box.outputs("SUBMIT(pid=os.getppid())") == supervisor


FORGERIES = {
    "no UTF-8": ("submit", "error", 'b\'{"x": "\\xff"}\''),
    "too much": ("submit", "error", "b'{\"x\": \"' + b'x' * 1_200_000 + b'\"}'"),
    "an error without an end": (
        "end", "error", 'b\'{"type": "\' + b"\\x7f" * 600_000 + b\'", "message": "\' + b"x" * 600_000 + b\'"}\''
    ),
    # A SandboxStartError is always retried, but code that may have run must not be.
    "a failure to start": ("end", "setup", 'b\'{"message":"forged"}\''),
}  # fmt: skip


@pytest.mark.each_once
def test_a_forged_end_fails_only_its_execution(box: Box) -> None:
    """Code may report anything about itself, but a result must be a JSON object of at most 1 MiB."""
    for name, (op, status, body) in FORGERIES.items():
        answer = box.run(f"""
say('{{"op":"{op}","status":"{status}","token":"%s"' % own_token(), {body})
os._exit(0)
""")
        if answer.get("outputs") != {}:
            kind = answer.get("error", {}).get("error")
            assert kind in ("CodeCrashed", "CodeError", "SubmitError"), f"{name}: {answer}"[:500]
            assert len(answer["error"]["text"]) < 50_000, name  # no longer than the driver's own errors
    assert box.outputs("SUBMIT(works=True)") == WORKS


# --------------------------------------------------------------------------------------------------- leftover processes

DAEMONS = """
def daemon():
    reads, writes = os.pipe()
    if os.fork() == 0:
        libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
        libc.prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.write(writes, b"x")
            os.closerange(0, 100)
            while True:
                time.sleep(60)
        os._exit(0)
    os.read(reads, 1)
daemon()
libc.prctl(36, 0, 0, 0, 0)
daemon()
"""
# Each process forks its successor and ends, so a search finds only ended processes. They stop after five minutes.
COMETS = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
end = time.monotonic() + 300
for _ in range(12):
    try:
        is_comet = os.fork() == 0
    except OSError:  # where the kernel counts all processes of a user, others' may have taken the last place
        is_comet = False
    while is_comet:
        try:
            if time.monotonic() > end or os.fork():
                os._exit(0)
            os.setsid()
        except OSError:
            pass
"""


@pytest.mark.each_once
@pytest.mark.parametrize("leaving", [DAEMONS, pytest.param(COMETS, marks=pytest.mark.full)], ids=["daemons", "comets"])
def test_processes_that_an_execution_leaves_end_with_it(own_box: Boxes, marked: Marked, leaving: str) -> None:
    box = own_box()
    sibling = box.send(wait_for_file() + "SUBMIT(works=True)")
    for then in ("SUBMIT()", "os._exit(3)", *(["time.sleep(1000)"] if leaving == COMETS else [])):
        box.run(f"{NAMED}{leaving}\n{then}", mark=marked.mark, timeout=5 if "sleep" in then else 60)
        marked.wait_until_gone()
    box.let_go()
    assert box.host.wait(sibling).get("outputs") == WORKS


@pytest.mark.each_once
def test_processes_that_a_sandbox_leaves_end_with_it(own_box: Boxes, marked: Marked) -> None:
    box = own_box()
    for leaving in (DAEMONS, COMETS):
        box.send(f"{NAMED}{leaving}\ntime.sleep(1000)", mark=marked.mark, timeout=1000)
        marked.wait_for(3 if leaving is DAEMONS else 1)  # the other processes of COMETS exist only for a moment
        box.close()
        marked.wait_until_gone()


@pytest.mark.requires("landlock for users")
def test_a_timeout_in_a_context_ends_only_processes_of_that_execution(hosts: Hosts, marked: Marked) -> None:
    """The kernel reports a process whose first thread has ended only as a zombie."""
    box = Box(hosts("user"), "landlock")
    # The kernel counts start times in ticks of 10 ms. `before` starts more than two ticks before the next code.
    box.run(
        "import subprocess\nbefore = subprocess.Popen(['sleep', '1000'], start_new_session=True)\ntime.sleep(0.1)",
        context="c",
    )
    code = f"""
import _thread
after = subprocess.Popen(["sleep", "1000"], start_new_session=True)
for _ in range(3):
    if os.fork() == 0:
        {NAMED}
        os.setsid()
        _thread.start_new_thread(time.sleep, (1000,))
        libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends this thread alone
time.sleep(1000)
"""
    running = box.send(code, mark=marked.mark, context="c", timeout=10)
    marked.wait_for(3)
    assert box.host.wait(running)["error"]["error"] == "ExecutionTimeout"
    marked.wait_until_gone()
    outputs = box.outputs("SUBMIT(before=before.poll(), after=after.wait(60))", context="c")
    assert outputs == {"before": None, "after": -9}
    box.close()
