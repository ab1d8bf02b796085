"""Sandboxes are forked from a zygote: none reaches another, and what dies takes no more along than its own."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from rlm_batch import LocalInterpreter, LocalSandbox, OutcomeUnknown, SandboxLost, SandboxStartError
from rlm_batch.blocks.local.inventory import MARK_BASE
from rlm_batch.blocks.local.launch.launcher import MAX_IDLE_ZYGOTES, Zygotes

from ....conftest import find_zygotes, list_children
from ....infra.podman.store import PLACE as PODMAN_STORE
from .conftest import AHEAD_SECONDS, wait_until_gone

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..targets import Marked

pytestmark = pytest.mark.anyio

REACH = """
import resource
for pid in pids:
    for number in (0, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        attempt(f"signal {number} to {pid}", lambda: os.kill(pid, number))
    for name in ("NOFILE", "AS", "CPU", "NPROC", "FSIZE"):
        attempt(f"{name} of {pid}", lambda: resource.prlimit(pid, getattr(resource, "RLIMIT_" + name), (0, 0)))
    for number in range(20):
        attempt(f"fd {number} of {pid}", lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
        attempt(f"copy of fd {number} of {pid}", lambda: call("pidfd_getfd", os.pidfd_open(pid), number, 0))
    for part in ("mem", "environ", "maps", "auxv", "io"):
        attempt(f"{part} of {pid}", lambda: read(f"/proc/{pid}/{part}"))
    attempt(f"memory of {pid}", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
    attempt(f"score of {pid}", lambda: write(f"/proc/{pid}/oom_score_adj", b"1"))
    attempt(f"trace of {pid}", lambda: call("ptrace", 16, pid, 0, 0))
"""
LEAVE = """
import socket, tempfile
held = []
for path in ("left", tempfile.gettempdir() + "/left", "/dev/shm/left"):
    attempt(path, lambda: held.append(open(path, "w")))
attempt("socket", lambda: held.append(socket.socket(socket.AF_UNIX)) or held[-1].bind("\\0left") or held[-1].listen())
attempt("port", lambda: held.append(socket.create_server(("127.0.0.1", 45_671))))
attempt("terminal", lambda: os.openpty())
SUBMIT(done=done)
"""
LOOK = """
import socket, tempfile
for path in ("left", tempfile.gettempdir() + "/left", "/dev/shm/left"):
    attempt(path, lambda: os.stat(path))
attempt("socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0left"))
attempt("port", lambda: socket.create_connection(("127.0.0.1", 45_671)))
attempt("terminal", lambda: os.stat("/dev/pts/0"))
attempt("folders", lambda: os.listdir("/.sandboxes")[0])
SUBMIT(done=done)
"""


def list_marked(pid: int) -> list[int]:
    """What is below a process and has become a sandbox's."""
    children, found, below = list_children(), list[int](), [pid]
    for above in below:
        below += children.get(above, ())
        try:
            limit = Path(f"/proc/{above}/limits").read_text().partition("resident set")[2].split()[0]
        except OSError:
            continue
        if limit != "unlimited" and int(limit) >= MARK_BASE:
            found.append(above)
    return found


def set_file_limit(pids: set[int], limit: tuple[int, int]) -> None:
    """How many files the processes may have open from now on, those that end meanwhile left out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


# ------------------------------------------------------------------------------------------------------------ siblings


@pytest.mark.older_kernels(1)
def test_a_sandbox_reaches_neither_its_siblings_nor_their_zygote(own_box: Boxes) -> None:
    box, sibling = own_box(), own_box()
    time.sleep(AHEAD_SECONDS)
    pids = sorted({*find_zygotes(box.host.pid), *list_marked(box.host.pid)})
    own = box.outputs("SUBMIT(pids=[os.getpid(), os.getppid()])")["pids"]
    assert len(pids) > 4  # the zygote, the one ahead, and the supervisors of both
    tried = box.tried(REACH, pids=[pid for pid in pids if pid not in own], timeout=60)
    assert tried.done == {}
    assert sibling.outputs("SUBMIT(works=True)") == {"works": True}
    assert own_box().outputs("SUBMIT(works=True)") == {"works": True}


def test_nothing_that_a_sandbox_has_is_there_for_its_siblings(own_box: Boxes) -> None:
    box, sibling = own_box(), own_box()
    left = box.outputs(LEAVE, context="stays")["done"]
    assert {"left", *(("/dev/shm/left", "socket", "port") if box.level == "bubblewrap" else ())} <= left.keys()
    assert sibling.outputs(LOOK)["done"] == {}
    box.close()
    assert own_box().outputs(LOOK)["done"] == {}


def test_an_address_in_memory_and_what_an_execution_defined_are_its_own(local: LocalSandbox) -> None:
    with LocalInterpreter(isolation=local.isolation) as one:
        one.execute("import sys; sys.modules['planted'] = secret = 'of one'; import json; json.planted = 1")
        with LocalInterpreter(isolation=local.isolation) as other:
            code = "import json, sys; SUBMIT('secret' in dir() or 'planted' in sys.modules or hasattr(json, 'planted'))"
            assert other.execute(code).output is False


# --------------------------------------------------------------------------------------------------------------- deaths


async def test_a_zygote_that_is_killed_takes_its_sandboxes_along_and_the_next_has_a_new_one(
    local: LocalSandbox, zygotes: Zygotes
) -> None:
    of_others = list_marked(os.getpid())
    async with local.interpreter() as interpreter:
        running = asyncio.create_task(interpreter.execute("import time; time.sleep(60)"))
        await asyncio.sleep(0.5)
        marked = [pid for pid in list_marked(os.getpid()) if pid not in of_others]
        assert len(marked) >= 2
        killed = find_zygotes(os.getpid())
        for pid in killed:
            with suppress(ProcessLookupError):  # it ended with another
                os.kill(pid, signal.SIGKILL)
        with pytest.raises((OutcomeUnknown, SandboxLost)):
            await running
    assert await wait_until_gone(list(killed)) == []  # until then it may take a request, which is lost with it
    async with local.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
    assert await wait_until_gone(marked) == []


# Processes that outlive what started them: one sleeps, and each other forks its successor and ends.
LEAVING = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, mark.encode(), 0, 0, 0)  # PR_SET_NAME
until = time.monotonic() + 20
for number in range(4):
    if os.fork() == 0:
        os.setsid()
        if number == 0:
            time.sleep(60)
        while time.monotonic() < until:
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                pass
        os._exit(0)
time.sleep(60)
"""


async def test_what_a_supervisor_leaves_that_is_killed_ends_at_once_and_other_sandboxes_run_on(
    local: LocalSandbox, zygotes: Zygotes, marked: Marked
) -> None:
    async with local.interpreter() as interpreter:
        await interpreter.execute("pass")
        children, found = list_children(), find_zygotes(os.getpid())
        [(zygote, supervisor)] = [(one, pid) for one in found for pid in children.get(one, ()) if pid not in found]
        async with local.interpreter() as other:
            running = asyncio.create_task(interpreter.execute(LEAVING, {"mark": marked.mark}))
            assert await asyncio.to_thread(marked.there, 30)
            os.kill(supervisor, signal.SIGKILL)
            with pytest.raises((OutcomeUnknown, SandboxLost)):
                await running
            assert (await other.execute("SUBMIT(1)")).output == 1
            async with local.interpreter() as new:
                assert (await new.execute("SUBMIT(2)")).output == 2
            assert await asyncio.to_thread(marked.left, 15) == []
            assert zygote in find_zygotes(os.getpid())


@pytest.mark.requires("bubblewrap")
async def test_bubblewrap_that_is_killed_takes_nothing_along_that_runs(zygotes: Zygotes) -> None:
    provider = LocalSandbox(isolation="bubblewrap")
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
        (bubblewrap,) = [pid for pid in find_zygotes(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"]
        os.kill(bubblewrap, signal.SIGKILL)
        async with provider.interpreter() as other:
            assert (await other.execute("SUBMIT(2)")).output == 2
        assert (await interpreter.execute("SUBMIT(3)")).output == 3


@pytest.mark.full
@pytest.mark.strongest_first
def test_a_process_that_was_forked_from_a_host_has_sandboxes_of_its_own(local: LocalSandbox) -> None:
    program = f"""
        import asyncio, os
        from rlm_batch import LocalInterpreter, LocalSandbox

        async def run():
            async with LocalSandbox(isolation={local.isolation!r}).interpreter() as interpreter:
                return (await interpreter.execute("SUBMIT(2)")).output

        with LocalInterpreter(isolation={local.isolation!r}) as interpreter:
            assert interpreter.execute("x = 1; SUBMIT(x)").output == 1
            pid = os.fork()
            if pid == 0:
                with LocalInterpreter(isolation={local.isolation!r}) as own:
                    has_own = own.execute("SUBMIT(1)").output == 1
                os._exit(0 if has_own and asyncio.run(run()) == 2 else 1)
            assert os.waitpid(pid, 0)[1] == 0
            assert interpreter.execute("SUBMIT(x + 2)").output == 3
        assert asyncio.run(run()) == 2
    """
    subprocess.run([sys.executable, "-c", dedent(program)], check=True, timeout=60)


async def test_a_zygote_that_may_open_no_more_files_refuses_one_sandbox_and_keeps_the_others(
    local: LocalSandbox, zygotes: Zygotes
) -> None:
    async with local.interpreter() as interpreter:
        assert (await interpreter.execute("x = 1; SUBMIT(x)", context="c")).output == 1
        pids = find_zygotes(os.getpid())
        limit = max(resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids)
        set_file_limit(pids, (3, limit[1]))
        with pytest.raises(SandboxStartError, match=r"did not start|could not be forked"):
            await local.interpreter().execute("SUBMIT(2)")
        for _ in range(2):  # what one has forked in the middle of this has its low limit
            set_file_limit(pids | find_zygotes(os.getpid()), limit)
        async with local.interpreter() as other:
            assert (await other.execute("SUBMIT(2)")).output == 2
        assert find_zygotes(os.getpid()) & pids
        assert (await interpreter.execute("SUBMIT(x + 2)", context="c")).output == 3


# -------------------------------------------------------------------------------------------------- walls that change


def test_a_volume_that_was_removed_and_made_again_is_the_new_one(local: LocalSandbox, volumes: Path) -> None:
    for text in ("old", "new"):
        with LocalInterpreter(isolation=local.isolation, volume_name="data") as interpreter:
            code = "SUBMIT(found=list_volume()); "
            assert interpreter.execute(code).found == []
            interpreter.execute(f"save_to_volume('file', {text!r})")
        assert (volumes / "data" / "file").read_text() == text
        shutil.rmtree(volumes / "data")


@pytest.mark.full
@pytest.mark.requires("bubblewrap")
def test_zygotes_of_other_walls_that_are_idle_are_few(volumes: Path, zygotes: Zygotes) -> None:
    for number in range(MAX_IDLE_ZYGOTES + 4):
        with LocalInterpreter(isolation="bubblewrap", volume_name=f"data-{number}") as interpreter:
            interpreter.execute("pass")
    # Each is four processes: bubblewrap, itself, and the two that are forked ahead.
    until = time.monotonic() + 5
    while len(pids := find_zygotes(os.getpid())) > 4 * (MAX_IDLE_ZYGOTES + 1) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(pids) <= 4 * (MAX_IDLE_ZYGOTES + 1)


@pytest.mark.requires("bubblewrap", "root")
@pytest.mark.parametrize(
    ("calls", "found"),
    [
        (["unshare"], "bubblewrap; each sandbox starts a Python of its own (the sandbox could not be forked"),
        pytest.param(
            ["unshare", "clone namespaces", "clone3"],
            "landlock; each sandbox is forked from a zygote",
            marks=pytest.mark.full,
        ),
    ],
    ids=["no nested namespaces", "no namespaces"],
)
def test_where_namespaces_cannot_be_had_sandboxes_start_nonetheless(calls: list[str], found: str) -> None:
    program = """
        import asyncio, ctypes, platform, struct, sys
        # A filter of system calls, as a kernel or a container engine may have it: these are refused with EPERM, and
        # clone3 as if it were unknown, so that the C library takes clone.
        numbers = {"x86_64": (272, 56, 435), "aarch64": (97, 220, 435)}[platform.machine()]
        unshare, clone, clone3 = numbers
        def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
        load, equal, any_of, answer = 0x20, 0x15, 0x45, 0x06
        rules = {
            "unshare": [op(load, 0, 0, 0), op(equal, 0, 1, unshare), op(answer, 0, 0, 0x50001)],
            "clone3": [op(load, 0, 0, 0), op(equal, 0, 1, clone3), op(answer, 0, 0, 0x50026)],
            "clone namespaces": [
                op(load, 0, 0, 0), op(equal, 0, 3, clone), op(load, 0, 0, 16), op(any_of, 0, 1, 0x7E020000),
                op(answer, 0, 0, 0x50001),
            ],
        }
        program = b"".join(b"".join(rules[name]) for name in sys.argv[1:]) + op(answer, 0, 0, 0x7FFF0000)
        buffer = ctypes.create_string_buffer(program, len(program))
        libc = ctypes.CDLL(None, use_errno=True)
        fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.create_string_buffer(fprog, 16), 0, 0) == 0
        from rlm_batch import LocalInterpreter, LocalSandbox
        print(asyncio.run(LocalSandbox().check()))
        for _ in range(3):
            with LocalInterpreter() as interpreter:
                assert interpreter.execute("SUBMIT(1)").output == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(program), *calls], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    level, _, start = found.partition("; ")
    assert done.stdout.startswith(level)
    assert start in done.stdout


# --------------------------------------------------------------------------------------------------------- many of them


def list_mounts(pid: int | str) -> list[str]:
    """Where something is mounted that a process sees."""
    return [line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]


def count_own_mounts(pids: set[int]) -> Counter[str]:
    """What the zygotes have mounted, without what tests beside this one mount on this machine meanwhile."""
    others = {point for point in list_mounts("self") if "tests-of-rlm-batch" in point}
    points = (point for pid in pids for point in list_mounts(pid))
    return Counter(point for point in points if point not in others and not Path(point).is_relative_to(PODMAN_STORE))


@pytest.mark.strongest_first
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_many_sandboxes_opened_and_closed_leave_nothing(local: LocalSandbox, count: int, zygotes: Zygotes) -> None:
    def take_stock() -> Counter[str]:
        gc.collect()
        pids = find_zygotes(os.getpid())
        stock = Counter(zygotes=len(pids), sandboxes=len(list_marked(os.getpid())))
        stock["descriptors"] = len(os.listdir("/proc/self/fd"))
        links = set[str]()
        for pid in pids if os.geteuid() == 0 else ():  # to others of their own user the zygotes are closed
            with suppress(FileNotFoundError):  # it ended meanwhile
                stock["zygotes' descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
                links |= {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "net", "pid")}
        stock["namespaces"] = len(links)
        return stock

    def wait_for_rest() -> Counter[str]:
        """The stock once it stays the same, with a zygote, the one that it has forked ahead, and its bubblewrap."""
        least = 3 if local.isolation == "bubblewrap" else 2
        before, stock, until = Counter[str](), take_stock(), time.monotonic() + 30
        while stock != before or stock["zygotes"] < least:
            assert time.monotonic() < until, stock
            time.sleep(1)
            before, stock = stock, take_stock()
        return stock

    def list_zygotes_mounts() -> Counter[str]:
        return count_own_mounts(find_zygotes(os.getpid())) if os.geteuid() == 0 else Counter()

    def run_one() -> None:
        with LocalInterpreter(isolation=local.isolation) as interpreter:
            assert interpreter.execute("SUBMIT(1)").output == 1

    for _ in range(3):
        run_one()
    before, mounts = wait_for_rest(), list_zygotes_mounts()
    for _ in range(count):
        run_one()
    until = time.monotonic() + 10
    while (more := take_stock() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not more  # fewer descriptors are another's in this process, as of a client that is kept for a while
    assert not list_zygotes_mounts() - mounts  # a mount of another test's may be gone


@pytest.mark.full
async def test_zygotes_that_are_killed_at_random_moments_cost_no_more_than_a_retry(
    local: LocalSandbox, zygotes: Zygotes
) -> None:
    dice, kills, answers, of_others = random.Random(18), 0, list[int](), list_marked(os.getpid())

    async def ask(number: int) -> None:
        while True:
            try:
                async with local.interpreter(timeout=30) as interpreter:
                    answers.append(
                        (await interpreter.execute(f"import time; time.sleep(0.05); SUBMIT({number})")).output
                    )
                return
            except (SandboxStartError, SandboxLost, OutcomeUnknown):
                continue

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            if kills < 50:
                await ask(number)

    await ask(-1)
    lanes = asyncio.gather(*[work(iter(range(1000 * lane, 1000 * lane + 1000))) for lane in range(4)])
    while kills < 50:
        await asyncio.sleep(dice.uniform(0.02, 0.3))
        pids = sorted(find_zygotes(os.getpid()))
        if pids:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(pids), signal.SIGKILL)
            kills += 1
    async with asyncio.timeout(60):
        await lanes
    assert len(answers) == len(set(answers)) > 50
    assert await wait_until_gone([pid for pid in list_marked(os.getpid()) if pid not in of_others]) == []
