"""A private Redis on loopback for the tests' Prefect servers, from the program of this machine."""

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from .bound_process import start_bound_process
from .logged_process import choose_port


class RedisServer:
    """A context manager for a Redis server; `port` is where it listens.

    The server keeps its data in a file of its folder, like the one in compose.yaml.
    """

    def __init__(self) -> None:
        self.port = choose_port()

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.start()
        return self

    def start(self) -> None:
        """Start the server; after `end`, it still has its earlier data."""
        where = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder))
        with (self._folder / "log").open("ab") as log:
            self._process = start_bound_process(
                ["redis-server", *where, "--appendonly", "yes"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + 30
        while not self._answers():
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"redis-server did not start: {(self._folder / 'log').read_text()}")
            time.sleep(0.05)

    def end(self) -> None:
        """Terminate the server; its data stays in its folder."""
        self._process.terminate()
        self._process.wait(30)

    def __exit__(self, *_: object) -> None:
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as asking:
                asking.sendall(b"PING\r\n")
                return asking.recv(16).startswith(b"+PONG")
        except OSError:
            return False
