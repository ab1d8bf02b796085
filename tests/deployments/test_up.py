"""`rlm-batch up` as a user runs it, with Prefect's own commands in another terminal."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..infra.consent import move_home
from ..infra.hostile_files import fill_with_hostile_files
from ..infra.logged_process import choose_port
from ..infra.postgres import Postgres
from ..infra.prefect_database import make_prefect_home
from ..infra.programs import COMMAND, run_program
from ..infra.waiting import wait_until

HANG_SECONDS = 240  # seconds for a start or a whole run; a first start migrates a database while other tests run
WORDS = {"server": "flows.server.app", "worker": "rlm_batch.cli.main worker"}  # parts of the command lines
SLOW = 'code="import time; time.sleep(t); SUBMIT(loss=t)"'


class Up:
    """`rlm-batch up` in a new process; `said` is the output so far.

    Its working directory `here` has a file for each module that its processes must not import from there.
    """

    def __init__(self, home: Path, *options: str, **settings: str) -> None:
        self.home = home
        self.here = home / "here"
        self.here.mkdir(exist_ok=True)
        self._imported = fill_with_hostile_files(self.here)
        self.port = choose_port()
        self.said = ""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {"HOME": str(home), "RLM_BATCH_RESULTS": str(home / "results"), "COLUMNS": "200", **settings}
        self.environment = environment
        self.process = subprocess.Popen(
            [COMMAND, "up", "--port", str(self.port), *options],
            env=environment,
            cwd=self.here,
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

    def wait_for(self, text: str) -> None:
        """Wait until the output contains the text."""
        wait_until(lambda: text in self.said or self.process.poll() is not None, text, timeout=HANG_SECONDS)
        self._reader.join(0 if self.process.poll() is None else 60)
        assert text in self.said, self.said

    def wait_until_ready(self) -> "Up":
        """Wait until `up` is ready; set `next` to the command that it suggests, and the server in its environment."""
        self.wait_for("deployment run rlm-sweep/local --watch\n")
        exported, self.next = [line.strip() for line in self.said.strip().splitlines()[-2:]]
        name, _, url = exported.removeprefix("export ").partition("=")
        self.environment[name] = self.url = url
        return self

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a user does in another terminal."""
        return run_program(words, env=self.environment, cwd=self.home)

    def api(self, path: str, **body: Any) -> Any:
        name, colon, password = self.environment.get("PREFECT_API_AUTH_STRING", "").partition(":")
        auth = (name, password) if colon else None
        answer = httpx.post(f"{self.url}/{path}", json=body, auth=auth, timeout=60)
        return answer.raise_for_status().json()

    def list_sweeps(self, **states: Any) -> list[dict[str, Any]]:
        """Return the runs of sweeps, without the scheduled runs of `reap`."""
        return self.api("flow_runs/filter", flows={"name": {"any_": ["rlm-sweep"]}}, flow_runs={"state": states})

    def run_of(self, *words: str) -> str:
        """Start a run of rlm-sweep/local and return its id."""
        done = self.type(*shlex.split(self.next.removesuffix(" --watch")), *words)
        (run_id,) = re.findall(r"UUID: (\S+)", done.stdout)
        return run_id

    def log_of(self, flow_run: str) -> str:
        records = self.api("logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}, sort="TIMESTAMP_ASC")
        return "\n".join(line["message"] for line in records)

    def wait_for_result(self, flow_run: str) -> None:
        """Wait until the run's first result exists, so that its other executions are running."""
        folder = self.home / "results" / flow_run
        wait_until(lambda: any(part.stat().st_size for part in folder.glob("part-*")), "a result", timeout=HANG_SECONDS)

    def end(self, number: int = signal.SIGINT) -> int:
        """Send a signal to `up` and return its exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Return the exit status once the process has ended and `said` is complete."""
        status = self.process.wait(HANG_SECONDS)
        self._reader.join(60)
        return status

    def read_children(self) -> list[int]:
        """Return the ids of the processes that `up` has started or adopted."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(100)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert not self._imported.exists(), self._imported.read_text()


@pytest.fixture
def empty(tmp_path: Path, no_process_left: None) -> Path:
    """Return an empty home."""
    return tmp_path


@pytest.fixture
def home(empty: Path) -> Path:
    """Return a home with a ready Prefect database, which shortens the first start by 15 seconds."""
    make_prefect_home(empty / ".prefect")
    return empty


def list_local_sandboxes() -> list[Path]:
    """Return the folders of local sandboxes, of which none may be left."""
    return list(Path(os.environ["TMPDIR"]).glob("rlm-batch-*"))


# A module that Python runs at its start; in the worker it leaves a process behind.
LEAVING = """
import os, pathlib, sys, time
if "rlm_batch.cli.main worker" in " ".join(sys.orig_argv):
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            place = pathlib.Path(__file__)
            place.with_name("left.new").write_text(str(os.getpid()))
            place.with_name("left.new").rename(place.with_name("left"))
            time.sleep(3600)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.full
def test_up_and_the_command_that_it_prints_run_a_flow(empty: Path) -> None:
    (empty / "sitecustomize.py").write_text(LEAVING)
    with Up(empty, PYTHONPATH=str(empty)) as up:
        up.wait_until_ready()
        assert "who can run code here as you: everyone on this machine" in up.said
        code = 'code="SUBMIT(loss=abs(x - 3))"'
        done = up.type(*shlex.split(up.next), "-p", code, "-p", 'grid={"x": [1, 2, 3]}')
        assert done.returncode == 0, done.stdout + done.stderr
        (flow_run,) = re.findall(r"UUID: (\S+)", done.stdout)
        assert up.api("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})[0]["state_type"] == "COMPLETED"
        (place,) = set(re.findall(r"results in (\S+)", up.log_of(flow_run)))
        lines = [json.loads(line) for part in Path(place).glob("part-*") for line in part.read_text().splitlines()]
        assert sorted(line["outputs"]["loss"] for line in lines) == [0, 1, 2]
        left = wait_until(lambda: (empty / "left").exists() and int((empty / "left").read_text()), "the process")
        os.kill(left, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{left}").exists(), "up has adopted it, and takes note of its end")
        again = up.type(COMMAND, "up")
        assert again.returncode == 2
        assert f"rlm-batch: rlm-batch is up already in {empty / '.prefect'}: end it with Ctrl-C" in again.stderr
        up.process.send_signal(signal.SIGINT)
        up.wait_for("Ending the flow runs, the worker and the server.")
        assert up.end() == 0  # the second Ctrl-C is harmless
        assert up.said.rstrip().endswith("there again next time.")
        assert "Traceback" not in up.said
        with pytest.raises(httpx.ConnectError):
            httpx.get(up.url)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ending_up_ends_flow_runs_and_sandboxes_and_keeps_results(home: Path) -> None:
    with Up(home) as up:
        flow_run = up.wait_until_ready().run_of("-p", SLOW, "-p", 'grid={"t": [0.1, 3600, 3600]}')
        up.wait_for_result(flow_run)
        assert up.end() == 0
    wait_until(lambda: not list_local_sandboxes(), "no sandbox")
    with Up(home) as up:
        up.wait_until_ready()
        (finished_run,) = up.api("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
        assert finished_run["state_type"] == "CRASHED"
        assert up.end(signal.SIGTERM) == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_users_sweep_runs_on_schedule_and_its_results_are_readable(home: Path) -> None:
    (home / "train.py").write_text("import math\nSUBMIT(loss=(math.log10(lr) + 2) ** 2)\n")
    with Up(home) as up:
        up.wait_until_ready()
        made = up.type(
            *(COMMAND, "deploy", "sweep", "train.py", "--grid", "lr=0.1,0.01", "--minimize", "loss"),
            *("--name", "each-minute", "--cron", "* * * * *"),
        )
        assert made.returncode == 0, made.stdout + made.stderr
        example = Path(__file__).resolve().parents[2] / "examples" / "after_sweeps.py"
        log = home / "after_sweeps.log"
        with log.open("w") as output:
            downstream = subprocess.Popen(
                [sys.executable, str(example)], env=up.environment, cwd=home, stdout=output, stderr=output
            )
        try:
            best = re.compile(r"(\S+): 0.0 is the best of 2, with \{'lr': 0.01\}")
            read: Any = wait_until(lambda: best.search(log.read_text()), "the best trial", timeout=HANG_SECONDS)
        finally:
            downstream.terminate()
            downstream.wait(60)

        def find_completed() -> list[dict[str, Any]]:
            """Return the completed run; its state is set after its event is sent."""
            return [run for run in up.list_sweeps(type={"any_": ["COMPLETED"]}) if run["name"] == read[1]]

        (run,) = wait_until(find_completed, "the run's last state")
        assert run["auto_scheduled"]
        assert run["state"]["message"].startswith(
            "2 of 2 trials succeeded; best loss 0 in trial 1 with lr=0.01; results"
        )
        report = up.type(COMMAND, "report", run["id"], "--json")
        rows = [json.loads(line) for line in report.stdout.splitlines()]
        assert [(row["outputs"]["loss"], row.get("best")) for row in rows] == [(1, None), (0, True)]
        result = up.type(sys.executable, "-c", READ_RESULT, run["id"])
        assert result.stdout.splitlines() == ["TrialsReport", "0.01"], result.stderr
        assert up.end() == 0


# A program that reads a run's result by its id.
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
@pytest.mark.timeout(900)
def test_runs_need_the_password_and_stay_within_the_allowed_paths(home: Path) -> None:
    (home / "in.jsonl").write_text('{"x": 1}')
    consent = move_home(home / "user", allowed_paths=[str(home)])
    with Up(home, "--auth", "somebody:not-told", **consent) as up:
        up.wait_until_ready()
        assert "who can run code here as you: those with the password" in up.said
        assert "export PREFECT_API_AUTH_STRING=NAME:PASSWORD\n" in up.said
        assert f"runs may use those below {home}\n" in up.said
        refused = up.type(*shlex.split(up.next))
        assert refused.returncode == 1
        assert "401" in refused.stdout + refused.stderr
        up.environment["PREFECT_API_AUTH_STRING"] = "somebody:not-told"
        prefect, code = shlex.split(up.next)[0], 'code="SUBMIT(y=x)"'
        runs = {
            "Completed": ("-p", f"inputs={home / 'in.jsonl'}"),
            "allowed_paths": ("-p", "inputs=/etc/in.jsonl"),
            "allow_no_isolation = true": ("-p", 'inputs=[{"x": 1}]', "-p", "provider=local:none"),
        }
        for text, parameters in runs.items():
            done = up.type(prefect, "deployment", "run", "rlm-batch/local", "--watch", "-p", code, *parameters)
            (flow_run,) = re.findall(r"UUID: (\S+)", done.stdout)
            (finished_run,) = up.api("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
            assert text in f"{finished_run['state']['name']}: {finished_run['state']['message']}"
        for pid in up.read_children():
            assert "not-told" not in Path(f"/proc/{pid}/cmdline").read_text()
        assert up.end() == 0
        logs = [(home / ".prefect" / name).read_text() for name in ("server.log", "worker.log")]
        assert "not-told" not in "".join([up.said, *logs])


@pytest.mark.full
@pytest.mark.requires("postgres")
@pytest.mark.timeout(900)
def test_postgres_works_as_the_database_and_keeps_results(empty: Path) -> None:
    with Postgres() as postgres:
        url = postgres.url.replace("postgresql+asyncpg://tests@", "postgresql://tests:not-told@")
        with Up(empty, "--database", url) as up:
            done = up.wait_until_ready().type(*shlex.split(up.next))
            assert done.returncode == 0, done.stdout + done.stderr
            assert up.end() == 0
            assert "not-told" not in up.said
        with Up(empty, "--database", url) as up:
            up.wait_until_ready()
            assert [run["state_type"] for run in up.list_sweeps()] == ["COMPLETED"]
            assert up.end(signal.SIGTERM) == 0
    assert not (empty / ".prefect" / "prefect.db").exists()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["server", "worker"])
def test_a_dead_child_process_ends_up_with_an_error_and_no_sandbox(
    home: Path, which: str, processes: Callable[[], dict[int, str]]
) -> None:
    with Up(home) as up:
        flow_run = up.wait_until_ready().run_of("-p", SLOW, "-p", 'grid={"t": [0.1, 3600]}')
        up.wait_for_result(flow_run)
        (pid,) = [pid for pid, line in processes().items() if WORDS[which] in line and pid in up.read_children()]
        os.kill(pid, signal.SIGKILL)
        assert up.wait() == 2
        assert f"rlm-batch: the Prefect {which} has ended by itself, with signal SIGKILL" in up.said
        assert "Traceback" not in up.said
    wait_until(lambda: not list_local_sandboxes(), "no sandbox")
