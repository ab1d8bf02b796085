"""A Prefect server with our deployments, and workers as other machines would run them.

    with Fleet() as fleet:
        one, two = fleet.workers(2)
        run = fleet.submit("batch/local", results_path=...)
        one.kill()
        state = fleet.ended(run)

Each has a host name, a home, a PREFECT_HOME and a temporary directory of its own, and where the kernel allows it
(`worker.apart`) Linux namespaces of its own, in which it reaches the server, and the ports that were asked for, and
nothing else: see machine.py. Files are what all of them share, as on a network's file system.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from prefect.client.orchestration import SyncPrefectClient, get_client

from rlm_batch.deployments.deploy import deploy
from rlm_batch.deployments.server import WORK_POOL, PrefectServer
from rlm_batch.deployments.worker import QUERY_SECONDS
from rlm_batch.flows.child_process import build_module_command
from rlm_batch.flows.prefect_server import SERVER_SETTINGS

from .machine import list_descendants
from .postgres import Postgres, find_programs
from .prefect_database import make_prefect_home

MACHINE = Path(__file__).with_name("machine.py")
ONLINE_TIMEOUT = 180.0  # seconds until a worker has been heard of: it imports Prefect first, on cores that are shared
END_GRACE = 20.0  # seconds for a worker that was asked to end
# Of this process's environment: what a worker finds on its own machine or is told by its fleet.
OURS = ("PREFECT_", "RLM_BATCH_", "XDG_", "DAYTONA_", "MODAL_TOKEN", "HOME", "TMPDIR", "PYTEST_")


class Machine:
    """A command on a machine of its own, and everything that it starts. A context manager, which ends in `kill`.

    `ports` are those of loopback that it reaches; what it says goes to `log`. `pid` is the process that everything
    hangs on, as this machine counts; `relay` that of the relay, which is no part of it; `refused` why it has no
    namespaces, None where it has.
    """

    def __init__(
        self,
        command: list[str],
        *,
        folder: Path,
        log: Path,
        name: str,
        environment: dict[str, str],
        ports: Iterable[int] = (),
        apart: bool = True,
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = log
        request = {
            "command": command,
            "environment": environment,
            "cwd": str(folder),
            "log": str(log),
            "ports": list(ports),
            "name": name,
            "apart": apart,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(MACHINE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is the tests' to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the machine {name} did not start (status {self._process.wait()})")
        hello = json.loads(line)
        self.pid: int = hello["pid"]
        self.relay = self._process.pid
        self.refused: str | None = hello["refused"]
        self._cpu: float | None = None  # of one that has ended
        while not list_descendants(self.pid) and self.status() is None:  # a look at what runs is to find the command
            time.sleep(0.005)

    def cpu(self) -> float:
        """The CPU seconds that everything in it has taken, without the relay's."""
        if self.status() is None:
            return cpu(self.pid)
        if self._cpu is None:
            assert self._process.stdout is not None
            line = b"" if self._process.stdout.closed else self._process.stdout.readline()
            self._cpu = float(json.loads(line)["cpu"]) if line else 0.0
        return self._cpu

    @property
    def apart(self) -> bool:
        """Whether it has namespaces of its own."""
        return self.refused is None

    def status(self) -> int | None:
        """The command's status, 128 and its number where a signal ended it; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Ends it as a machine that loses its power: nothing in it gets to do anything. Returns when all is gone."""
        self._tell(b"kill\n")
        self._wait()

    def end(self) -> None:
        """Ends it as a person would, with SIGTERM, and after some seconds as `kill` does."""
        self._tell(b"end\n")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_GRACE)
        self.kill()

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(word)

    def _wait(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self.cpu()
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Worker(Machine):
    """A worker of the pool, with `limit` runs at one time, on a machine of its own with folders of its own."""

    def __init__(
        self,
        folder: Path,
        api_url: str,
        name: str,
        *,
        limit: int | None = 1,
        ports: Iterable[int] = (),
        environment: dict[str, str] | None = None,
        apart: bool = True,
    ) -> None:
        which = ("--pool", WORK_POOL, "--type", "process", "--name", name, "--install-policy", "never")
        most = () if limit is None else ("--limit", str(limit))
        super().__init__(
            build_module_command("prefect", "worker", "start", *which, *most, parent=0),
            folder=folder,
            log=folder / "worker.log",
            name=name,
            environment={**its_own(folder, api_url), **(environment or {})},
            ports=[urlsplit(api_url).port or 80, *ports],
            apart=apart,
        )

    def flow_runs(self) -> dict[int, str]:
        """The flow runs that it runs now: their ids by those of their processes."""
        found: dict[int, str] = {}
        for worker in list_descendants(self.pid)[:1]:
            for pid in list_descendants(worker):
                with suppress(OSError):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    for item in environment:
                        if item.startswith(b"PREFECT__FLOW_RUN_ID=") and item[21:].decode() not in found.values():
                            found[pid] = item[21:].decode()
        return found


def cpu(pid: int) -> float:
    """The CPU seconds of a process, of those below it, and of those that these have waited for."""
    ticks = 0
    for process in [pid, *list_descendants(pid)]:
        with suppress(OSError):  # it ended meanwhile, and is its parent's to count
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def its_own(folder: Path, api_url: str) -> dict[str, str]:
    """Makes the folder, with a home and a temporary directory; the environment of a process that lives there."""
    home, temporary = folder / "home", folder / "tmp"
    for path in (folder, home, temporary):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)  # the code of its sandboxes comes through as a user of its own
    return {
        **SERVER_SETTINGS,
        **{key: value for key, value in os.environ.items() if not key.startswith(OURS)},
        "HOME": str(home),
        "PREFECT_HOME": str(home / ".prefect"),
        "TMPDIR": str(temporary),
        "PREFECT_API_URL": api_url,
        "PREFECT_WORKER_QUERY_SECONDS": QUERY_SECONDS,
    }


async def wait_until_online(name: str) -> None:
    """Returns once the server has heard of that worker. Raises TimeoutError if it has not by `ONLINE_TIMEOUT`."""
    async with get_client() as client, asyncio.timeout(ONLINE_TIMEOUT):
        while name not in {worker.name for worker in await client.read_workers_for_work_pool(WORK_POOL)}:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.2)


class Fleet:
    """A context manager: the server, with our deployments, and the workers that it is asked for.

    Their flow runs may use files below `folder`, as `rlm-batch up` allows those of a home.

    The server is on Postgres where this machine has one and `postgres` is not False, and else on SQLite, with the
    settings that we ship and those of `settings`. All is on loopback, in a temporary directory, and ends with it; what
    the workers said last is shown if it ends with an error.
    """

    def __init__(self, *, postgres: bool = True, settings: dict[str, str] | None = None) -> None:
        self._wanted = postgres and find_programs() is not None
        self._settings = settings or {}
        self._stack = ExitStack()
        self._machines: list[Machine] = []
        self.database: Postgres | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
            self.folder.chmod(0o755)
            if self._wanted:
                self.database = stack.enter_context(Postgres())
            url = None if self.database is None else self.database.url
            home = self.folder / "server" if url else make_prefect_home(self.folder / "server")
            # Its server takes what is not ours to set from the environment, as a person's would.
            with _environment(self._settings):
                self.server = stack.enter_context(PrefectServer(home, database=url))
            self.url = self.server.url
            self._api = stack.enter_context(SyncPrefectClient(self.url))
            self._deploy()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            for machine in self._machines:
                print(f"--- the end of what {machine.name} said:\n{_tail(machine.log)}", file=sys.stderr)
        self._stack.close()

    def workers(self, count: int, **options: Any) -> list[Worker]:
        """That many workers more, once the server has heard of them; `options` are those of `Worker`."""
        with ExitStack() as stack:
            made = [self._worker(stack, **options) for _ in range(count)]
            until = time.monotonic() + ONLINE_TIMEOUT
            while missing := {worker.name for worker in made} - self.online():
                dead = [worker.name for worker in made if worker.status() is not None]
                if dead or time.monotonic() > until:
                    raise RuntimeError(f"the server has not heard of {sorted(missing)}; ended: {dead}")
                time.sleep(0.2)
            self._stack.callback(stack.pop_all().close)
        return made

    def _worker(self, stack: ExitStack, **options: Any) -> Worker:
        name = f"worker-{len(self._machines) + 1}"
        environment = {"RLM_BATCH_ALLOWED_PATHS": str(self.folder), **options.pop("environment", {})}
        worker = stack.enter_context(Worker(self.folder / name, self.url, name, environment=environment, **options))
        self._machines.append(worker)
        return worker

    def online(self) -> set[str]:
        """The names of the workers that the server takes for alive."""
        found = self.post(f"/work_pools/{WORK_POOL}/workers/filter", {})
        return {worker["name"] for worker in found if worker["status"] == "ONLINE"}

    def client(self, command: list[str], *, ports: Iterable[int] = (), **environment: str) -> Machine:
        """A command on a machine of its own that reaches the server too, such as a parent that is to be killed."""
        name = f"client-{len(self._machines) + 1}"
        folder = self.folder / name
        machine = Machine(
            command,
            folder=folder,
            log=folder / "log",
            name=name,
            environment={**its_own(folder, self.url), **environment},
            ports=[urlsplit(self.url).port or 80, *ports],
        )
        self._stack.enter_context(machine)
        self._machines.append(machine)
        return machine

    def post(self, path: str, body: Any) -> Any:
        """What the server's API answers."""
        return self._api.request("POST", path, json=body).json()  # type: ignore[arg-type]

    def get(self, path: str) -> Any:
        """What the server's API answers."""
        return self._api.request("GET", path).json()  # type: ignore[arg-type]

    def submit(self, deployment: str, **parameters: Any) -> str:
        """The id of a new run of the deployment, such as `batch/local`, with these parameters over its own."""
        found = self.get(f"/deployments/name/{deployment}")
        wanted = {"parameters": {**found["parameters"], **parameters}, "state": {"type": "SCHEDULED"}}
        return str(self.post(f"/deployments/{found['id']}/create_flow_run", wanted)["id"])

    def state(self, flow_run: str) -> dict[str, Any]:
        """The run's state: its `type`, `name` and `message`."""
        return self.get(f"/flow_runs/{flow_run}")["state"]

    def ended(self, flow_run: str, seconds: float = 300.0) -> dict[str, Any]:
        """The run's last state. Raises TimeoutError if it has none by then."""
        until = time.monotonic() + seconds
        while (state := self.state(flow_run))["type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            if time.monotonic() > until:
                raise TimeoutError(f"flow run {flow_run} is {state['name']} after {seconds:.0f} s: {state['message']}")
            time.sleep(0.2)
        return state

    def _deploy(self) -> None:
        from prefect.settings import PREFECT_API_URL, temporary_settings

        errors: list[BaseException] = []

        def work() -> None:
            try:
                with temporary_settings({PREFECT_API_URL: self.url}):
                    asyncio.run(deploy())
            except BaseException as error:  # noqa: BLE001 - it is raised where the fleet was asked for
                errors.append(error)

        # In a thread: there may be a loop in this one.
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """These variables are set within it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tail(path: Path, lines: int = 30) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "nothing"
