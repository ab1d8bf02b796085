"""A worker that is stopped, as by compose, Kubernetes or systemd: its flow runs end, and later resume."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from rlm_batch.tasks.ledger.ledger import Ledger

from ..infra.bound_process import start_bound_process
from ..infra.logged_process import choose_port
from ..infra.machine import is_alive, list_descendants
from ..infra.ordinary_server import OrdinaryServer
from ..infra.postgres import Postgres
from ..infra.programs import COMMAND, run_program
from ..infra.servers import SERVICES
from ..infra.waiting import wait_until, wait_until_empty
from ..infra.workers import its_own

GRACE_SECONDS = float(SERVICES["worker"]["stop_grace_period"].removesuffix("s"))
LANES = 4
# Each execution appends a line to a file of the volume when it begins, and when it is done.
CODE = """
import os, time

def note(name):
    file = os.open(f"{VOLUME}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{x}\\n".encode())
    os.close(file)

note("begun")
time.sleep(seconds)
note("done")
SUBMIT(x=x)
"""


class Site:
    """A Prefect server with our deployments, and a machine with workers; the worker's log is in its folder."""

    def __init__(self, folder: Path, database: str | None) -> None:
        self._server = OrdinaryServer(folder / "server", database)
        self.url = self._server.url
        self.folder = folder / "machine"
        self.environment = {
            **its_own(self.folder, self.url),
            "RLM_BATCH_RESULTS": str(folder / "results"),
            "RLM_BATCH_VOLUMES": str(folder / "volumes"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_WEBSERVER_PORT": str(choose_port()),
            "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        }
        self.results, self._volume = folder / "results", folder / "volumes" / "effects"
        self._workers: list[Stoppable] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._server)
            stack.callback(lambda: [worker.kill() for worker in self._workers])
            done = run_program([COMMAND, "deploy"], env=self.environment)
            assert done.returncode == 0, done.stderr
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_worker(self) -> "Stoppable":
        """Start a worker with the command of compose.yaml."""
        worker = Stoppable(self)
        self._workers.append(worker)
        return worker

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """Return the server's answer to a request. Ask again while its SQLite is locked, as Prefect's client does."""

        def send() -> httpx.Response | None:
            answer = httpx.request(method, f"{self.url}/{path}", json=body or None, timeout=60)
            return None if answer.status_code == 503 else answer

        answer = wait_until(send, f"an answer to {path}")
        assert answer is not None
        return answer.raise_for_status().json()

    def create_run(self, count: int, seconds: float) -> str:
        """Create a flow run of so many executions, whose ledger is always the same, and return its id."""
        deployment = self.ask("GET", "deployments/name/rlm-batch/local")["id"]
        parameters = {
            "code": CODE,
            "inputs": [{"x": x, "seconds": seconds} for x in range(count)],
            "provider": "local",
            "provider_options": {"volume_name": "effects"},
            "max_workers": LANES,
            "results_path": str(self.results / "drained"),
        }
        return self.ask("POST", f"deployments/{deployment}/create_flow_run", parameters=parameters)["id"]

    def retry(self, run: str) -> None:
        """Retry a flow run, as the button in the UI does."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        assert self.ask("POST", f"flow_runs/{run}/set_state", state=state)["status"] == "ACCEPT"

    def read_state(self, run: str) -> str:
        return self.ask("GET", f"flow_runs/{run}")["state_name"]

    def count_running(self) -> int:
        """Return the number of flow runs and task runs that are Running on the server."""
        running = {"state": {"type": {"any_": ["RUNNING"]}}}
        return self.ask("POST", "flow_runs/count", flow_runs=running) + self.ask(
            "POST", "task_runs/count", task_runs=running
        )

    def count_results(self) -> Counter[int]:
        """Return the number of results in the ledger, for each execution."""
        ledger = Ledger(self.results / "drained")
        return Counter(line.data["outputs"]["x"] for line in ledger.read_lines() if line.is_success)

    def count_effects(self, name: str) -> Counter[int]:
        """Return how often each execution has begun, or was done."""
        files = list(self._volume.rglob(name)) if self._volume.exists() else []
        return Counter(int(x) for file in files for x in file.read_text().split())

    def list_folders(self) -> list[str]:
        """List the folders of local sandboxes."""
        return [path.name for path in (self.folder / "tmp").glob("rlm-batch-*")]


class Stoppable:
    """A worker with a parent process that forwards SIGTERM to it alone, as the `init` of a container does."""

    def __init__(self, site: Site) -> None:
        program, *arguments = SERVICES["worker"]["command"]
        assert program == "rlm-batch"
        self._log = site.folder / "worker.log"
        with self._log.open("ab") as log:
            self._process = start_bound_process(
                [COMMAND, *arguments],
                end_signal=signal.SIGKILL,
                cwd=site.folder,
                env=site.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self, *, reaches_all: bool = False) -> None:
        """Stop the worker as compose does, or as systemd does, whose SIGTERM reaches all processes of the unit.

        Fails if a process of it is left after the grace period, when SIGKILL would end it.
        """
        pids = list_descendants(self._process.pid)
        for pid in pids if reaches_all else pids[:1]:
            with suppress(ProcessLookupError):  # A sandbox has ended meanwhile.
                os.kill(pid, signal.SIGTERM)
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end: {self._log.read_text()[-5000:]}") from None
        assert not wait_until_empty(lambda: [pid for pid in pids if is_alive(pid)], timeout=30)

    def kill(self) -> None:
        """Kill the worker and its flow runs with SIGKILL."""
        for pid in [self._process.pid, *list_descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.requires("postgres"))])
def site(request: pytest.FixtureRequest, tmp_path: Path, no_process_left: None) -> Iterator[Site]:
    """Start a server on each kind of database."""
    with (
        Postgres() if request.param == "postgres" else nullcontext() as postgres,
        Site(tmp_path, postgres and postgres.url) as site,
    ):
        yield site


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "drains"), [(60, 2), pytest.param(500, 10, marks=pytest.mark.full)], ids=["two drains", "ten drains"]
)
def test_a_run_whose_worker_is_drained_again_and_again_completes_with_each_execution_once(
    site: Site, count: int, drains: int
) -> None:
    run = site.create_run(count, 0.3)
    runs, started = [run], {}
    for number in range(drains):
        worker = site.start_worker()
        enough = (number + 1) * count // (drains + 2)
        wait_until(lambda enough=enough: len(site.count_results()) >= enough, f"{enough} results")
        worker.stop(reaches_all=number % 2 == 1)
        assert site.read_state(run) == "Crashed"
        assert not site.list_folders()
        recorded, begun = site.count_results(), site.count_effects("begun")
        if number % 3 == 2:
            run = site.create_run(count, 0.3)  # another run with the same parameters
            runs.append(run)
        else:
            site.retry(run)
        started = {x: begun[x] for x in recorded}
    worker = site.start_worker()
    wait_until(lambda: site.read_state(run) == "Completed", "the end of the run", timeout=300)
    worker.stop()
    assert {x: site.count_effects("begun")[x] for x in started} == started  # A recorded execution never begins again.
    assert site.count_results() == Counter(range(count))
    assert set(site.count_effects("done")) == set(range(count))
    assert site.count_effects("begun").total() <= count + drains * LANES
    assert wait_until_empty(lambda: range(site.count_running())) == range(0)
    assert [site.read_state(each) for each in runs] == ["Crashed"] * (len(runs) - 1) + ["Completed"]
    print(f"begun {site.count_effects('begun').total()}, done {site.count_effects('done').total()}, results {count}")
