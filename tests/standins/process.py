"""A stand-in in a separate process, which takes a JSON request per line and ends with its standard input."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class StandinProcess:
    """A context manager that starts the stand-in of that name; `hello` is its first message."""

    def __init__(self, name: str, *options: str) -> None:
        package = Path(__file__).with_name(name)
        program = package if package.is_dir() else package.with_suffix(".py")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(program), "--pipe", *options],
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
