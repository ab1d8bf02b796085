"""Seeded faults of a batch: failing calls of providers and servers, and killed processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from rlm_batch import DaytonaSandbox, LocalSandbox, ModalSandbox
from rlm_batch.blocks.local.inventory import CREATION_GRACE_SECONDS, LABELS_FILE

from ..infra.waiting import wait_until

LIFETIME = 45  # seconds: enough for an execution on a busy machine, and short enough for a test to wait
SLOTS = 200  # more than the slots of processes killed in the last minute, so no run waits for one
TIMEOUT = 60.0  # seconds for an execution

SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))


def chance(*names: object) -> random.Random:
    """Return the random generator of one test, which depends only on the seed and these names."""
    print(f"repeat with: make chaos SEED={SEED}")  # pytest shows it with a failure
    return random.Random(repr((SEED, *names)))


# ----------------------------------------------------------------------------------------------------------- providers


class Local:
    """Local sandboxes: no provider call can fail, and a killed host leaves folders."""

    name = "local"
    environment: ClassVar[dict[str, str]] = {}

    def block(self) -> LocalSandbox | DaytonaSandbox | ModalSandbox:
        """Return a block whose sandboxes reach the test's server on loopback."""
        return LocalSandbox(isolation="none", lifetime=LIFETIME, max_sandboxes=SLOTS)

    def sandboxes(self) -> set[str]:
        """Return the ids of all sandboxes."""
        return {path.name for path in Path(tempfile.gettempdir()).glob("rlm-batch-*")}

    def fail(self, share: float, seed: int) -> None:
        """Make that share of all calls fail from now on."""

    def faults(self) -> int:
        """Return the number of failed calls."""
        return 0

    def reaped_after(self) -> float:
        """Return the seconds after which one reap removes everything that killed processes have left."""
        folders = [Path(tempfile.gettempdir()) / name for name in self.sandboxes()]
        # A dead host's folder is recognised at once, unless the host died while it created or removed the folder.
        return 0.0 if all((folder / LABELS_FILE).exists() for folder in folders) else CREATION_GRACE_SECONDS + 2

    def take(self, sandbox: str) -> None:
        """End a sandbox as its provider would: kill its root process."""
        place = os.fsencode(Path(tempfile.gettempdir()) / sandbox / "work")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.fsencode(os.readlink(process / "cwd")) == place:
                    os.kill(int(process.name), signal.SIGKILL)
                    return


class Daytona:
    """The stand-in for Daytona, where one minute of an interval lasts one lifetime."""

    name = "daytona"

    def __init__(self, standin: Any) -> None:
        self._standin = standin
        self.environment = dict(standin.environment)
        self._settings: dict[str, Any] = {"minute": float(LIFETIME), "boot_s": 0.05}
        standin.set(**self._settings)

    def block(self) -> DaytonaSandbox:
        return DaytonaSandbox(lifetime=LIFETIME, max_sandboxes=SLOTS)

    def sandboxes(self) -> set[str]:
        return {box["id"] for box in self._standin.state()["sandboxes"]}

    def fail(self, share: float, seed: int) -> None:
        more = {"fault_rate": share, "fault_delay_s": 0.5, "retry_after_s": 0.1, "seed": seed}
        self._standin.set(**self._settings, **more)

    def faults(self) -> int:
        return sum(self._standin.state()["faults"].values())

    def reaped_after(self) -> float:
        return LIFETIME + 5

    def take(self, sandbox: str) -> None:
        import urllib.request

        request = urllib.request.Request(
            f"{self._standin.url}/sandbox/{sandbox}",
            method="DELETE",
            headers={"Authorization": f"Bearer {self._standin.key}"},
        )
        with suppress(OSError):  # this call may get a fault, or the sandbox is already deleted
            urllib.request.urlopen(request, timeout=30).close()


class Modal:
    """The stand-in for Modal."""

    name = "modal"

    def __init__(self, standin: Any) -> None:
        self._standin = standin
        self.environment = {"MODAL_SERVER_URL": standin.hello["url"]}

    def block(self) -> ModalSandbox:
        hello = self._standin.hello
        return ModalSandbox(
            token_id=hello["token_id"],
            token_secret=hello["token_secret"],
            lifetime=LIFETIME,
            idle_timeout=LIFETIME,
            max_sandboxes=SLOTS,
        )

    def sandboxes(self) -> set[str]:
        return set(self._standin.ask("state")["sandboxes"])

    def fail(self, share: float, seed: int) -> None:
        kinds: list[dict[str, Any]] = [
            {"status": "UNAVAILABLE"},
            {"status": "UNAVAILABLE", "after": True},
            {"status": "RESOURCE_EXHAUSTED", "retry_after": 0.2},
            {"drop": True},
            {"delay": 0.5},
        ]
        rules = [{**kind, "probability": share / len(kinds)} for kind in kinds] if share else []
        self._standin.ask("faults", rules=rules, seed=seed)

    def faults(self) -> int:
        return sum(self._standin.ask("state")["faults"].values())

    def reaped_after(self) -> float:
        return LIFETIME + 5

    def take(self, sandbox: str) -> None:
        with suppress(RuntimeError):  # the sandbox is already deleted
            self._standin.ask("end", sandbox=sandbox)


Provider = Local | Daytona | Modal


# ----------------------------------------------------------------------------------------------------- a flow's process


class Host:
    """A flow run in a process that can be killed."""

    def __init__(self, hosts: Hosts, pid: int, log: Path) -> None:
        self._hosts, self.pid, self._log = hosts, pid, log
        self._status: int | None = None

    def status(self) -> int | None:
        """Return the exit status as subprocess defines it; None while the process runs."""
        if self._status is None:
            self._status = self._hosts.ask({"op": "wait", "pid": self.pid})
        return self._status

    def kill(self, number: int) -> None:
        """Send the process a signal, if it still runs."""
        if self.status() is None:
            os.kill(self.pid, number)

    def wait_for_exit(self, seconds: float = 120.0) -> int:
        """Wait for the process to end and return its exit status. A process that hangs is killed and fails the test."""
        try:
            wait_until(lambda: self.status() is not None, timeout=seconds)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(
                f"the flow's process did not end within {seconds:.0f} s:\n{self.read_output()}"
            ) from None
        assert self._status is not None
        return self._status

    def read_output(self) -> str:
        """Return the end of the process's output."""
        return self._log.read_text(errors="replace")[-4000:]


class Hosts:
    """A context manager that starts flow processes from one process with all imports done."""

    def __init__(self, server: str, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("host.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, request: dict[str, Any]) -> Any:
        """Send one line and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, provider: Provider, server: str | None = None, **request: Any) -> Host:
        """Start a flow run; `server` replaces the tests' own server."""
        log = self._folder / "flow.log"
        common = {"environment": provider.environment, "server": server or self._server, "log": str(log)}
        return Host(self, self.ask({**common, **request}), log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


# ----------------------------------------------------------------------------------------------------- Prefect's server


class Proxy:
    """A context manager for a proxy of a Prefect server that breaks a share of all connections.

    A broken connection gets the status 503, closes at once, or closes after a while. `url` is the address for clients.
    """

    def __init__(self, server: str, share: float, dice: random.Random) -> None:
        self._to = urlsplit(server)
        self._share, self._dice = share, dice
        self.faults: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        serving = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1"), self._loop)
        self._serving = serving.result(60)
        self.url = f"http://127.0.0.1:{self._serving.sockets[0].getsockname()[1]}{self._to.path}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._serving.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = self._dice.choice(("503", "drop", "cut")) if self._dice.random() < self._share else ""
        if kind:
            self.faults[kind] += 1
        try:
            if kind == "503":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
            elif kind != "drop":
                async with asyncio.timeout(self._dice.uniform(0.1, 3.0) if kind else None):
                    await self._pass_on(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._to.hostname, self._to.port)
        own, its = (f"ost: {urlsplit(url).netloc}\r\n".encode() for url in (self.url, self._to.geturl()))

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                target.write(data.replace(own, its))  # the server accepts only its own host name
                await target.drain()

        copies = [asyncio.ensure_future(copy(*pair)) for pair in ((reader, back), (there, writer))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in copies:
                task.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            back.close()
