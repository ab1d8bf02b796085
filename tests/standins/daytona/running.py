"""The Daytona stand-in in a separate process, for tests and benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self


class Running:
    """A context manager for a stand-in in a separate process, which ends with this one."""

    def __init__(self, **settings: Any) -> None:
        options = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), "--until-eof", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().decode() for _ in range(2)]
        self.environment = dict(line.strip().removeprefix("export ").split("=", 1) for line in lines if line)
        if len(self.environment) < 2:
            raise RuntimeError(f"the stand-in did not start (status {self.process.wait()})")
        self.url = self.environment["DAYTONA_API_URL"]
        self.key = self.environment["DAYTONA_API_KEY"]

    def _call(self, data: bytes | None) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.removesuffix("/api") + "/standin", data, timeout=90) as answer:
            return json.load(answer)

    def set(self, **settings: Any) -> None:
        """Change settings while the stand-in runs."""
        self._call(json.dumps(settings).encode())

    def state(self) -> dict[str, Any]:
        """Return the stand-in's state and the count of each call."""
        return self._call(None)

    def cut(self) -> None:
        """Break every connection that follows a log."""
        self._call(json.dumps({"cut": True}).encode())

    def reset(self) -> None:
        """Remove everything, clear the counts, and restore the settings of the start."""
        self._call(json.dumps({"reset": True}).encode())

    def stop(self) -> None:
        """End the stand-in and all of its processes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
