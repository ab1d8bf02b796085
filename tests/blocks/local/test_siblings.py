"""What one execution cannot do to the others in its sandbox, nor to the supervisor that they share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .boxes import Box, Boxes
    from .targets import Marked

# A sibling that tells where it is to be found, waits for the attack, and hands something back.
SIBLING = """
priority = os.getpriority(os.PRIO_PROCESS, 0)
with open("sibling", "w") as file:
    file.write(f"{os.getpid()} {ctypes.addressof(ctypes.create_string_buffer(b'x'))}")
while not os.path.exists("attacked"):
    time.sleep(0.01)
time.sleep(0.2)
with open(os.devnull):
    SUBMIT(whole=os.getpriority(os.PRIO_PROCESS, 0) == priority)
"""
WHOLE = {"whole": True}
ATTACKER = """
while not os.path.exists("sibling") or not os.path.getsize("sibling"):
    time.sleep(0.01)
pid, address = map(int, open("sibling").read().split())
try:
%s
finally:
    open("attacked", "w").close()
"""


def attacked(box: Box, code: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the attack beside a sibling; returns the answers to both."""
    sibling = box.send(SIBLING)
    lines = "\n".join(f"    {line}" for line in code.strip("\n").splitlines())
    answer = box.run(ATTACKER % lines + "\nSUBMIT(done=done, refused=refused)", **more)
    return answer, box.host.wait(sibling)


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
    attempt(part, lambda: read(f"/proc/{pid}/{part}"))
for number in range(6):
    attempt(f"fd {number}", lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
for part in ("oom_score_adj", "comm", "clear_refs", "coredump_filter", "timerslack_ns"):
    attempt(f"{part} written", lambda: write(f"/proc/{pid}/{part}", b"1", os.O_RDWR))
attempt("mem written", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
attempt("cwd", lambda: os.readlink(f"/proc/{pid}/cwd"))
vector = struct.pack("QQ", ctypes.addressof(ctypes.create_string_buffer(8)), 8)
remote = struct.pack("QQ", address, 8)
attempt("read", lambda: call("process_vm_readv", pid, vector, 1, remote, 1, 0))
attempt("written", lambda: call("process_vm_writev", pid, vector, 1, remote, 1, 0))
attempt("attached", lambda: call("ptrace", 16, pid, 0, 0))
attempt("seized", lambda: call("ptrace", 0x4206, pid, 0, 0))
attempt("compared", lambda: call("kcmp", os.getpid(), pid, 0, 1, 1))
attempt("descriptor", lambda: call("pidfd_getfd", os.pidfd_open(pid), 4, 0))
"""


@pytest.mark.older_kernels(0, 1, 5)
@pytest.mark.parametrize("attack", [SIGNALS, LIMITS, MEMORY], ids=["signals", "limits", "memory"])
def test_a_sibling_cannot_be_reached(own_box: Boxes, attack: str) -> None:
    box = own_box()
    answer, sibling = attacked(box, attack)
    assert sibling.get("outputs") == WHOLE, sibling
    assert answer["outputs"]["refused"]
    # Without Landlock they read each other's memory, as docs/isolation.md says.
    is_readable = box.abi == 0 and attack == MEMORY
    assert bool(answer["outputs"]["done"]) == is_readable


@pytest.mark.older_kernels(0, 1, 5)
def test_a_programme_that_a_sibling_runs_cannot_be_reached(own_box: Boxes) -> None:
    """It became another program after the confinement, which is when the kernel opens a process to its user."""
    box = own_box()
    sibling = box.send("""
import subprocess
process = subprocess.Popen(["sleep", "30"])
with open("sibling", "w") as file:
    file.write(f"{process.pid} 0")
while not os.path.exists("attacked"):
    time.sleep(0.01)
time.sleep(0.1)
state = process.poll()
libc.prctl(1, 0, 0, 0, 0)
SUBMIT(state=state)
""")
    attack = "\n".join(f"    {line}" for line in (SIGNALS + LIMITS).splitlines())
    answer = box.run(ATTACKER % attack + "\nSUBMIT(done=done)")
    assert box.host.wait(sibling).get("outputs") == {"state": None}
    assert answer["outputs"]["done"] == {}


def test_a_sibling_s_results_cannot_be_forged(own_box: Boxes) -> None:
    box = own_box()
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
    answer, sibling = attacked(box, code)
    assert sibling.get("outputs") == WHOLE, sibling
    assert "outputs" in answer or answer["error"]["error"] == "CodeCrashed"


@pytest.mark.each_once
def test_a_module_that_an_execution_leaves_does_not_stand_for_the_library_s(own_box: Boxes) -> None:
    box = own_box()
    box.run("""
for name in ("statistics", "random", "csv", "subprocess"):
    with open(f"{name}.py", "w") as file:
        file.write("mean = lambda values: 666\\nplanted = True")
""")
    found = box.outputs("""
import csv, random, statistics, subprocess
SUBMIT(planted=[m.__name__ for m in (csv, random, statistics, subprocess) if hasattr(m, "planted")])
""")
    assert found == {"planted": []}


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


@pytest.mark.older_kernels(0, 1, 5)
def test_the_supervisor_cannot_be_reached(own_box: Boxes) -> None:
    box = own_box()
    answer = box.run(SUPERVISOR + "\nSUBMIT(done=done)")
    assert box.run("SUBMIT(works=True)").get("outputs") == {"works": True}
    assert answer["outputs"]["done"] == {}


@pytest.mark.older_kernels(0, 1)
def test_the_wire_is_no_descriptor_of_a_first_process_that_code_can_open(own_box: Boxes) -> None:
    box = own_box()
    answer, sibling = attacked(
        box,
        """
for number in range(16):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        path = f"/proc/1/fd/{number}"
        attempt(f"{number} {flags}", lambda: os.write(os.open(path, flags | os.O_NONBLOCK), b'{"op":"forged"}\\n'))
attempt("memory", lambda: os.open("/proc/1/mem", os.O_RDWR))
""",
    )
    assert sibling.get("outputs") == WHOLE, sibling
    assert answer["outputs"]["done"] == {}


NAMED = "libc.prctl(15, mark.encode(), 0, 0, 0)\n"  # PR_SET_NAME

# Writers that are faster than any reader: they hand over pages instead of bytes.
FLOOD = """
fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ
page = ctypes.create_string_buffer(b"x" * (1 << 20))
vector = struct.pack("QQ", ctypes.addressof(page), 1 << 20)
def flood():
    while True:
        libc.vmsplice(1, vector, 1, 0)
parent = os.getpid()
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if %(after)r:
            while os.getppid() == parent:
                pass
        flood()
%(then)s
"""


@pytest.mark.each_once
@pytest.mark.parametrize(
    ("after", "then", "ends"),
    [
        pytest.param(False, "flood()", "ExecutionTimeout", marks=pytest.mark.full),
        (False, "os._exit(3)", "CodeCrashed"),
        (True, "time.sleep(0.2)\nos._exit(3)", "CodeCrashed"),
    ],
    ids=["to its timeout", "beyond its end", "after its end"],
)
def test_a_flood_of_output_keeps_no_sibling_waiting(
    own_box: Boxes, marked: Marked, after: bool, then: str, ends: str
) -> None:
    box = own_box()
    timeout = 1.5 if ends == "ExecutionTimeout" else 20
    flooding = box.send(NAMED + FLOOD % {"after": after, "then": then}, timeout=timeout, mark=marked.mark)
    time.sleep(0.3)
    assert [box.run("SUBMIT(works=True)", timeout=15).get("outputs") for _ in range(3)] == [{"works": True}] * 3
    answer = box.host.wait(flooding)
    assert answer.get("error", {}).get("error") == ends, answer


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
time.sleep(0.2)
os._exit(3)
"""


@pytest.mark.each_once
@pytest.mark.parametrize(
    "data",
    ["b'z' * (1 << 20)", '(b\'{"op":"call","token":"","call":1,"name":"x","body":2}\\n{}\\n\' * 20000)[:1 << 20]'],
    ids=["noise", "frames"],
)
def test_a_flood_of_the_channel_keeps_no_sibling_waiting(own_box: Boxes, marked: Marked, data: str) -> None:
    box = own_box()
    flooding = box.send(NAMED + CHANNEL_FLOOD % data, timeout=20, mark=marked.mark)
    time.sleep(0.3)
    assert [box.run("SUBMIT(works=True)", timeout=15).get("outputs") for _ in range(3)] == [{"works": True}] * 3
    assert box.host.wait(flooding)["error"]["error"] == "CodeCrashed"


@pytest.mark.each_once
@pytest.mark.parametrize(
    "text",
    ["'\\0' * 40_000", "chr(0x1F600) * 500_000", "'\\\"' * 200_000"],
    ids=["zeros", "faces", "quotes"],
)
def test_output_that_grows_on_the_wire_ends_nothing(own_box: Boxes, text: str) -> None:
    box = own_box()
    sibling = box.send("time.sleep(0.5)\nSUBMIT(works=True)")
    for _ in range(2):
        answer = box.run(f"print({text})\nprint({text}, file=sys.stderr)\nSUBMIT(said=True)")
        assert answer.get("outputs") == {"said": True}, {**answer, "stdout": "", "stderr": ""}
    assert box.host.wait(sibling).get("outputs") == {"works": True}


@pytest.mark.each_once
def test_output_that_is_no_text_ends_nothing(own_box: Boxes) -> None:
    box = own_box()
    for data in ("os.urandom(300_000)", "b'\\xff' * 300_000", "b'\\xf0\\x9f' * 100_000"):
        answer = box.run(f"sys.stdout.buffer.write({data})\nsys.stdout.flush()\nSUBMIT(said=True)")
        assert answer.get("outputs") == {"said": True}, {**answer, "stdout": "", "stderr": ""}


@pytest.mark.each_once
def test_a_flood_of_calls_ends_at_worst_the_execution_that_makes_it(own_box: Boxes) -> None:
    box = own_box()
    supervisor = box.outputs("SUBMIT(pid=os.getppid())")["pid"]
    flooding = box.send(
        """
body = b'{"args":["' + b"x" * (1 << 16) + b'"],"kwargs":{}}'
for number in range(5000):  # and never reads an answer
    say('{"op":"call","token":"%s","call":%d,"name":"echo"' % (own_token(), number), body)
SUBMIT(sent=True)
""",
        timeout=1,
    )
    time.sleep(0.3)
    assert box.run("SUBMIT(works=True)", timeout=10).get("outputs") == {"works": True}
    answer = box.host.wait(flooding)
    assert "outputs" in answer or answer["error"]["error"] in ("CodeCrashed", "ExecutionTimeout"), answer
    assert box.run("SUBMIT(works=True)", timeout=10).get("outputs") == {"works": True}
    assert supervisor == box.outputs("SUBMIT(pid=os.getppid())")["pid"]


FORGERIES = {
    "a list": ("submit", "b'[1, 2]'"),
    "a number": ("submit", "b'5'"),
    "text": ("submit", "b'\"text\"'"),
    "no JSON": ("submit", "b'{\"x\": NaN}'"),
    "no UTF-8": ("submit", 'b\'{"x": "\\xff"}\''),
    "a well": ("submit", "b'{\"x\": ' + b'[' * 400_000 + b']' * 400_000 + b'}'"),
    "a large number": ("submit", "b'{\"x\": ' + b'9' * 900_000 + b'}'"),
    "too much": ("submit", "b'{\"x\": \"' + b'x' * 1_200_000 + b'\"}'"),
    "a strange error": ("end", 'b\'{"kind": ["a"], "type": {}, "line": 1e999, "message": 5}\''),
    "an error without an end": (
        "end",
        'b\'{"type": "\' + b"\\x7f" * 600_000 + b\'", "message": "\' + b"x" * 600_000 + b\'"}\'',
    ),
    "a strange exit": ("end", 'b\'{"kind": "exit", "exit_code": "x", "message": []}\''),
}


@pytest.mark.each_once
@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_end_is_an_error_of_its_own_execution_alone(box: Box, what: str) -> None:
    """Nobody can keep code from saying what it likes about itself; but a result is an object, of at most 1 MiB."""
    op, body = FORGERIES[what]
    answer = box.run(f"""
say('{{"op":"{op}","status":"error","token":"%s"' % own_token(), {body})
os._exit(0)
""")
    if answer.get("outputs") != {}:
        assert answer.get("error", {}).get("error") in ("CodeCrashed", "CodeError", "SubmitError"), str(answer)[:500]
        assert len(answer["error"]["text"]) < 50_000  # no more than the driver's own
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


@pytest.mark.each_once
def test_a_forged_failure_to_start_is_not_tried_again_as_one(box: Box) -> None:
    """SandboxStartError is tried again whatever the caller said; code that has run must not be."""
    answer = box.run("""
open("has-run", "w").close()
say('{"op":"end","status":"setup","token":"%s"' % own_token(), b'{"message":"forged"}')
os._exit(0)
""")
    assert answer["error"]["error"] in ("CodeCrashed", "CodeError")


# -------------------------------------------------------------------------------------------------------- what is left

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
# Each forks its successor and ends, so that whoever looks for it comes late.
COMETS = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(30):
    try:
        is_comet = os.fork() == 0
    except OSError:  # where the kernel counts all processes of a user, others' may have taken the last place
        is_comet = False
    while is_comet:
        try:
            if os.fork():
                os._exit(0)
            os.setsid()
        except OSError:
            pass
"""


@pytest.mark.each_once
@pytest.mark.parametrize("leaving", [DAEMONS, pytest.param(COMETS, marks=pytest.mark.full)], ids=["daemons", "comets"])
@pytest.mark.parametrize(
    "then", ["SUBMIT()", "os._exit(3)", "time.sleep(60)"], ids=["a result", "a crash", "a timeout"]
)
def test_processes_that_an_execution_leaves_end_with_it(
    own_box: Boxes, marked: Marked, leaving: str, then: str
) -> None:
    box = own_box()
    sibling = box.send("time.sleep(0.6)\nSUBMIT(works=True)")
    box.run(f"{NAMED}{leaving}\ntime.sleep(0.1)\n{then}", mark=marked.mark, timeout=0.4)
    assert marked.left(5) == []
    assert box.host.wait(sibling).get("outputs") == {"works": True}


@pytest.mark.each_once
@pytest.mark.parametrize(
    "leaving",
    [DAEMONS, COMETS, FLOOD % {"after": False, "then": "flood()"}],
    ids=["daemons", "comets", "floods"],
)
def test_processes_that_a_sandbox_leaves_end_with_it(own_box: Boxes, marked: Marked, leaving: str) -> None:
    box = own_box()
    box.send(f"{NAMED}{leaving}\ntime.sleep(60)", mark=marked.mark)
    assert marked.there(30)  # the tests beside may take the processors too
    time.sleep(0.2)
    box.close()
    box.run("pass")  # in a new one, for the fixture to close
    assert marked.left(10) == []
