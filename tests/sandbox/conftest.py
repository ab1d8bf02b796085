"""Fixtures that start drivers and scripts, and the check that no process is left."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest

from rlm_batch import LocalInterpreter, LocalSandbox, Result
from rlm_batch.sandbox.driver_bundle import build_driver_text
from rlm_batch.sandbox.driver_settings import DriverSettings
from rlm_batch.sandbox.wire.frames import FrameReader, encode_frame
from rlm_batch.sandbox.wire.strict_json import dumps, loads

Frame = tuple[dict[str, Any], bytes | None]
Run = Callable[..., subprocess.Popen[str]]
# seconds; a driver or script that takes longer has hung. Code that a test ends early sleeps for 1000 s.
PATIENCE = 90.0

BEGIN = """
import asyncio, os, sys, time
from rlm_batch import LocalInterpreter
def ready():
    os.write(1, b"ready\\n")  # in one piece, whatever other threads say
"""
# Code that starts two processes that ignore signals, one of them a daemon.
START_DAEMONS = """
import os, signal, time
for own_session in (False, True):
    if os.fork() == 0:
        if own_session:
            os.setsid()
            if os.fork():
                os._exit(0)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
"""
# Host functions that never return.
TOOLS = """
def plain():
    ready()
    time.sleep(1000)
async def asynchronous():
    ready()
    await asyncio.sleep(1000)
"""


class Driver:
    """A driver's process, with the frames to and from it."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, **options
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._writes, self._reads = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._frames = FrameReader()
        self.heard: list[Frame] = []
        self.n = -1

    def frame(self, op: str, number: int = 0, body: object = None, **header: Any) -> bytes:
        """Encode a frame with the next number."""
        self.n += 1
        data = None if body is None else dumps(body).encode()
        return encode_frame({"op": op, "id": number, "n": self.n, **header}, data)

    def send(self, data: bytes) -> None:
        """Write to the driver."""
        while data:
            data = data[os.write(self._writes, data) :]

    def start(self, cwd: Path, **settings: Any) -> Self:
        """Send the settings and wait until the driver is ready."""
        values = {"cwd": str(cwd), "heartbeat": None, **settings}
        self.send(self.frame("start", body=asdict(DriverSettings(**values))))
        self.until("ready")
        return self

    def execution(self, number: int, code: str, **header: Any) -> bytes:
        """Encode the frame that starts an execution."""
        body = {"code": code, "variables": {}, "names": ["ask"], "output_fields": None, "queries": False}
        return self.frame("execute", number, body, **{"timeout": None, "context": None, **header})

    def listen(self) -> None:
        """Read the driver's next frames into `heard`. Fails if the driver is silent or has ended."""
        assert select.select([self._reads], [], [], PATIENCE)[0], f"the driver said nothing for {PATIENCE:.0f} s"
        data = os.read(self._reads, 65_536)
        assert data, f"the driver has ended: {self.words()}"
        self.heard += self._frames.feed(data)

    def until(self, op: str, number: int = 0) -> Frame:
        """Return the next frame of that kind, which may have arrived earlier."""
        while True:
            for i, (header, _) in enumerate(self.heard):
                if (header["op"], header["id"]) == (op, number):
                    return self.heard.pop(i)
            self.listen()

    def end(self, number: int) -> tuple[str, Any]:
        """Return the status and the body of an execution's end."""
        header, body = self.until("end", number)
        return header["status"], loads((body or b"null").decode())

    def submitted(self, number: int) -> Any:
        """Return the fields that the execution submits."""
        status, body = self.end(number)
        assert status == "submitted", (status, body)
        return body

    def words(self) -> str:
        """Return the driver's standard error."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        return (self.process.stderr.read() or b"").decode()

    def close(self) -> None:
        """Close the driver's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> None:
        """Wait for the driver to end."""
        self.process.wait(PATIENCE)


async def execute(is_sync: bool, code: str, **tools: Callable[..., Any]) -> Result:
    """Run code in a sandbox without isolation, by the interpreter of scripts or by the async one.

    The sandbox must still run code afterwards, even if the code failed.
    """

    def run_in_script() -> Result:
        with LocalInterpreter(isolation="none", tools=tools) as interpreter:
            try:
                return interpreter.execute(code)
            finally:
                assert interpreter.execute("SUBMIT(1)").output == 1

    if is_sync:
        return await asyncio.to_thread(run_in_script)
    async with LocalSandbox(isolation="none").interpreter(tools=tools) as interpreter:
        try:
            return await interpreter.execute(code)
        finally:
            assert (await interpreter.execute("SUBMIT(1)")).output == 1


def read_memory(pid: int | str, field: str) -> int:
    """Return a field of a process's status in KiB; 0 if the process has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0])
    return 0


@pytest.fixture(scope="session")
def driver_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the driver as one text program, as a sandbox gets it."""
    path = tmp_path_factory.mktemp("driver") / "driver.py"
    path.write_bytes(build_driver_text())
    return path


@pytest.fixture
def launch(driver_file: Path) -> Iterator[Callable[..., Driver]]:
    """Yield a function that starts drivers, with this Python or with another command."""
    launched: list[Driver] = []

    def launch(*command: str, **options: Any) -> Driver:
        launched.append(Driver([*(command or (sys.executable, "-I", "-S")), str(driver_file)], **options))
        return launched[-1]

    yield launch
    for one in launched:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdin, one.process.stdout, one.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Run]:
    """Yield a function that starts scripts as a terminal does: each leads a process group."""
    started: list[subprocess.Popen[str]] = []

    def script(text: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(BEGIN + TOOLS + dedent(text))
        command = [sys.executable, str(path)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, **options))  # type: ignore[call-overload]
        return started[-1]

    yield script
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Fail each test here that leaves a process."""
