"""Fixtures for all tests: a private temporary directory and Prefect home, and checks that nothing is left behind."""

import asyncio
import atexit
import ctypes
import fcntl
import gc
import logging
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest

from rlm_batch.cli.main import QUIET_PREFECT
from rlm_batch.flows.child_process import GARBAGE_THRESHOLD
from rlm_batch.sandbox.process_identity import read_own_identity

from .infra.consent import write_policy
from .infra.execution_counter import ExecutionCounter
from .infra.isolation_levels import find_strongest_level
from .infra.podman.store import PLACE, use_own_storage
from .infra.prefect_database import make_prefect_home
from .infra.requirements import leave_out_tests, mark_level, mark_programs
from .infra.waiting import wait_until_empty
from .standins.openai_chat import ChatServer
from .standins.process import DaytonaStandin, StandinProcess

if TYPE_CHECKING:
    from rlm_batch import LocalSandbox

RUNGS = ("none", "landlock", "bubblewrap")
PR_SET_CHILD_SUBREAPER = 36
STARTED = 19  # index of the start time in `read_status`

# These variables are set before anything imports Prefect, which reads them once. The directory is open to all, as /tmp
# is, because code that runs as another user has to pass through it.
HOME = tempfile.mkdtemp(prefix="tests-of-rlm-batch-")
os.chmod(HOME, 0o1777)
os.environ["TMPDIR"] = tempfile.tempdir = HOME
os.environ["PREFECT_HOME"] = f"{HOME}/prefect"
os.environ["XDG_DATA_HOME"] = f"{HOME}/data"
os.environ["RLM_BATCH_SERVER"] = "embedded"  # no test leaves a shared server running
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing LiteLLM waits for the network
os.environ["DSPY_CACHEDIR"] = f"{HOME}/dspy"  # otherwise DSPy repeats the answers that earlier tests got
# No test uses TLS. A client takes 25 ms of CPU time to read all authorities' certificates, so tests give it only the
# first one.
os.environ["SSL_CERT_FILE"] = f"{HOME}/certificate.pem"
os.environ.pop("SSL_CERT_DIR", None)
certificate, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
Path(os.environ["SSL_CERT_FILE"]).write_text(certificate + end, encoding="utf-8")
use_own_storage(Path(HOME))
# No test signs in to a provider with the credentials of this machine's user.
os.environ["MODAL_CONFIG_PATH"] = f"{HOME}/modal.toml"
for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_ENVIRONMENT", "MODAL_PROFILE"):
    os.environ.pop(name, None)
ZYGOTE = b"# rlm-batch: zygote of local sandboxes"  # this text marks the command line of a zygote and of its forks
STANDINS: set[int] = set()  # ids of the server processes that serve all tests
atexit.register(shutil.rmtree, HOME, ignore_errors=True)  # registered first, so it runs after Prefect's own handlers


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(GARBAGE_THRESHOLD)  # this runs before the tests import the package
    config.addinivalue_line("markers", "requires(*names): what the test needs, of tests/infra/requirements.py")
    strongest = "strongest_first: on the strongest level of isolation that is here, on the others at full size"
    config.addinivalue_line("markers", strongest)
    # A shell starts background processes with SIGINT ignored, and the processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.path.exists("/proc/self"):
        # A process that outlives its parent becomes a child of the tests, where `no_process_left` finds it.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_itemcollected(item: pytest.Item) -> None:
    level = getattr(item, "callspec", None) and item.callspec.params.get("local")  # type: ignore[attr-defined]
    if level and item.get_closest_marker("strongest_first") and level != find_strongest_level():
        item.add_marker(pytest.mark.full)
    mark_programs(item)


@pytest.hookimpl(trylast=True)  # last, so that only selected tests can lack a requirement
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_tests(config, items)
    # Workers take tests from the front of the list in blocks, and steal from the ends of other workers' blocks. Tests
    # that need the Prefect server come first, so that one worker runs most of them and starts most servers.
    items.sort(key=lambda item: "server" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Freeze the objects that collection has created, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Yield the address of a private Prefect server, which flows in this process and in its children use."""
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from rlm_batch.flows.server import process
    from rlm_batch.flows.server.process import ServerProcess

    home = make_prefect_home(Path(HOME) / "server")
    # Four workers may start their servers at the same time, on a busy machine.
    process.START_TIMEOUT_SECONDS = 500.0
    with ServerProcess.start(home) as running, temporary_settings({PREFECT_API_URL: running.url}):
        os.environ["PREFECT_API_URL"] = running.url
        yield running.url
        APILogWorker.drain_all()  # otherwise its thread sends to a server that has ended
        del os.environ["PREFECT_API_URL"]


@pytest.fixture(scope="session")
def modal_process() -> Iterator[Any]:
    """Yield a stand-in for Modal, which the clients of these tests connect to."""
    with StandinProcess("modal") as standin:
        os.environ["MODAL_SERVER_URL"] = standin.hello["url"]
        STANDINS.add(standin.pid)
        yield standin
        del os.environ["MODAL_SERVER_URL"]


@pytest.fixture
def modal_standin(modal_process: Any) -> Iterator[Any]:
    """Yield the Modal stand-in with its counts and faults reset; fail a test that leaves a sandbox there."""
    modal_process.ask("reset")
    before = set(modal_process.ask("state")["sandboxes"])
    yield modal_process
    modal_process.ask("faults", rules=[])
    left = wait_until_empty(lambda: set(modal_process.ask("state")["sandboxes"]) - before)
    for sandbox in left:
        modal_process.ask("end", sandbox=sandbox)
    assert not left, f"left at the stand-in: {left}"


@pytest.fixture(scope="session")
def s3_process() -> Iterator[Any]:
    """Yield a private S3 server."""
    with StandinProcess("s3") as standin:
        STANDINS.add(standin.pid)
        yield standin


@pytest.fixture
def s3(s3_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the S3 server with one empty bucket, `results`; the environment directs clients to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_process.hello["url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-environment")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3_process.ask("reset")
    return s3_process


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    """Yield a server that answers like a language model and counts requests."""
    with ChatServer() as server:
        yield server


@pytest.fixture
def openai(chat: ChatServer, monkeypatch: pytest.MonkeyPatch) -> ChatServer:
    """Return the chat server as the OpenAI endpoint of the environment."""
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    return chat


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that directs clients of the named providers to local stand-ins.

    Providers that need no account are ignored.
    """

    def sign_in(*providers: str) -> None:
        if "daytona" in providers:
            request.getfixturevalue("daytona")
        if "modal" in providers:
            hello = request.getfixturevalue("modal_standin").hello
            monkeypatch.setenv("MODAL_TOKEN_ID", hello["token_id"])
            monkeypatch.setenv("MODAL_TOKEN_SECRET", hello["token_secret"])

    return sign_in


@pytest.fixture
def volumes(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty root for volumes, which is deleted after the tests."""
    root = Path(tempfile.mkdtemp(prefix="volumes-"))
    root.chmod(0o755)  # code that runs as another user passes through it
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(root))
    return root


@pytest.fixture
def counter() -> Iterator[ExecutionCounter]:
    """Yield a server that counts the executions by name; the executed code calls it."""
    with ExecutionCounter() as counter:
        yield counter


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop that asynchronous tests run on."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_setting_left() -> Iterator[None]:
    """Restore the environment variables and settings that the command line sets for the whole process."""
    before = {name: os.environ.get(name) for name in QUIET_PREFECT}, logging.raiseExceptions
    yield
    settings, logging.raiseExceptions = before
    for name, value in settings.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def no_folder_left() -> Iterator[None]:
    """Fail a test that leaves the folder of a local sandbox."""

    def folders() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("rlm-batch[-.]*"))

    before = folders()
    yield
    if folders() - before:
        gc.collect()  # copies of files are deleted with the objects that own them
    left = folders() - before
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    assert not left, f"left behind: {sorted(path.name for path in left)}"


@pytest.fixture
def allow(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes the worker's file of this process."""
    from rlm_batch.blocks import worker_policy

    file = tmp_path_factory.mktemp("policy") / "worker.toml"
    monkeypatch.setattr(worker_policy, "MACHINE_FILE", file)
    return partial(write_policy, file)


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment in which a worker starts a flow run; it allows nothing."""
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))


@pytest.fixture
def no_container_left() -> Iterator[None]:
    """Fail a test whose process leaves a container."""
    yield
    from rlm_batch.blocks.container.provider import ContainerProvider

    sandboxes = asyncio.run(ContainerProvider(engine="podman").list_sandboxes())
    left = [info.id for info in sandboxes if info.process == read_own_identity()]
    for name in left:
        asyncio.run(ContainerProvider(engine="podman").delete_sandbox(name))
    assert not left, f"left behind: {left}"


@pytest.fixture
def one_keeps_containers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run one such test at a time: all tests share Podman's store, and `reap --kept` removes every kept container."""
    if "container" not in request.node.name:
        yield
        return
    with (PLACE / "kept.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves a process; killed processes get time to end."""
    begun = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    yield
    left = wait_until_empty(lambda: {pid: name for pid, name in descendants(begun).items() if pid not in STANDINS})
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    assert not left, f"left behind: {left}"


@pytest.fixture(params=[pytest.param(level, marks=mark_level(level)) for level in RUNGS])
def local(request: pytest.FixtureRequest) -> "LocalSandbox":
    """Return the local provider, once for each isolation level that this machine supports."""
    from rlm_batch import LocalSandbox

    provider = LocalSandbox(isolation=request.param)
    asyncio.run(provider.check())
    return provider


@pytest.fixture(scope="session")
def running_daytona() -> Iterator[StandinProcess]:
    """Yield a Daytona stand-in for the whole run.

    It starts before any test that checks for processes left behind.
    """
    with DaytonaStandin(boot_s=0.0) as running:
        STANDINS.add(running.pid)
        yield running


@pytest.fixture
def daytona(running_daytona: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the empty Daytona stand-in with its usual settings; the environment directs the SDK to it.

    A test that leaves a sandbox fails.
    """
    for name, value in running_daytona.environment.items():
        monkeypatch.setenv(name, value)
    running_daytona.reset()
    yield running_daytona
    left = wait_until_empty(lambda: running_daytona.state()["sandboxes"])
    running_daytona.reset()
    assert not left, f"left at the provider: {[box['name'] for box in left]}"


@pytest.fixture
def processes() -> Callable[[], dict[int, str]]:
    """Return a function that maps the ids of this process's descendants to their command lines."""
    return descendants


def list_children() -> dict[int, list[int]]:
    """Map the id of each process to the ids of its children."""
    # This reads every process's parent, because the kernel's lists of children omit some while one of them ends.
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process ended meanwhile
            children.setdefault(int(read_status(name)[1]), []).append(int(name))
    return children


def read_status(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat that follow the name: state, parent, and so on (see proc(5))."""
    # `Path` would take four times as long, and most tests read this for every process.
    stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(stat, 1024).rpartition(b")")[2].split()
    finally:
        os.close(stat)


def find_zygotes(host: int, children: dict[int, list[int]] | None = None) -> set[int]:
    """Return the ids of a host's zygotes, which live as long as the host, without the forks that became sandboxes."""
    children = list_children() if children is None else children
    descendants, below = set[int](), list(children.get(host, ()))
    while below:
        pid = below.pop()
        with suppress(OSError):
            is_zygote = ZYGOTE in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_zygote and "Max resident set          unlimited" in Path(f"/proc/{pid}/limits").read_text():
                descendants.add(pid)
                below += children.get(pid, ())
    return descendants


def descendants(since: int = 0) -> dict[int, str]:
    """Map the ids of this process's descendants to their command lines.

    Processes that have ended, our own zygotes, and processes older than `since` (kernel ticks since boot) are left out.
    """
    children = list_children()
    processes: dict[int, str] = {}
    parents = [os.getpid()]
    while parents:
        for pid in children.get(parents.pop(), ()):
            parents.append(pid)
            with suppress(OSError):
                if int(read_status(pid)[STARTED]) < since:
                    continue
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if command:  # empty for a zombie
                    processes[pid] = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    for pid in find_zygotes(os.getpid(), children) if processes else ():
        processes.pop(pid, None)
    return processes


@pytest.fixture
def own_temporary_folder() -> Iterator[dict[str, str]]:
    """Yield the environment of a process that is killed, and so leaves the folders of its sandboxes."""
    folder = tempfile.mkdtemp(prefix="killed-")
    os.chmod(folder, 0o755)  # Code that runs as another user passes through it.
    yield {**os.environ, "TMPDIR": folder}
    shutil.rmtree(folder, ignore_errors=True)
