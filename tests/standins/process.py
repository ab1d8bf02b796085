"""A stand-in in a separate process, which takes a JSON request per line and ends with its standard input."""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class StandinProcess:
    """A context manager that starts the stand-in of that name; `hello` is its first message."""

    def __init__(self, name: str) -> None:
        package = Path(__file__).with_name(name)
        program = package if package.is_dir() else package.with_suffix(".py")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(program), "--pipe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C in the terminal reaches only the tests
        )
        self.pid = self._process.pid
        self.hello: dict[str, Any] = self._read()

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send a request and return the answer. Raises RuntimeError if the answer is an error."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._read()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the stand-in has ended with status {self._process.wait(60)}"
        return json.loads(line)

    def __enter__(self) -> StandinProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class DaytonaStandin(StandinProcess):
    """The stand-in of Daytona. Its `environment` directs the SDK to it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("daytona")
        self.url, self.key = self.hello["url"], self.hello["key"]
        self.environment = {"DAYTONA_API_URL": self.url, "DAYTONA_API_KEY": self.key}
        self._settings = settings
        self.set(**settings)

    def set(self, **settings: Any) -> None:
        """Change settings while the stand-in runs."""
        self.ask("set", **settings)

    def state(self) -> dict[str, Any]:
        """Return the stand-in's state and the count of each call."""
        return self.ask("state")

    def cut(self) -> None:
        """Break every connection that follows a log."""
        self.ask("cut")

    def reset(self) -> None:
        """Remove everything, clear the counts, and restore the settings of the start."""
        self.ask("reset")
        self.set(**self._settings)


async def answer_requests(standin: Any, stop: Callable[[], object]) -> None:
    """Answer the requests on standard input: `op` names a method `ask_OP`, and the rest are its arguments.

    At the end of the input, call `stop`.
    """
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            arguments = json.loads(line)
            value = getattr(standin, "ask_" + arguments.pop("op"))(**arguments)
            answer = {"value": await value if asyncio.iscoroutine(value) else value}
        except Exception as error:  # noqa: BLE001 - the test gets the error
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    stop()


def say_hello(values: dict[str, Any], *, is_piped: bool, **variables: str) -> None:
    """Print the first message of a stand-in, or for a person the variables to export."""
    if is_piped:
        print(json.dumps(values), flush=True)
    else:
        for name, value in variables.items():
            print(f"export {name}={value}", flush=True)
        print("# Ctrl-C ends it, and every sandbox in it.", flush=True)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
