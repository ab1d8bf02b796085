"""Hosts of local sandboxes to attack, as root and as an ordinary user, with what they have to lose."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.sandbox.confinement import CALLS, MACHINES

from ...infra.isolation_levels import require_isolation

HOST = Path(__file__).with_name("local_host.py")
ATTACK = Path(__file__).with_name("attack.py").read_text()
ORDINARY = 54321  # a user whom no system hands out
ENVIRONMENT_SECRET = "of the environment"
FILE_SECRET = "of the file"

# Calls that the policy need not know by name.
MORE_CALLS = {
    "mq_open": (240, 180), "mq_unlink": (241, 181), "capget": (125, 90), "pidfd_open": (434, 434),
    "listmount": (458, 458), "setxattrat": (463, 463), "getxattrat": (464, 464), "removexattrat": (466, 466),
    "open_tree_attr": (467, 467), "file_setattr": (469, 469), "ioprio_set": (251, 30), "sched_setattr": (314, 274),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "process_mrelease": (448, 448),
}  # fmt: skip


def numbers() -> dict[str, int]:
    """This machine's numbers of the system calls that the attacks use."""
    column = MACHINES.get(platform.machine(), (0, 0))[0]
    found = {name: pair[column] for name, pair in (CALLS | MORE_CALLS).items()}
    return {name: number for name, number in found.items() if number is not None}


# ------------------------------------------------------------------------------------- a Python for an ordinary user


def start_as_ordinary(python: str) -> str | None:
    """The prefix of that Python if an ordinary user can start it and it reads our marshalled code; None if not."""
    program = "import _ctypes, sqlite3, sys, importlib.util as u; print(u.MAGIC_NUMBER.hex(), sys.base_prefix)"
    who: dict[str, Any] = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
    command = [python, "-I", "-S", "-c", program]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", env={}, **who)
    except OSError:
        return None
    magic, _, prefix = done.stdout.strip().partition(" ")
    return prefix if done.returncode == 0 and magic == MAGIC_NUMBER.hex() else None


def link(source: str, target: str) -> None:
    """A second name for a file, or a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_python(base: str, folder: Path) -> str:
    """The base Python's own files in another place."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "bin").mkdir()
    link(base, str(folder / "bin" / version))
    library = Path(sys.base_prefix) / "lib"
    leave = shutil.ignore_patterns("test", "site-packages", "idlelib", "tkinter", "ensurepip", "config-*")
    shutil.copytree(library / version, folder / "lib" / version, ignore=leave, copy_function=link)
    for shared in library.glob("libpython*.so*"):
        link(str(shared.resolve()), str(folder / "lib" / shared.name))
    return str(folder / "bin" / version)


@pytest.fixture(scope="session")
def ordinary(open_folder: Path) -> dict[str, Any]:
    """The settings of a host that is an ordinary user although the tests run as root.

    Its Python is the base one where others can reach that, or the system's, or a copy.
    """
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    for candidate in (base, "/usr/bin/python3", "/usr/local/bin/python3"):
        prefix = start_as_ordinary(candidate)
        if prefix is not None:
            return {"uid": ORDINARY, "python": os.path.realpath(candidate), "prefix": prefix}
    folder = open_folder / "python"
    folder.mkdir()
    candidate = copy_python(base, folder)
    prefix = start_as_ordinary(candidate)
    if prefix is None:
        pytest.skip(f"{base} lies where no other user can reach it, and a copy of it does not start")
    return {"uid": ORDINARY, "python": candidate, "prefix": prefix}


@pytest.fixture(scope="session")
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- hosts


class Host:
    """A host process, and what it is asked."""

    def __init__(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        self.uid: int = settings.get("uid", os.getuid())
        self.home = Path(environment["HOME"])
        self.folders = Path(environment["TMPDIR"])
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(HOST), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid: int = self.wait(0)["pid"]

    def ask(self, request: dict[str, Any]) -> int:
        """Sends a request and returns its number."""
        number = next(self._ids)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request | {"id": number}) + "\n")
        self.process.stdin.flush()
        return number

    def wait(self, number: int) -> dict[str, Any]:
        """The answer to a request."""
        assert self.process.stdout is not None
        while number not in self._answers:
            line = self.process.stdout.readline()
            assert line, "the host has ended"
            answer = json.loads(line)
            self._answers[answer["id"]] = answer
        return self._answers.pop(number)

    def list_sandboxes(self) -> dict[str, dict[str, str]]:
        """What its provider lists: labels by id."""
        return self.wait(self.ask({"op": "list"}))["found"]

    def delete_sandbox(self, sandbox: str) -> None:
        """Lets its provider remove one."""
        self.wait(self.ask({"op": "delete", "sandbox": sandbox}))

    def as_user(self) -> dict[str, Any]:
        """Options that start a process as the host's user."""
        return {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid != os.getuid() else {}

    def end(self) -> None:
        """Lets it remove its sandboxes and end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


Hosts = Callable[..., Host]


@pytest.fixture(scope="session")
def new_host(open_folder: Path, request: pytest.FixtureRequest) -> Hosts:
    """Starts a host by who it is: "root" or "user"."""

    def start(who: str) -> Host:
        if who == "root" and os.getuid() != 0:
            pytest.skip("these tests run as an ordinary user: what is different for root needs root")
        folders = open_folder / "tmp"  # not the tests' own: these sandboxes outlive the test that opened them
        folders.mkdir(exist_ok=True)
        folders.chmod(0o1777)
        home, settings = Path.home(), {}
        if who == "user" and os.getuid() == 0:
            home, settings = open_folder / "home", request.getfixturevalue("ordinary")
            if not home.exists():
                home.mkdir(mode=0o700)
                os.chown(home, ORDINARY, ORDINARY)
        secret = {"HOST_SECRET": ENVIRONMENT_SECRET}
        return Host(settings, os.environ | {"HOME": str(home), "TMPDIR": str(folders)} | secret)

    return start


@pytest.fixture(scope="session")
def hosts(new_host: Hosts) -> Iterator[Hosts]:
    """The two hosts that the tests share."""
    made: dict[str, Host] = {}

    def get(who: str) -> Host:
        if who in made and made[who].process.poll() is not None:
            made.pop(who).end()  # an attack has reached it, and its test has said so
        if who not in made:
            made[who] = new_host(who)
        return made[who]

    yield get
    for host in made.values():
        host.end()


# ------------------------------------------------------------------------------------------------------------- boxes


@dataclass(frozen=True)
class Tried:
    """What attempts came to: those that were done, with what they gave, and those that were refused, with the error."""

    done: dict[str, str]
    refused: dict[str, str]

    def __str__(self) -> str:
        return f"done: {self.done}; refused: {self.refused}"


@dataclass
class Box:
    """One sandbox of a host's. `abi` is the version of Landlock that it is made for, None for the kernel's own."""

    host: Host
    rung: str
    abi: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """What names it in a request."""
        fields = {"isolation": self.rung, **self.fields}
        return {"box": json.dumps([self.abi, fields]), "fields": fields, "abi": self.abi}

    def send(self, code: str, *, timeout: float = 30, context: str | None = None, **variables: Any) -> int:
        """Starts an execution, with the names of attack.py if it is more than a line, and returns its number."""
        code = f"{ATTACK}\n{code}" if "\n" in code or "(" in code else code
        execution = {"code": code, "timeout": timeout, "context": context}
        variables = {"numbers": numbers(), **variables}
        return self.host.ask({**self.request, "op": "execute", **execution, "variables": variables})

    def run(self, code: str, **more: Any) -> dict[str, Any]:
        """The whole answer to an execution."""
        answer = self.host.wait(self.send(code, **more))
        assert "broken" not in answer, answer["broken"]
        return answer

    def outputs(self, code: str, **more: Any) -> dict[str, Any]:
        """What the code submitted."""
        answer = self.run(code, **more)
        assert "outputs" in answer, answer
        return answer["outputs"]

    def tried(self, code: str, **more: Any) -> Tried:
        """What the attempts in the code came to; there must be some."""
        found = self.outputs(f"{code}\nSUBMIT(done=done, refused=refused)", **more)
        assert found["done"] or found["refused"]
        return Tried(found["done"], found["refused"])

    def close(self) -> None:
        """Removes the sandbox."""
        answer = self.host.wait(self.host.ask({**self.request, "op": "close"}))
        assert "broken" not in answer, answer["broken"]

    def needs(self) -> None:
        """Skips the test where this machine or this user cannot have the rung."""
        require_isolation(self.rung, self.host.uid)
        answer = self.run("pass")
        if "error" in answer and answer["error"]["error"] == "SandboxLost":
            self.close()  # broken by an attack, whose test has said so
            answer = self.run("pass")
        if "error" in answer:
            pytest.fail(f"the sandbox did not start: {answer}")


Boxes = Callable[..., Box]

KINDS: list[tuple[str, str, int | None]] = [
    ("bubblewrap", "root", None),
    ("landlock", "root", None),
    ("bubblewrap", "user", None),
    ("landlock", "user", None),
]
# What older kernels leave to the filter of system calls. As root too where that decides something else.
OLDER: list[tuple[str, str, int | None]] = [
    *(("landlock", "user", abi) for abi in range(1, 6)),
    ("landlock", "root", 1),
    ("bubblewrap", "user", 1),
]


def name_of(kind: tuple[str, str, int | None]) -> str:
    """A kind of sandbox as a test's name has it."""
    rung, who, abi = kind
    return f"{rung}-{who}" + ("" if abi is None else f"-abi{abi}")


def make_box(hosts: Hosts, kind: tuple[str, str, int | None], **fields: Any) -> Box:
    """A sandbox of that kind."""
    rung, who, abi = kind
    box = Box(hosts(who), rung, abi, fields)
    box.needs()
    return box


def pytest_configure(config: pytest.Config) -> None:
    older = "older_kernels(*abis): with sandboxes made for older kernels too, all or those of some Landlock versions"
    config.addinivalue_line("markers", older)
    config.addinivalue_line("markers", "each_once: each rung and each user once is enough, for neither decides much")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes a sandbox is run on each rung, as root and as an ordinary user."""
    for name in {"box", "own_box"} & set(metafunc.fixturenames):
        older, kinds = metafunc.definition.get_closest_marker("older_kernels"), KINDS
        if older is not None:
            kinds = kinds + [kind for kind in OLDER if not older.args or kind[2] in older.args]
        if metafunc.definition.get_closest_marker("each_once") is not None:
            kinds = KINDS[1:3] if os.getuid() == 0 else KINDS[2:]
        metafunc.parametrize(name, kinds, ids=name_of, indirect=True)


@pytest.fixture
def box(hosts: Hosts, request: pytest.FixtureRequest) -> Box:
    """A sandbox that is shared by the tests that use it."""
    return make_box(hosts, request.param)


@pytest.fixture(params=["bubblewrap", "landlock", "none"])
def rung(request: pytest.FixtureRequest) -> str:
    """Each level of isolation that the tests' own process can have."""
    name: Any = request.param
    require_isolation(name)
    asyncio.run(LocalSandbox(isolation=name).check())
    return name


@pytest.fixture
def box_type() -> type[Box]:
    """For tests that make sandboxes of hosts of their own."""
    return Box


@pytest.fixture
def own_box(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Boxes]:
    """Makes a sandbox of the test's own, with the block's fields that it needs, and removes it."""
    made: list[Box] = []

    def make(**fields: Any) -> Box:
        # No two tests ask for the same lifetime, and so none gets a sandbox that another one has broken.
        found = make_box(hosts, request.param, lifetime=80_000 + next(LIFETIMES), **fields)
        made.append(found)
        return found

    yield make
    for found in made:
        found.close()


LIFETIMES = itertools.count()


def unconfined(box: Box) -> Box:
    """The host's sandbox without isolation: there an attack must succeed, or it proves nothing."""
    return Box(box.host, "none")


# ------------------------------------------------------------------------------------------------------- what is left


class Marked:
    """Processes that carry a name of their own (PR_SET_NAME), which what they fork inherits."""

    def __init__(self) -> None:
        self.mark = "rlm-" + os.urandom(5).hex()  # at most 15 characters

    def pids(self) -> list[int]:
        """Those that there are, on this side of every namespace, without those that have ended."""
        found: list[int] = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if (
                        self.mark in (status := Path(f"/proc/{name}/status").read_text())
                        and "\nState:\tZ" not in status
                    ):
                        found.append(int(name))
                except OSError:
                    continue  # it ended meanwhile
        return found

    def there(self, seconds: float) -> bool:
        """Whether there are some within that time."""
        until = time.monotonic() + seconds
        while not self.pids() and time.monotonic() < until:
            time.sleep(0.02)
        return bool(self.pids())

    def left(self, seconds: float) -> list[int]:
        """Those that are still there after that time."""
        until = time.monotonic() + seconds
        while (found := self.pids() + self.pids()) and time.monotonic() < until:
            time.sleep(0.05)
        return found


@pytest.fixture
def marked() -> Iterator[Marked]:
    """A mark; whatever carries it is ended after the test."""
    found = Marked()
    yield found
    until = time.monotonic() + 10
    while (pids := found.pids()) and time.monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# ----------------------------------------------------------------------------------------------- what there is to lose


@dataclass(frozen=True)
class Files:
    """Files of the host's user. Anyone may read and write them, so that nothing but isolation keeps code out."""

    home: Path  # in the home directory
    tmp: Path  # below /tmp or what stands for it
    folder: Path  # where anyone may make files

    def paths(self) -> dict[str, str]:
        """The two files, for the variables of an execution."""
        return {"home": str(self.home), "tmp": str(self.tmp)}


@pytest.fixture
def files(box: Box, open_folder: Path) -> Iterator[Files]:
    """The files, there for the length of a test."""
    host = box.host
    folder = Path(tempfile.mkdtemp(dir=open_folder, prefix="files-"))
    home = Path(tempfile.mkdtemp(dir=host.home, prefix=".attacked-"))
    for path in (folder, home):
        path.chmod(0o777)
        (path / "secret").write_text(FILE_SECRET)
        (path / "secret").chmod(0o666)
        os.chown(path / "secret", host.uid, host.uid)
    yield Files(home=home / "secret", tmp=folder / "secret", folder=folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


class Victim:
    """A process of the host's user that does nothing."""

    def __init__(self, host: Host) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", "echo; while :; do sleep 600; done"],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"HOST_SECRET": ENVIRONMENT_SECRET},
            **host.as_user(),
        )
        assert self._process.stdout is not None
        self._process.stdout.read(1)
        self.pid = self._process.pid

    @property
    def state(self) -> str:
        """How the kernel calls what it does, a moment after the attack; empty if it has ended."""
        time.sleep(0.05)
        return "" if self._process.poll() is not None else Path(f"/proc/{self.pid}/stat").read_text().split()[2]

    def stop(self) -> None:
        """Stops it."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Ends it."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def victim(box: Box) -> Iterator[Victim]:
    found = Victim(box.host)
    yield found
    found.end()


class Servers:
    """Servers on the host: what reaches them is kept. All but TCP and UDP ones are Unix sockets."""

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, Any] = {}
        self._sockets: dict[str, socket.socket] = {}
        unique = os.urandom(6).hex()
        places = {"path": str(folder / "{}.socket"), "abstract": "\0" + unique + "{}"}
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            word = "stream" if kind == socket.SOCK_STREAM else "datagram"
            for place, address in places.items():
                self._listen(f"{place} {word}", socket.AF_UNIX, kind, address.format(word))
            self._listen("tcp" if word == "stream" else "udp", socket.AF_INET, kind, ("127.0.0.1", 0))

    def _listen(self, name: str, family: int, kind: int, address: Any) -> None:
        server = self._sockets[name] = socket.socket(family, kind)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen(8)
        server.setblocking(False)
        bound = server.getsockname()
        self.names[name] = bound.decode() if isinstance(bound, bytes) else bound
        if isinstance(address, str) and address.startswith("/"):
            os.chmod(address, 0o777)

    def reached(self) -> set[str]:
        """The servers that something has reached."""
        found: set[str] = set()
        for name, server in self._sockets.items():
            try:
                if server.type == socket.SOCK_STREAM:
                    server.accept()[0].close()
                else:
                    server.recv(100)
                found.add(name)
            except BlockingIOError:
                pass
        return found

    def close(self) -> None:
        """Stops serving."""
        for server in self._sockets.values():
            server.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    folder = Path(tempfile.mkdtemp(prefix="servers-"))  # a path of a Unix socket has 107 bytes at most
    folder.chmod(0o755)
    found = Servers(folder)
    yield found
    found.close()
    shutil.rmtree(folder, ignore_errors=True)
