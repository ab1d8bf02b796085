"""A driver that is started by hand and spoken to in frames, scripts, and the check that their processes are gone."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest

from rlm_batch.sandbox.driver_bundle import build_driver_text
from rlm_batch.sandbox.driver_settings import DriverSettings
from rlm_batch.sandbox.wire.frames import FrameReader, encode_frame
from rlm_batch.sandbox.wire.strict_json import dumps, loads

Frame = tuple[dict[str, Any], bytes | None]
Run = Callable[..., subprocess.Popen[str]]
PATIENCE = 20.0  # seconds after which a driver that says nothing fails the test
SCRIPT_PATIENCE = 40.0  # seconds that a script has to end, on a busy machine; what it waits for in vain takes 1000

BEGIN = """
import asyncio, os, sys, time
from rlm_batch import LocalInterpreter
def ready():
    os.write(1, b"ready\\n")  # in one piece, whatever other threads say
"""
# Functions of the host that take for ever.
TOOLS = """
def plain():
    ready()
    time.sleep(1000)
async def asynchronous():
    ready()
    await asyncio.sleep(1000)
"""


class Driver:
    """A driver's process, and both ends of its wire."""

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
        """A frame's bytes, with the next number."""
        self.n += 1
        data = None if body is None else dumps(body).encode()
        return encode_frame({"op": op, "id": number, "n": self.n, **header}, data)

    def send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._writes, data) :]

    def start(self, cwd: Path, **settings: Any) -> Self:
        values = {"cwd": str(cwd), "heartbeat": None, **settings}
        self.send(self.frame("start", body=asdict(DriverSettings(**values))))
        self.until("ready")
        return self

    def execution(self, number: int, code: str, **header: Any) -> bytes:
        """The frame of an execution."""
        body = {"code": code, "variables": {}, "names": ["ask"], "output_fields": None, "queries": False}
        return self.frame("execute", number, body, **{"timeout": None, "context": None, **header})

    def listen(self, seconds: float) -> bool:
        """Takes what the driver says within that time; false where it has closed the wire."""
        if select.select([self._reads], [], [], seconds)[0]:
            data = os.read(self._reads, 65_536)
            self.heard += self._frames.feed(data)
            return data != b""
        return True

    def until(self, op: str, number: int = 0) -> Frame:
        """The next frame of that kind, which may have been heard already."""
        end = time.monotonic() + PATIENCE
        while True:
            for i, (header, body) in enumerate(self.heard):
                if (header["op"], header["id"]) == (op, number):
                    del self.heard[i]
                    return header, body
            assert time.monotonic() < end, f"no {op} within {PATIENCE} s"
            assert self.listen(1.0), f"the driver has ended: {self.words()}"

    def submitted(self, number: int) -> Any:
        """What that execution hands back."""
        header, body = self.until("end", number)
        assert header["status"] == "submitted", (header, body)
        return loads((body or b"").decode())

    def words(self) -> str:
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        return (self.process.stderr.read() or b"").decode()

    def close(self) -> None:
        """Ends the wire."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def ends(self) -> bool:
        """Whether it has ended, after a while at most."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return False
        return True


@pytest.fixture(scope="session")
def driver_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver as one program of text, as a sandbox is sent it."""
    path = tmp_path_factory.mktemp("driver") / "driver.py"
    path.write_bytes(build_driver_text())
    return path


@pytest.fixture
def launch(driver_file: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers, with this Python or with the command line that is given."""
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
    """Starts scripts, each as a terminal would: the leader of a process group."""
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
    """Every test here starts processes."""
