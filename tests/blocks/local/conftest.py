"""Fixtures for attacks on local sandboxes: hosts that run as root and as an ordinary user, and their data."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import LocalSandbox

from ...infra.isolation_levels import find_strongest_level
from ...infra.requirements import ORDINARY_UID, mark_level
from ...infra.waiting import wait_until
from .boxes import KINDS, LIFETIMES, OLDER, Box, Boxes, make_box, mark_kind, name_of
from .hosts import ENVIRONMENT_SECRET, Host, Hosts, copy_python, start_as_ordinary
from .targets import FILE_SECRET, Files, Marked, Servers, Victim


@pytest.fixture(scope="session")
def ordinary() -> Iterator[dict[str, Any]]:
    """Return the settings of a host that runs as an ordinary user although the tests run as root.

    The host uses this process's base Python if other users can read it, else the system's Python, else a copy.
    """
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    for candidate in (base, "/usr/bin/python3", "/usr/local/bin/python3"):
        prefix = start_as_ordinary(candidate)
        if prefix is not None:
            yield {"uid": ORDINARY_UID, "python": os.path.realpath(candidate), "prefix": prefix}
            return
    folder = Path(tempfile.mkdtemp(prefix="python-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        candidate = copy_python(base, folder)
        prefix = start_as_ordinary(candidate)
        if prefix is None:
            pytest.skip(f"{base} lies where no other user can reach it, and a copy of it does not start")
        yield {"uid": ORDINARY_UID, "python": candidate, "prefix": prefix}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def open_folder() -> Iterator[Path]:
    """Create a folder that every user can reach, unlike pytest's folders."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def new_host(open_folder: Path, request: pytest.FixtureRequest) -> Hosts:
    """Return a function that starts a host as "root" or "user"."""

    def start(who: str) -> Host:
        folders = open_folder / "tmp"  # shared, because a host's sandboxes outlive the test that opened them
        folders.mkdir(exist_ok=True)
        folders.chmod(0o1777)
        home, settings = Path.home(), {}
        if who == "user" and os.getuid() == 0:
            home, settings = open_folder / "home", request.getfixturevalue("ordinary")
            if not home.exists():
                home.mkdir(mode=0o700)
                os.chown(home, ORDINARY_UID, ORDINARY_UID)
        secret = {"HOST_SECRET": ENVIRONMENT_SECRET}
        return Host(settings, os.environ | {"HOME": str(home), "TMPDIR": str(folders)} | secret)

    return start


@pytest.fixture(scope="session")
def hosts(new_host: Hosts) -> Iterator[Hosts]:
    """Return a function that returns the shared host of "root" or "user"."""
    made: dict[str, Host] = {}

    def get(who: str) -> Host:
        if who in made and made[who].process.poll() is not None:
            made.pop(who).end()  # an attack has ended the host, and its test has failed
        if who not in made:
            made[who] = new_host(who)
        return made[who]

    yield get
    for host in made.values():
        host.end()


def pytest_configure(config: pytest.Config) -> None:
    older = "older_kernels(*abis): with sandboxes made for older kernels too, those of these Landlock versions"
    config.addinivalue_line("markers", older)
    config.addinivalue_line("markers", "each_once: each level and each user once is enough, for neither decides much")
    own_count = "own_count: where the kernel counts the sandbox's processes apart from those of the tests beside"
    config.addinivalue_line("markers", own_count)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a sandbox once for each level and each user. Full runs cover all pairs."""
    first = KINDS[2:] if os.getuid() != 0 else KINDS[1:3]
    if find_strongest_level() == "landlock":
        first = [kind for kind in KINDS if kind[0] == "landlock"]
    for name in {"box", "own_box"} & set(metafunc.fixturenames):
        older, kinds = metafunc.definition.get_closest_marker("older_kernels"), KINDS
        if older is not None:
            kinds = kinds + [kind for kind in OLDER if kind[2] in older.args]
        if metafunc.definition.get_closest_marker("each_once") is not None:
            kinds = KINDS[1:3] if os.getuid() == 0 else KINDS[2:]
        if metafunc.definition.get_closest_marker("own_count") is not None and os.getuid() != 0:
            kinds = [kind for kind in kinds if kind[0] != "landlock"]  # landlock counts all of the user's processes
        full = [pytest.mark.full]
        marked = [pytest.param(kind, marks=[*mark_kind(kind), *([] if kind in first else full)]) for kind in kinds]
        metafunc.parametrize(name, marked, ids=name_of, indirect=True)


@pytest.fixture
def box(hosts: Hosts, request: pytest.FixtureRequest) -> Box:
    """Return a sandbox that the tests share."""
    return make_box(hosts, request.param)


@pytest.fixture(params=[pytest.param(level, marks=mark_level(level)) for level in ("bubblewrap", "landlock", "none")])
def level(request: pytest.FixtureRequest) -> str:
    """Return each isolation level that the tests' process supports."""
    name: Any = request.param
    asyncio.run(LocalSandbox(isolation=name).check())
    return name


@pytest.fixture
def own_box(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Boxes]:
    """Return a function that opens sandboxes for one test with the given block fields; remove them after the test."""
    made: list[Box] = []

    def make(**fields: Any) -> Box:
        # A unique lifetime keeps tests from sharing a sandbox that an attack has broken.
        new_box = make_box(hosts, request.param, lifetime=80_000 + next(LIFETIMES), **fields)
        made.append(new_box)
        return new_box

    yield make
    for made_box in made:
        made_box.close()


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Return a mark. After the test, kill every process that carries the mark."""
    processes = Marked()
    yield processes

    def kill() -> bool:
        pids = processes.pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(kill, "no process with the mark")


@pytest.fixture
def files(box: Box, open_folder: Path) -> Iterator[Files]:
    """Create files for attacks, and delete them after the test."""
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


@pytest.fixture
def victim(box: Box) -> Iterator[Victim]:
    victim_process = Victim(box.host)
    yield victim_process
    victim_process.end()


@pytest.fixture
def servers() -> Iterator[Servers]:
    folder = Path(tempfile.mkdtemp(prefix="servers-"))  # a Unix socket's path has at most 107 bytes
    folder.chmod(0o755)
    running_servers = Servers(folder)
    yield running_servers
    running_servers.close()
    shutil.rmtree(folder, ignore_errors=True)
