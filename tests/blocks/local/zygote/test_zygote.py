"""Sandboxes forked from a zygote. They cannot reach each other, and a dead process ends only its own children."""

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
from collections import Counter
from contextlib import suppress
from pathlib import Path
from textwrap import dedent, indent
from typing import TYPE_CHECKING

import pytest

from rlm_batch import LocalInterpreter, LocalSandbox, OutcomeUnknown, SandboxLost, SandboxStartError
from rlm_batch.blocks.local.inventory import MARK_BASE
from rlm_batch.blocks.local.launch.launcher import MAX_IDLE_ZYGOTES, Zygotes
from rlm_batch.blocks.local.launch.zygote import Zygote

from ....conftest import find_zygotes, list_children
from ....infra.waiting import HANG_SECONDS, wait_until, wait_until_async
from ..boxes import ATTACK
from ..test_siblings import COMETS, DAEMONS, LIMITS, MEMORY, NAMED, SIGNALS
from .conftest import find_ahead, wait_until_gone

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..targets import Marked

pytestmark = pytest.mark.anyio

REACH_ONE = indent(SIGNALS + LIMITS + MEMORY, "    ")
REACH = """
for pid in {*pids} - {os.getpid()}:  # one of them may have become the attacker
    reach(pid)
    for number in range(20):
        attempt(f"fd {number} of {pid}", lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
        attempt(f"copy of fd {number} of {pid}", lambda: call("pidfd_getfd", os.pidfd_open(pid), number, 0))
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
attempt("terminal", lambda: os.open("/dev/pts/0", os.O_RDWR | os.O_NOCTTY))
attempt("folders", lambda: os.listdir("/.sandboxes")[0])
SUBMIT(done=done)
"""


FOLDERS = """
import re, sys
folders, frame = set(), sys._getframe()
while frame is not None:
    folders.update(re.findall("rlm-batch-[0-9a-f]{12}", repr(list(frame.f_locals.items()))))
    frame = frame.f_back
SUBMIT(folders=sorted(folders))
"""


def list_marked(pid: int) -> list[int]:
    """Return the descendants of a process that carry a sandbox's mark."""
    children, descendants, below = list_children(), list[int](), [pid]
    for above in below:
        below += children.get(above, ())
        try:
            limit = Path(f"/proc/{above}/limits").read_text().partition("resident set")[2].split()[0]
        except OSError:
            continue
        if limit != "unlimited" and int(limit) >= MARK_BASE:
            descendants.append(above)
    return descendants


def set_file_limit(pids: set[int], limit: tuple[int, int]) -> None:
    """Limit how many files the processes may open; ignore processes that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


# ------------------------------------------------------------------------------------------------------------ siblings


@pytest.mark.older_kernels(1)
def test_a_sandbox_cannot_reach_its_siblings_or_their_zygote(own_box: Boxes) -> None:
    box, sibling = own_box(), own_box()

    def find() -> list[int]:
        """Return the zygotes, their processes forked ahead, and the supervisors of both sandboxes."""
        ahead, supervisors = find_zygotes(box.host.pid), list_marked(box.host.pid)
        return [*ahead, *supervisors] if len(ahead) > 2 and len(supervisors) >= 2 else []

    pids = wait_until(find, "a process ahead, and two sandboxes")
    attempts = box.run_attempts(f"def reach(pid, address=0):\n{REACH_ONE}\n{REACH}", pids=pids)
    assert attempts.done == {}
    assert sibling.outputs("SUBMIT(works=True)") == {"works": True}
    assert own_box().outputs("SUBMIT(works=True)") == {"works": True}


def test_siblings_share_nothing_with_a_sandbox(own_box: Boxes) -> None:
    box, sibling = own_box(), own_box()
    left = box.outputs(LEAVE, context="stays")["done"]
    assert {"left", *(("/dev/shm/left", "socket", "port") if box.level == "bubblewrap" else ())} <= left.keys()
    assert sibling.outputs(LOOK)["done"] == {}
    box.close()
    assert own_box().outputs(LOOK)["done"] == {}


def test_a_sandbox_inherits_no_frame_with_the_folder_of_another(own_box: Boxes) -> None:
    folders = [set(own_box().outputs(FOLDERS)["folders"]) for _ in range(3)]
    assert not folders[0] & folders[1]
    assert not (folders[0] | folders[1]) & folders[2]


# --------------------------------------------------------------------------------------------------------------- deaths


async def test_killing_a_zygote_ends_its_sandboxes_and_a_new_zygote_starts(
    local: LocalSandbox, zygotes: Zygotes
) -> None:
    of_others = list_marked(os.getpid())
    async with local.interpreter() as interpreter:
        heard = asyncio.Event()
        code = "print('on', flush=True); import time; time.sleep(1000)"
        running = asyncio.create_task(interpreter.execute(code, on_output=lambda *_: heard.set()))
        await heard.wait()
        marked = [pid for pid in list_marked(os.getpid()) if pid not in of_others]
        assert len(marked) >= 2
        killed = find_zygotes(os.getpid())
        for pid in killed:
            with suppress(ProcessLookupError):  # killing one process can end another
                os.kill(pid, signal.SIGKILL)
        with pytest.raises((OutcomeUnknown, SandboxLost)):
            await running
    await wait_until_gone(list(killed))  # a zygote that is still ending could take a request and lose it
    async with local.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
    await wait_until_gone(marked)


async def test_processes_of_a_killed_supervisor_end_and_other_sandboxes_continue(
    local: LocalSandbox, zygotes: Zygotes, marked: Marked
) -> None:
    is_ready = asyncio.Event()

    async def ready() -> None:
        is_ready.set()

    async with local.interpreter(tools={"ready": ready}) as interpreter:
        await interpreter.execute("pass")
        children, zygote_pids = list_children(), find_zygotes(os.getpid())
        [(zygote, supervisor)] = [
            (one, pid) for one in zygote_pids for pid in children.get(one, ()) if pid not in zygote_pids
        ]
        async with local.interpreter() as other:
            variables = {"mark": marked.mark, "numbers": {}}
            running = asyncio.create_task(
                interpreter.execute(f"{ATTACK}\n{NAMED}{DAEMONS}{COMETS}\nready()\ntime.sleep(1000)", variables)
            )
            await asyncio.wait_for(is_ready.wait(), HANG_SECONDS)
            os.kill(supervisor, signal.SIGKILL)
            with pytest.raises((OutcomeUnknown, SandboxLost)):
                await running
            assert (await other.execute("SUBMIT(1)")).output == 1
            async with local.interpreter() as new:
                assert (await new.execute("SUBMIT(2)")).output == 2
            await asyncio.to_thread(marked.wait_until_gone)
            assert zygote in find_zygotes(os.getpid())


@pytest.mark.requires("bubblewrap")
async def test_killing_bubblewrap_ends_no_running_sandbox(zygotes: Zygotes) -> None:
    provider = LocalSandbox(isolation="bubblewrap")
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
        (bubblewrap,) = [pid for pid in find_zygotes(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"]
        os.kill(bubblewrap, signal.SIGKILL)
        async with provider.interpreter() as other:
            assert (await other.execute("SUBMIT(2)")).output == 2
        assert (await interpreter.execute("SUBMIT(3)")).output == 3


async def test_a_zygote_without_free_descriptors_refuses_only_the_new_sandbox(
    local: LocalSandbox, zygotes: Zygotes
) -> None:
    async with local.interpreter() as interpreter:
        assert (await interpreter.execute("x = 1; SUBMIT(x)", context="c")).output == 1
        pids = find_zygotes(os.getpid())
        limit = max(resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids)
        set_file_limit(pids, (3, limit[1]))
        with pytest.raises(SandboxStartError, match=r"did not start|could not be started"):
            await local.interpreter().execute("SUBMIT(2)")
        for _ in range(2):  # a process forked meanwhile has the low limit too
            set_file_limit(pids | find_zygotes(os.getpid()), limit)
        async with local.interpreter() as other:
            assert (await other.execute("SUBMIT(2)")).output == 2
        assert find_zygotes(os.getpid()) & pids
        assert (await interpreter.execute("SUBMIT(x + 2)", context="c")).output == 3


@pytest.mark.requires("bubblewrap")
async def test_a_shortage_of_descriptors_does_not_outlast_itself(zygotes: Zygotes) -> None:
    provider = LocalSandbox(isolation="bubblewrap", disk_mib=10)
    await provider.check()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, hard))
    try:
        with pytest.raises(SandboxStartError, match="Too many open files"):
            await provider.interpreter().start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
    assert find_zygotes(os.getpid())


@pytest.mark.requires("landlock")
async def test_a_zygote_that_was_killed_at_its_start_is_started_again(
    zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = LocalSandbox(isolation="landlock")
    await provider.check()
    zygotes.end()
    boot = Zygote._boot
    killed: list[int] = []

    def kill_first(zygote: Zygote, code: bytes) -> None:
        if not killed:
            killed.append(zygote._process.pid)
            os.kill(zygote._process.pid, signal.SIGKILL)
        boot(zygote, code)

    monkeypatch.setattr(Zygote, "_boot", kill_first)
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(1)")).output == 1
        assert find_zygotes(os.getpid())
    assert killed


# -------------------------------------------------------------------------------------------------- walls that change


def test_a_recreated_volume_is_mounted_anew(local: LocalSandbox, volumes: Path) -> None:
    for text in ("old", "new"):
        with LocalInterpreter(isolation=local.isolation, volume_name="data") as interpreter:
            code = "SUBMIT(found=list_volume()); "
            assert interpreter.execute(code).found == []
            interpreter.execute(f"save_to_volume('file', {text!r})")
        assert (volumes / "data" / "file").read_text() == text
        shutil.rmtree(volumes / "data")


@pytest.mark.full
@pytest.mark.requires("bubblewrap")
def test_few_idle_zygotes_with_other_settings_are_kept(volumes: Path, zygotes: Zygotes) -> None:
    for number in range(MAX_IDLE_ZYGOTES + 4):
        with LocalInterpreter(isolation="bubblewrap", volume_name=f"data-{number}") as interpreter:
            interpreter.execute("pass")
    # Each zygote has four processes: bubblewrap, the zygote itself, and the two processes forked ahead.
    wait_until(lambda: len(find_zygotes(os.getpid())) <= 4 * (MAX_IDLE_ZYGOTES + 1), "few zygotes")


@pytest.mark.requires("bubblewrap", "root")
@pytest.mark.parametrize(
    ("calls", "found"),
    [
        (["unshare"], "bubblewrap; each sandbox starts a Python of its own (the sandbox could not be started"),
        pytest.param(
            ["unshare", "clone namespaces", "clone3"],
            "landlock; each sandbox is forked from a zygote",
            marks=pytest.mark.full,
        ),
    ],
    ids=["no nested namespaces", "no namespaces"],
)
def test_sandboxes_start_without_namespaces(calls: list[str], found: str) -> None:
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
        [sys.executable, "-c", dedent(program), *calls], check=False, timeout=500, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    level, _, start = found.partition("; ")
    assert done.stdout.startswith(level)
    assert start in done.stdout


# --------------------------------------------------------------------------------------------------------- many of them


@pytest.mark.strongest_first
async def test_opening_and_closing_many_sandboxes_leaves_nothing(local: LocalSandbox, zygotes: Zygotes) -> None:
    def take_stock() -> Counter[str]:
        gc.collect()
        pids = find_zygotes(os.getpid())
        stock = Counter(zygotes=len(pids), sandboxes=len(list_marked(os.getpid())))
        stock["descriptors"] = len(os.listdir("/proc/self/fd"))
        links = set[str]()
        for pid in pids if os.geteuid() == 0 else ():  # an ordinary user cannot read the zygotes' /proc entries
            with suppress(FileNotFoundError):  # the process ended meanwhile
                stock["zygotes' descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
                links |= {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "net", "pid")}
                # Sandboxes of other levels use the machine's mounts, which other tests change.
                if local.isolation == "bubblewrap":
                    stock["mounts"] += len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
        stock["namespaces"] = len(links)
        return stock

    async def run_sandboxes(count: int) -> Counter[str]:
        """Run this many sandboxes and return the stock once the zygote is idle."""
        for _ in range(count):
            async with local.interpreter() as interpreter:
                assert (await interpreter.execute("SUBMIT(1)")).output == 1
        await find_ahead(local)
        return take_stock()

    before = await run_sandboxes(3)
    more = await run_sandboxes(20) - before
    if more:  # a process that has just been killed may still exist
        await wait_until_async(lambda: not take_stock() - before, f"no more than before, and not {more}")


@pytest.mark.full
async def test_zygotes_killed_at_random_moments_cost_at_most_a_retry(local: LocalSandbox, zygotes: Zygotes) -> None:
    dice, answers, of_others = random.Random(18), list[int](), list_marked(os.getpid())
    is_over = False

    async def ask(number: int) -> None:
        while True:
            try:
                async with local.interpreter() as interpreter:
                    answers.append((await interpreter.execute(f"SUBMIT({number})")).output)
                return
            except (SandboxStartError, SandboxLost, OutcomeUnknown):
                continue

    async def work(lane: int) -> None:
        number = 1000 * lane
        while not is_over:
            await ask(number := number + 1)

    lanes = asyncio.gather(*[work(lane) for lane in range(4)])
    target = 4
    for _ in range(30):
        await wait_until_async(lambda target=target: len(answers) >= target, "answers between two kills")
        if pids := sorted(find_zygotes(os.getpid())):
            with suppress(ProcessLookupError):
                os.kill(dice.choice(pids), signal.SIGKILL)
        target = len(answers) + dice.randint(1, 4)
    is_over = True
    await lanes
    assert len(answers) == len(set(answers))
    await wait_until_gone([pid for pid in list_marked(os.getpid()) if pid not in of_others])
