"""The embedded server, which a program's flow run starts if none is configured, and its failures."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from ..infra.machine import list_descendants
from ..infra.prefect_database import make_prefect_home, migrate_to_the_future
from ..infra.programs import COMMAND, PATIENCE
from ..infra.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
CODE = """
import pathlib, time
while x > 1 and not pathlib.Path(folder, "go").exists():
    time.sleep(0.05)
SUBMIT(x=x)
"""
Start = Callable[..., subprocess.Popen[str]]
BATCH = (COMMAND, "batch", "code.py", "--inputs", "in.csv", "--provider", "local:none", "--results-path", "results")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a PREFECT_HOME with a ready database."""
    return make_prefect_home(tmp_path / "home")


@pytest.fixture
def start(tmp_path: Path, no_process_left: None) -> Iterator[Start]:
    """Return a function that starts a program without a server. Two executions of the batch wait for the file `go`."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "in.csv").write_text("x,folder\n" + "".join(f"{x},{tmp_path}\n" for x in range(4)))
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    # If the command is killed, its sandboxes' folders stay in TMPDIR.
    environment |= {"TMPDIR": str(tmp_path), "RLM_BATCH_RESULTS": str(tmp_path / "results")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # A limit of the size of files would cut compiled modules.

    def call(home: Path, *command: str) -> subprocess.Popen[str]:
        settings = environment | {"PREFECT_HOME": str(home)}
        words = command or BATCH
        started.append(subprocess.Popen(words, cwd=tmp_path, env=settings, stdout=-1, stderr=-1, text=True))
        return started[-1]

    yield call
    for program in started:
        program.kill()
        program.communicate()


def read_results(tmp_path: Path) -> int:
    return sum(part.read_bytes().count(b"\n") for part in (tmp_path / "results").glob("part-*"))


def wait_for_server(tmp_path: Path, program: subprocess.Popen[str], processes: Callable[[], dict[int, str]]) -> int:
    """Wait until two executions are done and two are running; return the process id of the program's server."""
    wait_until(lambda: program.poll() is not None or read_results(tmp_path) >= 2, "two results", timeout=PATIENCE)
    assert program.poll() is None

    # The search is retried, because the kernel's list of children can be incomplete while one of them ends.
    def find_servers() -> list[int]:
        below = list_descendants(program.pid)
        return [pid for pid, command in processes().items() if pid in below and "rlm_batch.flows.server.app" in command]

    (server,) = wait_until(find_servers, "the embedded server")
    return server


def read_sentence(program: subprocess.Popen[str]) -> str:
    """Wait for the program's end and return the sentence of its error."""
    _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 2, errors
    sentences = [line for line in errors.splitlines() if line.startswith("rlm-batch: ")]
    assert len(sentences) == 1, errors
    assert "Traceback" not in errors, errors
    return sentences[0]


def test_killing_the_server_ends_the_flow_with_a_sentence_and_keeps_results(
    home: Path, tmp_path: Path, start: Start, processes: Callable[[], dict[int, str]]
) -> None:
    program = start(home)
    os.kill(wait_for_server(tmp_path, program, processes), signal.SIGKILL)
    sentence = read_sentence(program)
    assert "Prefect's embedded server has ended by itself, with signal SIGKILL, while the flow ran" in sentence
    assert f"its log is {home}/embedded-server.log" in sentence
    assert f"the results so far are in {tmp_path}/results: run again with this --results-path" in sentence
    assert read_results(tmp_path) == 2
    (tmp_path / "go").touch()
    again = start(home)
    assert "4 of 4 executions succeeded" in again.communicate(timeout=PATIENCE)[1]
    assert (again.returncode, read_results(tmp_path)) == (0, 4)


def test_a_database_that_becomes_unwritable_is_reported_after_the_executions(
    home: Path, tmp_path: Path, start: Start, processes: Callable[[], dict[int, str]]
) -> None:
    program = start(home)
    server = wait_for_server(tmp_path, program, processes)
    resource.prlimit(server, resource.RLIMIT_FSIZE, (4096, 4096))  # SQLite fails as on a full disk
    (tmp_path / "go").touch()
    sentence = read_sentence(program)
    assert (
        "Prefect's embedded server has failed while the flow ran (sqlite3.OperationalError: disk I/O error)" in sentence
    )
    assert read_results(tmp_path) == 4


def test_a_database_of_a_newer_prefect_is_reported_at_the_start(home: Path, start: Start) -> None:
    migrate_to_the_future(home)
    sentence = read_sentence(start(home))
    assert f"did not start: a Prefect newer than {version('prefect')} has migrated its database: install" in sentence
    assert f"its log is {home}/embedded-server.log). Nothing ran: check PREFECT_HOME" in sentence


def test_an_invalid_database_is_reported_at_the_start(home: Path, start: Start) -> None:
    (home / "prefect.db").write_bytes(b"no database at all" * 1000)
    sentence = read_sentence(start(home))
    assert "the Prefect server did not start: sqlalchemy.exc.DatabaseError" in sentence
    assert "file is not a database" in sentence
    assert f"its log is {home}/embedded-server.log). Nothing ran: check PREFECT_HOME" in sentence


def test_a_killed_program_leaves_no_server(
    home: Path, tmp_path: Path, start: Start, processes: Callable[[], dict[int, str]]
) -> None:
    program = start(home)
    server = wait_for_server(tmp_path, program, processes)
    program.kill()
    program.wait()
    wait_until(lambda: server not in processes(), "the end of the server")


def test_simultaneous_first_runs_survive_a_killed_database_creation(tmp_path: Path, start: Start) -> None:
    home = tmp_path / "new-home"
    program = (sys.executable, "-c", "from rlm_batch import batch; print(batch.sync(['SUBMIT(x=1)'])[0].x)")

    def is_being_created() -> bool:
        return (home / "prefect.db").exists() and (home / "prefect.db").stat().st_size > 0

    first = start(home, *program)
    wait_until(is_being_created)
    others = [start(home, *program) for _ in range(3)]
    first.kill()
    for other in others:
        output, errors = other.communicate(timeout=600)
        assert output.strip() == "1", errors


# A program that prints the server's address during an execution, and the result after it reads a line.
PROGRAM = """
import asyncio, sys
from rlm_batch import batch

async def wait_for_line():
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
    print(PREFECT_API_URL.value(), PREFECT_API_AUTH_STRING.value(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)

print(asyncio.run(batch(["wait_for_line(); SUBMIT(seen=True)"], tools={"wait_for_line": wait_for_line}))[0].seen)
"""


def test_the_embedded_server_needs_a_password_and_refuses_web_pages(home: Path, tmp_path: Path) -> None:
    """`tests/deployments/test_server.py` tests pages in detail, on the server of `rlm-batch up`."""
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command, settings = [sys.executable, "-c", PROGRAM], environment | {"PREFECT_HOME": str(home)}
    with subprocess.Popen(command, env=settings, cwd=tmp_path, stdin=-1, stdout=-1, text=True) as program:
        try:
            assert program.stdout is not None
            address, auth = program.stdout.readline().split()
            name, password = auth.split(":")
            assert httpx.get(f"{address}/admin/version", timeout=90).status_code == 401
            with httpx.Client(base_url=address, auth=(name, password), timeout=90) as client:
                foreign = {"Origin": "http://evil.example"}
                assert client.post("/flows/", json={"name": "x"}, headers=foreign).status_code == 403
                assert client.get("/admin/version", headers={"Host": "evil.example"}).status_code == 400
                assert [flow["name"] for flow in client.post("/flows/filter", json={}).json()] == ["rlm-batch"]
            assert program.communicate("go\n", timeout=90)[0].strip() == "True"
        finally:
            program.kill()
