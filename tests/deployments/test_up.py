"""`rlm-batch up`, as a person has it: one command in one terminal, and Prefect's own commands in another."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlm_batch.deployments.up import find_allowed_paths

from ..infra.csrf import get_csrf_headers
from ..infra.logged_process import choose_port
from ..infra.postgres import Postgres

COMMAND = str(Path(sys.executable).with_name("rlm-batch"))
START = 240  # seconds; a first start migrates a database, beside everything else that is tested
WORDS = {"server": "uvicorn --factory", "worker": "prefect worker start"}  # of their command lines
SLOW = 'code="import time; time.sleep(t); SUBMIT(loss=t)"'


class Up:
    """The command in a process of its own, with an empty home; `said` is what it has printed so far."""

    def __init__(self, home: Path, *options: str, **settings: str) -> None:
        self.home = home
        self.port = choose_port()
        self.said = ""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {"HOME": str(home), "RLM_BATCH_RESULTS": str(home / "results"), "COLUMNS": "200", **settings}
        self.environment = environment
        self.process = subprocess.Popen(
            [COMMAND, "up", "--port", str(self.port), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, text: str, seconds: float = START) -> None:
        until = time.monotonic() + seconds
        while text not in self.said and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert text in self.said, self.said

    def there(self) -> "Up":
        """Once it says that it is up; what it says to type is in `next`, and its environment has the server."""
        self.wait_for("deployment run sweep/local --watch\n")
        exported, self.next = [line.strip() for line in self.said.strip().splitlines()[-2:]]
        name, _, url = exported.removeprefix("export ").partition("=")
        self.environment[name] = self.url = url
        return self

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """What a person types in another terminal."""
        return subprocess.run(
            words, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=START, check=False
        )

    def api(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.url}/{path}", json=body, headers=get_csrf_headers(self.url), timeout=60)
        return answer.raise_for_status().json()

    def list_sweeps(self, **states: Any) -> list[dict[str, Any]]:
        """The runs of sweeps, beside which the deployments' own schedule makes some of reap."""
        return self.api("flow_runs/filter", flows={"name": {"any_": ["sweep"]}}, flow_runs={"state": states})

    def run_of(self, *words: str) -> str:
        """The id of a new run of sweep/local."""
        done = self.type(*shlex.split(self.next.removesuffix(" --watch")), *words)
        (found,) = re.findall(r"UUID: (\S+)", done.stdout)
        return found

    def log_of(self, flow_run: str) -> str:
        found = self.api("logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}, sort="TIMESTAMP_ASC")
        return "\n".join(line["message"] for line in found)

    def has_started(self, flow_run: str) -> None:
        """Once its executions are under way."""
        until = time.monotonic() + START
        while "executions on local" not in self.log_of(flow_run):
            assert time.monotonic() < until
            time.sleep(0.2)
        while not list((self.home / "results" / flow_run).glob("part-*")):
            assert time.monotonic() < until
            time.sleep(0.1)

    def ends(self, *numbers: int) -> int:
        """Its exit status after these signals."""
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.2)
        self.process.wait(90)
        self._reader.join(10)
        return self.process.returncode

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def empty(tmp_path: Path, no_process_left: None) -> Path:
    """A home that nothing has been put into."""
    return tmp_path


# Python runs it at its start: the worker leaves a process behind, which ends by itself.
LEAVING = """
import os, pathlib, sys, time
if "prefect worker start" in " ".join(sys.orig_argv):
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            pathlib.Path(__file__).with_name("left").write_text(str(os.getpid()))
            time.sleep(2)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.timeout(600)
@pytest.mark.full
def test_up_and_then_what_it_says_to_type_is_all_it_takes(empty: Path) -> None:
    (empty / "sitecustomize.py").write_text(LEAVING)
    with Up(empty, PYTHONPATH=str(empty)) as up:
        up.there()
        assert str(empty / ".prefect" / "prefect.db") in up.said
        assert f"Whoever can reach 127.0.0.1:{up.port} on this machine can run code" in up.said
        code = 'code="SUBMIT(loss=abs(x - 3))"'
        done = up.type(*shlex.split(up.next), "-p", code, "-p", 'grid={"x": [1, 2, 3]}')
        assert done.returncode == 0, done.stdout + done.stderr
        (flow_run,) = re.findall(r"UUID: (\S+)", done.stdout)
        assert up.api("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})[0]["state_type"] == "COMPLETED"
        (place,) = set(re.findall(r"results in (\S+)", up.log_of(flow_run)))
        lines = [json.loads(line) for part in Path(place).glob("part-*") for line in part.read_text().splitlines()]
        assert sorted(line["outputs"]["loss"] for line in lines) == [0, 1, 2]
        left = Path("/proc") / (empty / "left").read_text()
        until = time.monotonic() + 30
        while left.exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert not left.exists(), (left / "status").read_text()  # up has adopted it, and takes note of its end
        again = up.type(COMMAND, "up")
        assert again.returncode == 2
        assert f"rlm-batch: rlm-batch is up already, as process {up.process.pid}: use it with" in again.stderr
        assert up.url in again.stderr
        assert up.ends(signal.SIGINT, signal.SIGINT) == 0  # the second one is harmless
        assert up.said.rstrip().endswith("there again next time.")
        assert "Traceback" not in up.said
        with pytest.raises(httpx.ConnectError):
            httpx.get(up.url)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_takes_the_flow_runs_and_their_sandboxes_and_keeps_what_was_done(empty: Path, number: int) -> None:
    with Up(empty) as up:
        flow_run = up.there().run_of("-p", SLOW, "-p", 'grid={"t": [0.1, 300, 300]}')
        up.has_started(flow_run)
        assert up.ends(number, number) == 0
    assert not list(Path(os.environ["TMPDIR"]).glob("rlm-batch-*"))
    with Up(empty) as up:
        up.there()
        (found,) = up.api("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
        assert found["state_type"] == "CRASHED"
        assert "rlm-batch up was ended" in found["state"]["message"]
        assert up.ends(number) == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_schedule_a_minute_ahead_runs_by_itself(empty: Path) -> None:
    with Up(empty) as up:
        up.there()
        prefect = str(Path(sys.executable).with_name("prefect"))
        when = datetime.now(UTC) + timedelta(minutes=2)
        cron = f"{when.minute} {when.hour} * * *"
        made = up.type(
            prefect, "deployment", "schedule", "create", "sweep/nightly", "--cron", cron, "--timezone", "UTC"
        )
        assert made.returncode == 0, made.stdout + made.stderr
        until, found = time.monotonic() + START, []
        while not found and time.monotonic() < until:
            time.sleep(1)
            found = up.list_sweeps(type={"any_": ["COMPLETED", "FAILED"]})
        assert [(run["state_type"], run["auto_scheduled"]) for run in found] == [("COMPLETED", True)]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_sweep_of_ones_own_runs_by_its_schedule_and_whoever_wants_reads_what_it_has_come_to(empty: Path) -> None:
    (empty / "train.py").write_text("import math\nSUBMIT(loss=(math.log10(lr) + 2) ** 2)\n")
    with Up(empty) as up:
        up.there()
        made = up.type(
            *(COMMAND, "deploy", "sweep", "train.py", "--grid", "lr=0.1,0.01", "--minimize", "loss"),
            *("--name", "each-minute", "--cron", "* * * * *"),
        )
        assert made.returncode == 0, made.stdout + made.stderr
        example = Path(__file__).resolve().parents[2] / "examples" / "after_sweeps.py"
        log = empty / "after_sweeps.log"
        with log.open("w") as output:
            downstream = subprocess.Popen(
                [sys.executable, str(example)], env=up.environment, cwd=empty, stdout=output, stderr=output
            )
        try:
            until = time.monotonic() + START
            said = re.compile(r"(\S+): 0.0 is the best of 2, with \{'lr': 0.01\}")
            while (read := said.search(log.read_text())) is None and time.monotonic() < until:
                time.sleep(0.5)
            assert read is not None, log.read_text()
        finally:
            downstream.terminate()
            downstream.wait(60)
        until = time.monotonic() + START
        while True:  # the event is sent before the state is set
            (run,) = [found for found in up.list_sweeps() if found["name"] == read[1]]
            if run["state_type"] == "COMPLETED" or time.monotonic() > until:
                break
            time.sleep(0.2)
        assert (run["state_type"], run["auto_scheduled"]) == ("COMPLETED", True)
        assert run["state"]["message"].startswith(
            "2 of 2 trials succeeded; best loss 0 in trial 1 with lr=0.01; results"
        )
        report = up.type(COMMAND, "report", run["id"], "--json")
        rows = [json.loads(line) for line in report.stdout.splitlines()]
        assert [(row["outputs"]["loss"], row.get("best")) for row in rows] == [(1, None), (0, True)]
        result = up.type(sys.executable, "-c", READ_RESULT, run["id"])
        assert result.stdout.splitlines() == ["RunReport", "0.01"], result.stderr
        listed = up.type(COMMAND, "deploy", "--list").stdout
        assert re.search(r"^sweep/each-minute +\* \* \* \* \* \(UTC\) +rlm-batch ", listed, re.MULTILINE), listed
        assert up.type(COMMAND, "deploy", "--remove", "each-minute").returncode == 0
        assert up.ends(signal.SIGINT) == 0


# What another program does with a run's id.
READ_RESULT = """
import asyncio, sys
from prefect import get_client

async def read(run):
    async with get_client() as client:
        return await (await client.read_flow_run(run)).state.aresult()

report = asyncio.run(read(sys.argv[1]))
print(type(report).__name__, report.best.meta.variables["lr"], sep="\\n")
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_runs_may_name_files_of_the_home_and_have_no_isolation_only_where_that_is_allowed(empty: Path) -> None:
    (empty / "in.jsonl").write_text('{"x": 1}')
    with Up(empty) as up:
        up.there()
        assert f"runs may use those below {empty}{os.pathsep}{Path.cwd()}\n" in up.said
        prefect, code = shlex.split(up.next)[0], 'code="SUBMIT(y=x)"'
        runs = {
            "Completed": ("-p", f"inputs={empty / 'in.jsonl'}"),
            "RLM_BATCH_ALLOWED_PATHS": ("-p", "inputs=/etc/in.jsonl"),
            "RLM_BATCH_ALLOW_NO_ISOLATION=1": ("-p", 'inputs=[{"x": 1}]', "-p", "provider=local:none"),
        }
        for text, parameters in runs.items():
            done = up.type(prefect, "deployment", "run", "batch/local", "--watch", "-p", code, *parameters)
            (flow_run,) = re.findall(r"UUID: (\S+)", done.stdout)
            (found,) = up.api("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
            assert text in f"{found['state']['name']}: {found['state']['message']}"
        assert up.ends(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("there", "allowed"),
    [({}, "{home}:{here}"), ({"RLM_BATCH_ALLOWED_PATHS": "/data"}, "/data"), ({"RLM_BATCH_ALLOWED_PATHS": ""}, "")],
)
def test_up_allows_the_home_and_the_directory_here_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, str], allowed: str
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    for name, value in {"HOME": str(home), **there}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(here)
    assert find_allowed_paths() == allowed.format(home=home, here=here)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_with_a_password_only_who_has_it_runs_anything_and_it_is_told_to_nobody(empty: Path) -> None:
    with Up(empty, "--auth", "somebody:not-told") as up:
        up.there()
        assert f"Whoever can reach 127.0.0.1:{up.port} on this machine and has the password" in up.said
        assert "export PREFECT_API_AUTH_STRING=NAME:PASSWORD\n" in up.said
        refused = up.type(*shlex.split(up.next))
        assert refused.returncode == 1
        assert "401" in refused.stdout + refused.stderr
        up.environment["PREFECT_API_AUTH_STRING"] = "somebody:not-told"
        done = up.type(*shlex.split(up.next))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Completed" in done.stdout
        for pid in below(up):
            assert "not-told" not in Path(f"/proc/{pid}/cmdline").read_text()
        assert up.ends(signal.SIGINT) == 0
        logs = [(empty / ".prefect" / name).read_text() for name in ("server.log", "worker.log")]
        assert "not-told" not in "".join([up.said, *logs])


@pytest.mark.full
@pytest.mark.requires("postgres")
@pytest.mark.timeout(900)
def test_postgres_is_as_good_a_database_and_keeps_what_was_done(empty: Path) -> None:
    with Postgres() as postgres:
        url = postgres.url.replace("postgresql+asyncpg://tests@", "postgresql://tests:not-told@")
        with Up(empty, "--database", url) as up:
            done = up.there().type(*shlex.split(up.next))
            assert done.returncode == 0, done.stdout + done.stderr
            assert up.ends(signal.SIGINT) == 0
            assert "not-told" not in up.said
        with Up(empty, "--database", url) as up:
            up.there()
            assert [run["state_type"] for run in up.list_sweeps()] == ["COMPLETED"]
            assert up.ends(signal.SIGTERM) == 0
    assert not (empty / ".prefect" / "prefect.db").exists()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_database_that_is_not_there_is_one_sentence_without_its_password(empty: Path) -> None:
    with Up(empty, "--database", "postgresql://me:not-told@127.0.0.1:9/prefect") as up:
        assert up.process.wait(START) == 2
        up.ends()
        said = up.said.splitlines()[-1]
        assert said.startswith("rlm-batch: the Prefect server did not start: ConnectionRefusedError")
        assert "Traceback" not in up.said
        assert "not-told" not in up.said + (empty / ".prefect" / "server.log").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["server", "worker"])
def test_a_child_that_dies_ends_it_with_an_error_and_no_sandbox_is_left(
    empty: Path, which: str, processes: Callable[[], dict[int, str]]
) -> None:
    with Up(empty) as up:
        flow_run = up.there().run_of("-p", SLOW, "-p", 'grid={"t": [0.1, 300]}')
        up.has_started(flow_run)
        (pid,) = [pid for pid, line in processes().items() if WORDS[which] in line and pid in below(up)]
        os.kill(pid, signal.SIGKILL)
        up.process.wait(90)
        up.ends()
        assert up.process.returncode == 2
        assert f"rlm-batch: the Prefect {which} has ended by itself, with signal SIGKILL" in up.said
        assert "Traceback" not in up.said
    assert not list(Path(os.environ["TMPDIR"]).glob("rlm-batch-*"))


def below(up: Up) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()]
